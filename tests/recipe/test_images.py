"""Images: sources, sizes, limits, preprocessing, and a fetcher that stays on the public internet."""

from __future__ import annotations

import base64
import contextlib
import io
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import deepseek_recipe as recipe
from deepseek_recipe.images import fetch
from deepseek_recipe.images.sizing import image_size

pillow = pytest.importorskip("PIL.Image")


def image_file(width: int, height: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    pillow.new(mode, (width, height), "red").save(out, kind)
    return out.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


class NoFetcher:
    """Fails the test when anything is fetched."""

    def fetch(self, url: str) -> bytes:
        raise AssertionError(f"fetched {url}")


RESOLVER = recipe.ImageResolver(NoFetcher(), recipe.OpenCvImagePreprocessor())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_an_image_becomes_webp_of_the_size_that_the_model_sees(kind: str) -> None:
    source = recipe.BytesImageSource(image_file(50, 60, kind))
    found = RESOLVER.resolve([source], recipe.ImageQuota())
    (image,) = found.images
    assert (image.width, image.height, found.image_token_adjustment()) == (504, 602, 196)
    decoded = pillow.open(io.BytesIO(image.data))
    assert (decoded.format, decoded.size, decoded.mode) == ("WEBP", (504, 602), "RGB")


def test_an_image_is_scaled_to_fit_and_centred_on_grey() -> None:
    found = RESOLVER.resolve([recipe.BytesImageSource(image_file(100, 30))], recipe.ImageQuota()).images[0]
    decoded = pillow.open(io.BytesIO(found.data))
    red, grey = decoded.getpixel((found.width // 2, found.height // 2)), decoded.getpixel((found.width // 2, 0))
    assert red[0] > 200
    assert all(abs(channel - 127) < 25 for channel in grey)


def test_low_detail_shrinks_first() -> None:
    sizes = []
    for detail in ("low", "high"):
        source = recipe.BytesImageSource(image_file(1000, 800), detail)
        image = RESOLVER.resolve([source], recipe.ImageQuota()).images[0]
        sizes.append((image.width, image.height))
    assert sizes == [(616, 490), (1008, 812)]


@pytest.mark.parametrize(
    "size", [(1, 1), (5000, 1), (17, 5986), (8192, 8192), (300, 300), (3, 100_000), (2**32 - 1, 7)]
)
def test_a_settled_size_is_a_fixed_point_within_the_token_limit(size: tuple[int, int]) -> None:
    settled = image_size(*size)
    assert image_size(settled.width, settled.height) == settled
    assert 174 <= settled.tokens <= 1024
    assert settled.width % 14 == settled.height % 14 == 0


@pytest.mark.parametrize(("size", "tokens"), [((0, 0), 2), ((0, 100), 5), ((100, 0), 2), ((0, 10**6), 1024)])
def test_a_side_of_nothing_counts_as_no_cells(size: tuple[int, int], tokens: int) -> None:
    images = recipe.MultiModalData([recipe.ImageInfo(b"", *size)])
    assert images.image_token_adjustment() == tokens - 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (recipe.BytesImageSource(b"", path="p"), "EmptyImage"),
        (recipe.BytesImageSource(b"hello", path="p"), "UnsupportedMediaType"),
        (recipe.BytesImageSource(image_file(50, 60, "BMP"), path="p"), "UnsupportedMediaType"),
        (recipe.BytesImageSource(image_file(50, 60)[:60], path="p"), "Decode"),
        (recipe.BytesImageSource(image_file(9000, 10), path="p"), "ImageDimensionsTooLarge"),
        (recipe.BytesImageSource(b"x" * (32 * 2**20 + 1), path="p"), "ImageTooLarge"),
        (recipe.DataUrlImageSource("nothing", path="p"), "InvalidDataUrl"),
        (recipe.DataUrlImageSource("data:image/png;base64,!!", path="p"), "InvalidDataUrl"),
        (recipe.DataUrlImageSource(data_url(b"x", "text/plain"), path="p"), "UnsupportedMediaType"),
        (recipe.UrlImageSource("ftp://x", path="p"), "InvalidUrl"),
        (recipe.UrlImageSource("http://" + "x" * 8186, path="p"), "UrlTooLong"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_image_is_an_error_with_its_place_and_kind(source: recipe.ImageSource, kind: str) -> None:
    quota = recipe.ImageQuota()
    with pytest.raises(recipe.ImageError, match=r"^p\.image\[0\]: ") as caught:
        RESOLVER.resolve([source], quota)
    assert (caught.value.kind, caught.value.is_retryable) == (kind, False)
    assert (quota.image_count(), quota.byte_size()) == (0, 0)


def test_a_quota_carries_over_calls() -> None:
    quota = recipe.ImageQuota()
    data = image_file(50, 60)
    RESOLVER.resolve([recipe.BytesImageSource(data)], quota)
    RESOLVER.resolve([recipe.DataUrlImageSource(data_url(data))], quota)
    assert (quota.image_count(), quota.byte_size()) == (2, 2 * len(data))
    with pytest.raises(recipe.ImageError, match="limit of 600") as caught:
        RESOLVER.resolve([recipe.BytesImageSource(data)] * 599, quota)
    assert caught.value.kind == "TooManyImages"


# ---- fetching --------------------------------------------------------------------------------------------------------


class Site(BaseHTTPRequestHandler):
    """Redirects, an image, and an answer that is too long."""

    def do_GET(self) -> None:
        target = {
            "/private": "http://10.0.0.1/",
            "/loop": "/loop",
            "/file": "file:///etc/passwd",
            "/once": "/image",
            "/nowhere": "http://[",
            "/umlaut": "/\xfc?\xfc#\xfc",
        }.get(self.path)
        if target is not None:
            self.send_response(302)
            self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path in ("/drip", "/short"):
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                while self.path == "/drip" and not self.server.is_leaving.wait(0.02):  # type: ignore[attr-defined]
                    self.wfile.write(b"x")
        elif self.path == "/error":
            self.send_error(503)
        else:
            body = b"x" * (100_000 if self.path == "/long" else 10)
            if "%" in self.path:
                body = self.path.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        del format, args


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.is_leaving = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.is_leaving.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


def only_loopback() -> recipe.HttpImageFetcher:
    fetcher = recipe.HttpImageFetcher.with_max_bytes(1_000).with_private_addresses()
    return fetcher.with_destination_filter(lambda host, address: address == "127.0.0.1")


def test_an_allowed_address_is_fetched_and_followed(site: str) -> None:
    assert only_loopback().fetch(f"{site}/image") == b"x" * 10
    assert only_loopback().fetch(f"{site}/once") == b"x" * 10


def test_letters_that_http_cannot_carry_are_percent_encoded(site: str) -> None:
    assert only_loopback().fetch(f"{site}/\u00e9%20a?q=\u00e9") == b"/%C3%A9%20a?q=%C3%A9"
    assert only_loopback().fetch(f"{site}/umlaut") == b"/%C3%BC?%C3%BC"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("path", "kind", "retryable"),
    [
        ("/private", "DestinationRejected", False),
        ("/file", "InvalidUrl", False),
        ("/nowhere", "InvalidUrl", False),
        ("/loop", "Fetch", False),
        ("/long", "ImageTooLarge", False),
        ("/error", "Fetch", True),
        ("/short", "Fetch", True),
    ],
)
def test_a_fetch_that_leads_astray_is_refused(path: str, kind: str, retryable: bool, site: str) -> None:
    with pytest.raises(recipe.ImageError) as caught:
        only_loopback().fetch(site + path)
    assert (caught.value.kind, caught.value.is_retryable) == (kind, retryable)


@pytest.mark.bad_input
def test_a_server_that_sends_a_byte_at_a_time_is_left(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_TOTAL_TIMEOUT_S", 0.2)
    with pytest.raises(recipe.ImageError, match=r"over 0\.2 s") as caught:
        only_loopback().fetch(f"{site}/drip")
    assert (caught.value.kind, caught.value.is_retryable) == ("Fetch", True)


@pytest.mark.bad_input
def test_a_handshake_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_TOTAL_TIMEOUT_S", 0.2)
    left = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc")  # the head of a long handshake record
            while not left.wait(0.02):
                connection.sendall(b"\x00")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        with pytest.raises(recipe.ImageError, match=r"over 0\.2 s"):
            only_loopback().fetch(f"https://127.0.0.1:{listener.getsockname()[1]}/")
        left.set()
        thread.join()


def test_only_addresses_that_the_filter_allows_are_tried(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    look_up, connect = socket.getaddrinfo, socket.create_connection

    def two_addresses(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        hosts = ["127.0.0.2", "127.0.0.1"] if host == "two.example" else [host]
        return [found for one in hosts for found in look_up(one, port, *args, **kwargs)]

    def noting(address: tuple[str, int], *args: Any) -> socket.socket:
        tried.append(address[0])
        return connect(address, *args)

    monkeypatch.setattr(fetch.socket, "getaddrinfo", two_addresses)
    monkeypatch.setattr(fetch.socket, "create_connection", noting)
    assert only_loopback().fetch(f"{site.replace('127.0.0.1', 'two.example')}/image") == b"x" * 10
    assert tried == ["127.0.0.1"]


def failing_filter(host: str, address: str) -> bool:
    raise KeyError(host)


@pytest.mark.bad_input
@pytest.mark.parametrize("answer", [failing_filter, lambda host, address: None, lambda host, address: 1])
def test_a_filter_that_does_not_say_true_refuses(answer: Any, site: str) -> None:
    fetcher = recipe.HttpImageFetcher().with_private_addresses().with_destination_filter(answer)
    with pytest.raises(recipe.ImageError) as caught:
        fetcher.fetch(f"{site}/image")
    assert caught.value.kind == "DestinationRejected"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "224.0.0.1", "100.64.0.1",
     "192.0.0.192", "168.63.129.16", "::1", "fe80::1", "fec0::1", "fc00::1", "::ffff:127.0.0.1", "::127.0.0.1",
     "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "2002:7f00:1::1", "2001:0:7f00:1::1"],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused_after_resolution(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    resolved = [(family, socket.SOCK_STREAM, 6, "", (address, 80))]
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda *args, **kwargs: resolved)
    with pytest.raises(recipe.ImageError, match="not public") as caught:
        recipe.HttpImageFetcher().fetch("http://innocent.example/image.png")
    assert caught.value.kind == "DestinationRejected"


def test_one_bad_address_among_good_ones_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("8.8.8.8", "127.0.0.1")]
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda *args, **kwargs: resolved)
    with pytest.raises(recipe.ImageError, match="not public"):
        recipe.HttpImageFetcher().fetch("http://innocent.example/")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "url", ["", "x", "ftp://a/", "http://", "http://a:0/", "http://a:99999/", "http://a/\r\nX: y", "http://[::1"]
)
def test_what_is_no_http_url_is_refused(url: str) -> None:
    with pytest.raises(recipe.ImageError) as caught:
        recipe.HttpImageFetcher().fetch(url)
    assert caught.value.kind == "InvalidUrl"


def test_conversion_never_fetches() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/secret"}}]
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": parts}]}
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    assert request.conversation.messages[0].image_sources == [
        recipe.UrlImageSource("http://127.0.0.1:1/secret", path=".messages[0]")
    ]
