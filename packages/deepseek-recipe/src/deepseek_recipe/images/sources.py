"""Where the bytes of an image are: a data URL, a URL, or bytes in memory."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
from msgspec.structs import force_setattr

from deepseek_recipe.checks import require_str

__all__ = ["BytesImageSource", "DataUrlImageSource", "Detail", "ImageSource", "UrlImageSource"]

Detail = Literal["low", "high", "original", "auto"]
_DETAILS = ("low", "high", "original", "auto")


class ImageSource:
    """Base of the three kinds; the places that a kind does not use read None.

    `path` names the place in the request body, for error messages.
    """

    __slots__ = ()

    kind: ClassVar[str]
    detail: Detail
    path: str

    @property
    def data_url(self) -> str | None:
        """The whole `data:` URL."""
        return None

    @property
    def url(self) -> str | None:
        """The address to fetch."""
        return None

    @property
    def data(self) -> bytes | None:
        """The encoded image file."""
        return None


def _check(detail: object, path: object) -> None:
    if detail not in _DETAILS:
        raise ValueError(f'invalid detail {detail!r}; expected "low", "high", "original", or "auto"')
    require_str("path", path)


def _copied_bytes(data: object) -> bytes:
    if not isinstance(data, (bytes, bytearray)):
        raise TypeError(f"argument 'data' must be bytes, not {type(data).__name__}")
    return bytes(data)


class DataUrlImageSource(msgspec.Struct, ImageSource, frozen=True):
    """An image inside a `data:` URL."""

    kind: ClassVar[str] = "data_url"
    data_url: str  # pyright: ignore[reportIncompatibleMethodOverride] - a field for the default
    detail: Detail = "high"
    path: str = ""

    def __post_init__(self) -> None:
        require_str("data_url", self.data_url)
        _check(self.detail, self.path)


class UrlImageSource(msgspec.Struct, ImageSource, frozen=True):
    """An image that a fetcher has to get."""

    kind: ClassVar[str] = "url"
    url: str  # pyright: ignore[reportIncompatibleMethodOverride] - a field for the default
    detail: Detail = "high"
    path: str = ""

    def __post_init__(self) -> None:
        require_str("url", self.url)
        _check(self.detail, self.path)


class BytesImageSource(msgspec.Struct, ImageSource, frozen=True):
    """The bytes of an image file (PNG, JPEG, GIF or WebP)."""

    kind: ClassVar[str] = "bytes"
    data: bytes  # pyright: ignore[reportIncompatibleMethodOverride] - a field for the default
    detail: Detail = "high"
    path: str = ""

    def __post_init__(self) -> None:
        force_setattr(self, "data", _copied_bytes(self.data))
        _check(self.detail, self.path)
