"""Image files become lossy WebP of the size that the model sees. Needs the extra `deepseek-recipe[image]` (Pillow).

file ─▶ header checked (format, sides) ─▶ decoded, alpha dropped ─▶ scaled to fit, centred on grey ─▶ WebP
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import msgspec

from deepseek_recipe.checks import require_bytes, require_instance, require_int_in, shown
from deepseek_recipe.errors import ImageError
from deepseek_recipe.images.sizing import image_size
from deepseek_recipe.images.sources import Detail

if TYPE_CHECKING:
    from deepseek_recipe.images.resolve import ImageInfo

__all__ = ["OpenCvImagePreprocessor", "PillowImagePreprocessor", "PreprocessOptions"]

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_GREY = (127, 127, 127)
_WEBP_QUALITY = 80
_MAX_SIDE = 2**32 - 1


class PreprocessOptions(msgspec.Struct, frozen=True):
    """How large an image may be; low detail shrinks the long side to `low_detail_max_dimension_px` first."""

    detail: Detail
    max_dimension_px: int
    low_detail_max_dimension_px: int

    def __post_init__(self) -> None:
        if self.detail not in ("low", "high", "original", "auto"):
            raise ValueError(f'invalid detail {shown(self.detail)}; expected "low", "high", "original", or "auto"')
        require_int_in("max_dimension_px", self.max_dimension_px, 0, _MAX_SIDE)
        require_int_in("low_detail_max_dimension_px", self.low_detail_max_dimension_px, 0, _MAX_SIDE)


class PillowImagePreprocessor:
    """Preprocesses with Pillow. Sizes equal those of the official OpenCV preprocessing; pixels may differ slightly."""

    def preprocess(self, data: bytes, options: PreprocessOptions) -> ImageInfo:
        """The image of a PNG, JPEG, GIF or WebP file. ImageError says what is wrong with it."""
        from deepseek_recipe.images.resolve import ImageInfo

        require_instance("options", options, PreprocessOptions)
        if not require_bytes("data", data):
            raise ImageError("the image is empty", kind="EmptyImage")
        image = _decoded(data, options)
        width, height = image.size
        if options.detail == "low" and max(width, height) > options.low_detail_max_dimension_px:
            factor = options.low_detail_max_dimension_px / max(width, height)
            width, height = max(1, int(width * factor)), max(1, int(height * factor))
        target = image_size(width, height)
        out = io.BytesIO()
        _fitted(image, target.width, target.height).save(out, "WEBP", quality=_WEBP_QUALITY)
        return ImageInfo(out.getvalue(), target.width, target.height)


OpenCvImagePreprocessor = PillowImagePreprocessor
"""The name of the official bindings; there is no OpenCV in it here."""


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ImageError("image preprocessing needs Pillow: install deepseek-recipe[image]", kind="Client") from None
    return Image


def _decoded(data: bytes, options: PreprocessOptions) -> Any:
    """The RGB pixels; the header is checked before any pixel is decoded."""
    pillow = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow.DecompressionBombWarning)  # the sides are checked below
            image = pillow.open(io.BytesIO(data), formats=_FORMATS)
            width, height = image.size
            if max(width, height) > options.max_dimension_px:
                message = f"an image of {width} x {height} px is over the limit of {options.max_dimension_px} px a side"
                raise ImageError(message, kind="ImageDimensionsTooLarge")
            return image.convert("RGB")
    except ImageError:
        raise
    except pillow.DecompressionBombError as error:
        raise ImageError(f"the image is too large: {error}", kind="ImageDimensionsTooLarge") from None
    except pillow.UnidentifiedImageError:
        raise ImageError("not a webp, png, jpeg or gif image", kind="UnsupportedMediaType") from None
    except Exception as error:  # decoders raise many types for broken files
        raise ImageError(f"the image cannot be decoded: {error}", kind="Decode") from None


def _fitted(image: Any, width: int, height: int) -> Any:
    """The image scaled to fit into `width` x `height` and centred on grey."""
    pillow = _pillow()
    factor = min(width / image.width, height / image.height)
    inner = (min(width, max(1, round(image.width * factor))), min(height, max(1, round(image.height * factor))))
    canvas = pillow.new("RGB", (width, height), _GREY)
    scaled = image.resize(inner, pillow.Resampling.BICUBIC)
    canvas.paste(scaled, ((width - inner[0]) // 2, (height - inner[1]) // 2))
    return canvas
