"""Where the bytes of an image are: a data URL, a URL, or bytes in memory."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
from msgspec.structs import force_setattr

from deepseek_recipe.checks import quoted, require_bytes, require_str, shown

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


class _Placed(msgspec.Struct, frozen=True, kw_only=True):
    """What is given by name: `path`."""

    path: str = ""


def _check(detail: object, path: object) -> None:
    require_str("detail", detail)
    if detail not in _DETAILS:
        raise ValueError(f'invalid detail {shown(detail)}; expected "low", "high", "original", or "auto"')
    require_str("path", path)


def _shown(source: ImageSource, where: str) -> str:
    return f"{type(source).__name__}({where}, detail={quoted(source.detail)}, path={quoted(source.path)})"


class DataUrlImageSource(_Placed, ImageSource, frozen=True):
    """An image inside a `data:` URL."""

    kind: ClassVar[str] = "data_url"
    data_url: str  # pyright: ignore[reportIncompatibleMethodOverride] - a field for the default
    detail: Detail = "high"

    def __post_init__(self) -> None:
        require_str("data_url", self.data_url)
        _check(self.detail, self.path)

    def __repr__(self) -> str:
        return _shown(self, quoted(self.data_url))


class UrlImageSource(_Placed, ImageSource, frozen=True):
    """An image that a fetcher has to get."""

    kind: ClassVar[str] = "url"
    url: str  # pyright: ignore[reportIncompatibleMethodOverride] - a field for the default
    detail: Detail = "high"

    def __post_init__(self) -> None:
        require_str("url", self.url)
        _check(self.detail, self.path)

    def __repr__(self) -> str:
        return _shown(self, quoted(self.url))


class BytesImageSource(_Placed, ImageSource, frozen=True):
    """The bytes of an image file (PNG, JPEG, GIF or WebP)."""

    kind: ClassVar[str] = "bytes"
    data: bytes  # pyright: ignore[reportIncompatibleMethodOverride] - a field for the default
    detail: Detail = "high"

    def __post_init__(self) -> None:
        force_setattr(self, "data", require_bytes("data", self.data))
        _check(self.detail, self.path)

    def __repr__(self) -> str:
        return _shown(self, f"<{len(self.data)} bytes>")
