"""Image parts of request bodies become image sources."""

from __future__ import annotations

import base64
import binascii
import re

from deepseek_recipe.checks import shown
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.images.sources import DataUrlImageSource, Detail, ImageSource, UrlImageSource

__all__ = ["base64_source", "data_url_source", "image_source", "url_source"]

_MAX_URL_BYTES = 8192
_MEDIA_TYPES = ("image/webp", "image/png", "image/jpeg", "image/jpg", "image/gif")
_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")


def image_source(url: str, detail: Detail | None, path: str) -> ImageSource:
    """The source of a Chat or Responses image: an http(s) URL or a base64 data URL."""
    scheme = url[:5].lower()
    if scheme.startswith("http"):
        return url_source(url, detail, path, path)
    if scheme != "data:":
        raise ConversionError(f"{path}: the image URL must start with http or be a base64 data URL, got {url[:40]!r}")
    return data_url_source(url, detail, path)


def url_source(url: str, detail: Detail | None, path: str, part_path: str) -> UrlImageSource:
    """The source of an image that a fetcher gets; `part_path` names the part in errors."""
    if url[:4].lower() != "http":
        raise ConversionError(f"{part_path}: the image URL must start with http, got {url[:40]!r}")
    length = len(url.encode())
    if length > _MAX_URL_BYTES:
        raise ConversionError(
            f"{part_path}: an image URL of {length} bytes is longer than the limit of {_MAX_URL_BYTES}; "
            "send the image as a base64 data URL"
        )
    return UrlImageSource(url, detail or "high", path=path)


def data_url_source(url: str, detail: Detail | None, path: str) -> DataUrlImageSource:
    """The source of an image inside a data URL: `data:image/png;base64,...`."""
    header, comma, data = url.partition(",")
    if header[:5].lower() != "data:" or not comma or not header.endswith("base64"):
        raise ConversionError(f"{path}: not a base64 data URL: {url[:40]!r}")
    media_type = header[5:].partition(";")[0].strip().lower()
    if media_type not in _MEDIA_TYPES:
        raise ConversionError(f"{path}: image type {shown(media_type)} is not supported; use webp, png, jpeg or gif")
    if not _is_base64(data):
        raise ConversionError(f"{path}: the data URL does not hold base64")
    return DataUrlImageSource(url, detail or "high", path=path)


def base64_source(media_type: str, data: str, path: str, part_path: str) -> DataUrlImageSource:
    """The source of a Messages image: standard base64 with padding, whose unused bits are zero."""
    bare = data.rstrip("=")
    try:
        raw = base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except (binascii.Error, ValueError):
        raw = None
    padding_missing = len(data) - len(bare) < -len(bare) % 4
    if raw is None or padding_missing or base64.b64encode(raw).rstrip(b"=") != bare.encode():
        raise ConversionError(f"{part_path}: the data of the image is not standard base64 with padding")
    return DataUrlImageSource(f"data:{media_type};base64,{base64.b64encode(raw).decode()}", "high", path=path)


def _is_base64(data: str) -> bool:
    """Whether a lenient reader can decode `data`: padding may be missing."""
    if not _BASE64.fullmatch(data):
        data = re.sub(r"[ \t\n\f\r]", "", data)
        if not _BASE64.fullmatch(data):
            return False
    bare = data.rstrip("=")
    return len(bare) % 4 != 1 and (len(bare) == len(data) or len(data) % 4 == 0)
