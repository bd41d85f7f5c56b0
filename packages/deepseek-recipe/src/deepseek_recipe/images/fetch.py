"""Fetches images over HTTP(S), only from public addresses.

    url ─▶ resolve host ─▶ all public? ─▶ some allowed? ─▶ connect to just those ─▶ redirect? from the start
                            no: DestinationRejected          (no second look-up)          ─▶ body, bounded

A timer ends the whole exchange, since a time limit on single reads does not stop a server that sends a byte at a time.

Nothing in this package fetches on its own: a server that wants to has to build a fetcher and hand it to a resolver.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from deepseek_recipe.checks import require_int_in, require_str, shown
from deepseek_recipe.errors import ImageError

__all__ = ["DestinationFilter", "HttpImageFetcher", "ReqwestImageFetcher"]

DestinationFilter = Callable[[str, str], bool]
"""(host, address) → whether a connection is allowed, beyond the address being public."""

_DEFAULT_MAX_BYTES = 32 * 2**20
_MAX_REDIRECTS = 5
_TIMEOUT_S = 10.0
_TOTAL_TIMEOUT_S = 30.0
_READ_BYTES = 64 * 2**10
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
# Not private by their numbers, but served by the network of a cloud to its own machines.
_INSIDE_CLOUDS = (ipaddress.IPv4Network("192.0.0.0/24"), ipaddress.IPv4Network("168.63.129.16/32"))
_ASCII = bytes(range(128)).decode()
_REDIRECTS = (301, 302, 303, 307, 308)


class HttpImageFetcher:
    """A fetcher with a limit on the bytes of an image. Immutable; `with_destination_filter` returns a copy.

    Addresses that are not public (private, loopback, link-local, reserved ...) are refused after resolution and at
    every redirect. Proxies of the environment are not used.
    """

    def __init__(self) -> None:
        self._max_bytes = _DEFAULT_MAX_BYTES
        self._allows: DestinationFilter | None = None
        self._allow_private = False

    @classmethod
    def with_max_bytes(cls, max_bytes: int) -> HttpImageFetcher:
        """A fetcher with another limit on the bytes of an image."""
        require_int_in("max_bytes", max_bytes, 0, 2**63 - 1)
        fetcher = cls()
        fetcher._max_bytes = max_bytes
        return fetcher

    def with_destination_filter(self, destination_filter: DestinationFilter) -> HttpImageFetcher:
        """A copy that also asks `destination_filter(host, address)` before every connection.

        An address is refused unless the answer is True; a filter that raises refuses too.
        """
        if not callable(destination_filter):
            raise TypeError(f"argument 'destination_filter' must be callable, not {type(destination_filter).__name__}")
        return self._copy(allows=destination_filter)

    def with_private_addresses(self) -> HttpImageFetcher:
        """A copy that may also connect to private addresses, for closed networks; combine it with a filter."""
        return self._copy(allow_private=True)

    def fetch(self, url: str) -> bytes:
        """The body behind `url`. ImageError: InvalidUrl, DestinationRejected, ImageTooLarge, Fetch (retryable)."""
        require_str("url", url)
        deadline_s = time.monotonic() + _TOTAL_TIMEOUT_S
        for _ in range(_MAX_REDIRECTS + 1):
            parts = _checked_url(url)
            target, body = self._get(parts, deadline_s)
            if body is not None:
                return body
            url = _redirected(url, target or "")
        raise ImageError(f"more than {_MAX_REDIRECTS} redirects", kind="Fetch")

    def _copy(self, *, allows: DestinationFilter | None = None, allow_private: bool | None = None) -> HttpImageFetcher:
        copy = type(self)()
        copy._max_bytes = self._max_bytes
        copy._allows = self._allows if allows is None else allows
        copy._allow_private = self._allow_private if allow_private is None else allow_private
        return copy

    def _get(self, parts: SplitResult, deadline_s: float) -> tuple[str | None, bytes | None]:
        """(redirect target, None) or (None, body)."""
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        connection = _PinnedConnection(host, port, self._allowed_addresses(host, port), tls=parts.scheme == "https")
        path = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_ASCII)
        timer = threading.Timer(max(deadline_s - time.monotonic(), 0.0), connection.shut_down)
        timer.daemon = True
        timer.start()
        try:
            connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "deepseek-recipe"})
            response = connection.getresponse()
            if response.status in _REDIRECTS:
                return response.headers.get("Location", ""), None
            if response.status != 200:
                retryable = response.status >= 500 or response.status in (408, 429)
                raise ImageError(f"{host} answered {response.status}", kind="Fetch", is_retryable=retryable)
            return None, self._read(response, deadline_s)
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            _check_deadline(deadline_s)
            raise ImageError(f"cannot fetch from {host}: {error}", kind="Fetch", is_retryable=True) from None
        finally:
            timer.cancel()
            connection.close()

    def _allowed_addresses(self, host: str, port: int) -> list[str]:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ImageError(f"cannot resolve {shown(host)}: {error}", kind="Fetch", is_retryable=True) from None
        addresses = [str(info[4][0]) for info in found]
        for address in addresses:
            if not self._allow_private and not _is_public(address):
                raise ImageError(f"{host} resolves to {address}, which is not public", kind="DestinationRejected")
        allowed = [address for address in addresses if self._is_allowed(host, address)]
        if not allowed:
            raise ImageError(f"{host} at {', '.join(addresses)} is refused by the filter", kind="DestinationRejected")
        return allowed

    def _is_allowed(self, host: str, address: str) -> bool:
        if self._allows is None:
            return True
        try:
            return self._allows(host, address) is True
        except Exception:  # a filter that cannot tell must not let through
            return False

    def _read(self, response: http.client.HTTPResponse, deadline_s: float) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        while chunk := response.read1(_READ_BYTES):
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                raise ImageError(f"the image is over the limit of {self._max_bytes} bytes", kind="ImageTooLarge")
            chunks.append(chunk)
        _check_deadline(deadline_s)
        if response.length:
            raise ImageError(f"the body ends {response.length} bytes early", kind="Fetch", is_retryable=True)
        return b"".join(chunks)


def _check_deadline(deadline_s: float) -> None:
    if time.monotonic() >= deadline_s:
        raise ImageError(f"fetching took over {_TOTAL_TIMEOUT_S:g} s", kind="Fetch", is_retryable=True)


ReqwestImageFetcher = HttpImageFetcher
"""The name of the official bindings; it is Python's own HTTP client here."""


class _PinnedConnection(http.client.HTTPConnection):
    """A connection to one of the addresses that were checked, under the name of their host."""

    def __init__(self, host: str, port: int, addresses: list[str], *, tls: bool) -> None:
        super().__init__(host, port, timeout=_TIMEOUT_S)
        self._addresses = addresses
        self._tls = tls
        self._is_shut = False

    def connect(self) -> None:
        for address in self._addresses[:-1]:
            try:
                self._connect_to(address)
            except OSError:
                continue
            return
        self._connect_to(self._addresses[-1])

    def shut_down(self) -> None:
        """Ends the exchange from another thread: whoever waits for the server sees its end."""
        self._is_shut = True
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def _connect_to(self, address: str) -> None:
        if self._is_shut:
            raise TimeoutError("out of time")
        self.sock = socket.create_connection((address, self.port), self.timeout)
        if self._tls:
            # The handshake comes after the assignment, so that `shut_down` finds the socket that waits in it.
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
            self.sock.do_handshake()


def _is_public(address: str) -> bool:
    """Whether an address, and every IPv4 address that a gateway would unpack from it, is of the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not ip.is_multicast and not any(ip in network for network in _INSIDE_CLOUDS)
    unpacked = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
    if ip in _NAT64:
        unpacked.append(ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF))
    is_wrapped = ip.ipv4_mapped is not None or ip in _NAT64
    is_public = is_wrapped or (ip in _GLOBAL_UNICAST and ip.is_global)
    return is_public and all(_is_public(str(one)) for one in unpacked if one is not None)


def _redirected(url: str, target: str) -> str:
    try:
        return urljoin(url, target)
    except ValueError as error:
        raise ImageError(f"redirected to {shown(target)}, which is not a URL: {error}", kind="InvalidUrl") from None


def _checked_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ImageError(f"not a URL: {error}", kind="InvalidUrl") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port:
        raise ImageError(f"not an http(s) URL: {url[:80]!r}", kind="InvalidUrl")
    if any(ord(char) <= 32 or ord(char) == 127 for char in url):
        raise ImageError("the URL holds blanks or control characters", kind="InvalidUrl")
    return parts
