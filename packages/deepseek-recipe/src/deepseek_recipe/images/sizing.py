"""How many tokens an image takes, and the size that it is given for that.

side 14 px = a patch, 3 x 3 patches = a token; tokens = rows * (cols + 1) + 2     one end of line a row, start, end

1. enlarge below 544^2 px                       (one factor for both sides, truncated)
2. round up to whole patches
3. above 1024 tokens: shrink to the largest grid of the same shape that fits, round down to whole patches
4. again, until nothing changes
"""

from __future__ import annotations

import math
from typing import NamedTuple

from deepseek_recipe.checks import require_int_in
from deepseek_recipe.errors import CalcResizeError

__all__ = ["ImageSize", "image_size"]

_PATCH_PX = 14
_CELL_PX = 3 * _PATCH_PX
_MIN_PIXELS = 544 * 544
_MAX_TOKENS = 1024
_MAX_GRID_TOKENS = _MAX_TOKENS - 2
_MAX_ROUNDS = 64
_MAX_SIDE_PX = 2**32 - 1


class ImageSize(NamedTuple):
    """The size that an image is scaled to, and its tokens."""

    width: int
    height: int
    tokens: int


def image_size(width: int, height: int) -> ImageSize:
    """The settled size of an image of `width` x `height` pixels.

    CalcResizeError for a size that does not settle.
    """
    require_int_in("width", width, 0, _MAX_SIDE_PX)
    require_int_in("height", height, 0, _MAX_SIDE_PX)
    size = (width, height)
    for _ in range(_MAX_ROUNDS):
        settled = _one_round(*size)
        if settled == size:
            return ImageSize(*size, _tokens(*size))
        size = settled
    raise CalcResizeError(f"the size of an image of {width} x {height} pixels does not settle")


def _one_round(width: int, height: int) -> tuple[int, int]:
    if 0 < width * height < _MIN_PIXELS:
        factor = math.sqrt(_MIN_PIXELS / (width * height))
        width, height = int(width * factor), int(height * factor)
    width, height = _whole_patches_up(width), _whole_patches_up(height)
    if _tokens(width, height) <= _MAX_TOKENS:
        return width, height
    ratio = height / width if width else math.inf
    cols = math.sqrt(_MAX_GRID_TOKENS / ratio + 0.25) - 0.5
    rows = cols * ratio
    if cols < 1:
        return _CELL_PX, (_MAX_GRID_TOKENS // 2) * _CELL_PX
    if rows < 1:
        return (_MAX_GRID_TOKENS - 1) * _CELL_PX, _CELL_PX
    factor = min(math.floor(cols) * _CELL_PX / width, math.floor(rows) * _CELL_PX / height)
    return _whole_patches_down(width * factor), _whole_patches_down(height * factor)


def _tokens(width: int, height: int) -> int:
    cols, rows = (math.ceil(side // _PATCH_PX / 3) for side in (width, height))
    return rows * (cols + 1) + 2


def _whole_patches_up(side: int) -> int:
    return -(-side // _PATCH_PX) * _PATCH_PX


def _whole_patches_down(side: float) -> int:
    return int(side / _PATCH_PX) * _PATCH_PX
