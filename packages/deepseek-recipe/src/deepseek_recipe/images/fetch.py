"""Fetches images over HTTP(S), only from public addresses.

    url ─▶ resolve host ─▶ every address public and allowed? ─▶ connect to just that address ─▶ redirect? from the start
                            no: DestinationRejected              (no second look-up in between)     ─▶ body, bounded

Nothing in this package fetches on its own: a server that wants to has to build a fetcher and hand it to a resolver.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from urllib.parse import SplitResult, urljoin, urlsplit

from deepseek_recipe.checks import require_int_in
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

    def with_destination_filter(self, allows: DestinationFilter) -> HttpImageFetcher:
        """A copy that also asks `allows(host, address)` before every connection."""
        if not callable(allows):
            raise TypeError(f"argument 'allows' must be callable, not {type(allows).__name__}")
        return self._copy(allows=allows)

    def with_private_addresses(self) -> HttpImageFetcher:
        """A copy that may also connect to private addresses, for closed networks; combine it with a filter."""
        return self._copy(allow_private=True)

    def fetch(self, url: str) -> bytes:
        """The body behind `url`. ImageError: InvalidUrl, DestinationRejected, ImageTooLarge, Fetch (retryable)."""
        deadline_s = time.monotonic() + _TOTAL_TIMEOUT_S
        for _ in range(_MAX_REDIRECTS + 1):
            parts = _checked_url(url)
            target, body = self._get(parts, deadline_s)
            if body is not None:
                return body
            url = urljoin(url, target or "")
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
        connection = _PinnedConnection(host, port, self._allowed_address(host, port), tls=parts.scheme == "https")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
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
            raise ImageError(f"cannot fetch from {host}: {error}", kind="Fetch", is_retryable=True) from None
        finally:
            connection.close()

    def _allowed_address(self, host: str, port: int) -> str:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ImageError(f"cannot resolve {host!r}: {error}", kind="Fetch", is_retryable=True) from None
        addresses = [str(info[4][0]) for info in found]
        for address in addresses:
            if not self._allow_private and not _is_public(address):
                raise ImageError(f"{host} resolves to {address}, which is not public", kind="DestinationRejected")
            if self._allows is not None and not self._allows(host, address):
                raise ImageError(f"{host} at {address} is refused by the filter", kind="DestinationRejected")
        return addresses[0]

    def _read(self, response: http.client.HTTPResponse, deadline_s: float) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        while chunk := response.read(_READ_BYTES):
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                raise ImageError(f"the image is over the limit of {self._max_bytes} bytes", kind="ImageTooLarge")
            if time.monotonic() > deadline_s:
                raise ImageError(f"fetching took over {_TOTAL_TIMEOUT_S:g} s", kind="Fetch", is_retryable=True)
            chunks.append(chunk)
        return b"".join(chunks)


ReqwestImageFetcher = HttpImageFetcher
"""The name of the official bindings; it is Python's own HTTP client here."""


class _PinnedConnection(http.client.HTTPConnection):
    """A connection to an address that was checked, under the name of its host."""

    def __init__(self, host: str, port: int, address: str, *, tls: bool) -> None:
        super().__init__(host, port, timeout=_TIMEOUT_S)
        self._address = address
        self._tls = tls

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._tls:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def _is_public(address: str) -> bool:
    """Whether an address, and every IPv4 address that a gateway would unpack from it, is of the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    unpacked: list[ipaddress.IPv4Address | ipaddress.IPv6Address | None] = [ip]
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            unpacked = [ip.ipv4_mapped]
        unpacked.append(ip.sixtofour)
        unpacked.extend(ip.teredo or ())
        if ip in _NAT64:
            unpacked.append(ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF))
    return all(one.is_global and not one.is_multicast for one in unpacked if one is not None)


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
