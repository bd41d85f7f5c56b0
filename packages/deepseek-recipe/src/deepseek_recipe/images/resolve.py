"""From image sources to the images that an engine takes, within the limits of a request.

source ─▶ bytes (data URL decoded, URL fetched) ─▶ preprocessed image ─▶ MultiModalData
quota: 600 images of 32 MiB each, 64 MiB together; it carries over calls and stays as it was when a call fails
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeVar

import msgspec
from msgspec.structs import force_setattr

from deepseek_recipe.checks import require_bytes, require_instance, require_int_in, require_list
from deepseek_recipe.errors import ImageError
from deepseek_recipe.images.preprocess import PreprocessOptions
from deepseek_recipe.images.sizing import image_size
from deepseek_recipe.images.sources import ImageSource

__all__ = ["ImageFetcher", "ImageInfo", "ImagePreprocessor", "ImageQuota", "ImageResolver", "MultiModalData"]

MAX_IMAGES = 600
MAX_IMAGE_BYTES = 32 * 2**20
MAX_REQUEST_BYTES = 64 * 2**20
MAX_URL_BYTES = 8192
MAX_SIDE_PX = 8192
LOW_DETAIL_MAX_SIDE_PX = 512
_MAX_SIZE = 2**32 - 1
_Result = TypeVar("_Result")


class ImageInfo(msgspec.Struct, frozen=True):
    """A preprocessed image: an encoded file and its size in pixels."""

    data: bytes
    width: int
    height: int

    def __post_init__(self) -> None:
        force_setattr(self, "data", require_bytes("data", self.data))
        require_int_in("width", self.width, 0, _MAX_SIZE)
        require_int_in("height", self.height, 0, _MAX_SIZE)

    def __repr__(self) -> str:
        return f"ImageInfo(<{len(self.data)} bytes>, {self.width}, {self.height})"


def _no_images() -> list[ImageInfo]:
    return []


class MultiModalData(msgspec.Struct, frozen=True):
    """The images of a prompt, in the order of their placeholders."""

    images: list[ImageInfo] = msgspec.field(default_factory=_no_images)

    def __post_init__(self) -> None:
        force_setattr(self, "images", require_list("images", self.images or (), ImageInfo))

    def is_empty(self) -> bool:
        """Whether there are no images."""
        return not self.images

    def image_token_adjustment(self) -> int:
        """How many tokens the images add to the ids of the prompt, where each takes one placeholder."""
        return sum(image_size(image.width, image.height).tokens - 1 for image in self.images)


class ImageQuota:
    """What a request has used of its limits."""

    __slots__ = ("_byte_size", "_image_count")

    def __init__(self) -> None:
        self._image_count = 0
        self._byte_size = 0

    def image_count(self) -> int:
        """Images so far."""
        return self._image_count

    def byte_size(self) -> int:
        """Bytes of their files so far."""
        return self._byte_size

    def _use(self, image_count: int, byte_size: int) -> None:
        self._image_count, self._byte_size = image_count, byte_size

    def __repr__(self) -> str:
        return f"ImageQuota(image_count={self._image_count}, byte_size={self._byte_size})"


class ImageFetcher(Protocol):
    """Gets the bytes behind a URL."""

    def fetch(self, url: str) -> bytes: ...


class ImagePreprocessor(Protocol):
    """Turns an image file into the image that an engine takes."""

    def preprocess(self, data: bytes, options: PreprocessOptions) -> ImageInfo: ...


class ImageResolver:
    """Resolves sources with a fetcher and a preprocessor of the caller's choice."""

    def __init__(self, fetcher: ImageFetcher, preprocessor: ImagePreprocessor) -> None:
        for name, value, method in (("fetcher", fetcher, "fetch"), ("preprocessor", preprocessor, "preprocess")):
            if not callable(getattr(value, method, None)):
                raise TypeError(f"argument {name!r} must have a method {method!r}, and {type(value).__name__} has none")
        self._fetcher = fetcher
        self._preprocessor = preprocessor

    def resolve(self, sources: Iterable[ImageSource], quota: ImageQuota) -> MultiModalData:
        """The images of all sources. ImageError names the place, the limit and the cause; the quota then stays."""
        pending = require_list("sources", sources, ImageSource)
        require_instance("quota", quota, ImageQuota)
        image_count = quota.image_count() + len(pending)
        byte_size = quota.byte_size()
        if image_count > MAX_IMAGES:
            place = pending[0].path
            message = f"{place}: {image_count} images are more than the limit of {MAX_IMAGES} of a request"
            raise ImageError(message, kind="TooManyImages")
        images: list[ImageInfo] = []
        for index, source in enumerate(pending):
            place = f"{source.path}.image[{index}]"
            data = self._bytes_of(source, place)
            byte_size += len(data)
            _check_bytes(len(data), byte_size, place)
            options = PreprocessOptions(source.detail, MAX_SIDE_PX, LOW_DETAIL_MAX_SIDE_PX)
            images.append(_at_place(place, partial(self._preprocessor.preprocess, data, options)))
        quota._use(image_count, byte_size)  # pyright: ignore[reportPrivateUsage] - the two belong together
        return MultiModalData(images)

    def _bytes_of(self, source: ImageSource, place: str) -> bytes:
        if source.data is not None:
            return source.data
        if source.data_url is not None:
            return decode_data_url(source.data_url, place)
        url = source.url or ""
        if url[:4].lower() != "http":
            raise ImageError(f"{place}: the URL must start with http, got {url[:40]!r}", kind="InvalidUrl")
        if len(url.encode()) > MAX_URL_BYTES:
            message = f"{place}: a URL of {len(url.encode())} bytes is longer than the limit of {MAX_URL_BYTES}"
            raise ImageError(message, kind="UrlTooLong")
        return _at_place(place, partial(self._fetcher.fetch, url))


def decode_data_url(url: str, place: str) -> bytes:
    """The bytes inside a base64 data URL of an image type."""
    header, comma, text = url.partition(",")
    if header[:5].lower() != "data:" or not comma or not header.endswith("base64"):
        raise ImageError(f"{place}: not a base64 data URL: {url[:40]!r}", kind="InvalidDataUrl")
    if not header[5:].strip().lower().startswith("image/"):
        raise ImageError(f"{place}: {header[5:60]!r} does not declare an image", kind="UnsupportedMediaType")
    bare = text.rstrip("=")
    try:
        return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ImageError(f"{place}: the data URL does not hold base64", kind="InvalidDataUrl") from None


def _check_bytes(image_bytes: int, request_bytes: int, place: str) -> None:
    if not image_bytes:
        raise ImageError(f"{place}: the image is empty", kind="EmptyImage")
    if image_bytes > MAX_IMAGE_BYTES:
        message = f"{place}: {image_bytes} bytes are more than the limit of {MAX_IMAGE_BYTES} of an image"
        raise ImageError(message, kind="ImageTooLarge")
    if request_bytes > MAX_REQUEST_BYTES:
        message = f"{place}: the images of this request are together more than {MAX_REQUEST_BYTES} bytes"
        raise ImageError(message, kind="TotalSizeTooLarge")


def _at_place(place: str, work: Callable[[], _Result]) -> _Result:
    """The result of `work`; an ImageError of it gets the place in front."""
    try:
        return work()
    except ImageError as error:
        raise ImageError(f"{place}: {error}", kind=error.kind, is_retryable=error.is_retryable) from None
