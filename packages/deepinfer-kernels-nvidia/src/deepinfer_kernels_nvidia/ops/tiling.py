"""How wide the tile of a product is, and what that may not change.

A block of threads makes 128 rows of some columns of the result, a multiprocessor one block at a time, so a product
takes as long as its waves of blocks: the widest tile is the fastest for each column, but a narrower one may leave less
of the last wave empty. Measured on one H200, columns a microsecond, relative to 256 columns:

    columns   256   192   160   128   64
    speed     1.00  0.98  0.84  0.88  0.70         5,120 columns: 122 us with 160, 165 us with 256

Few rows fill no wave: their weights' bytes set the time, and narrow tiles spread the reading over the chip. A tile of
any shape walks K in the same order with instructions of the same depth, so a row's bits are the same in all of them;
`tests/kernels/test_tilings_on_gpu.py` compares them.
"""

from __future__ import annotations

__all__ = ["FEW_ROWS", "coded_columns", "few_columns", "tile_columns"]

FEW_ROWS = 64  # up to these a product takes the tiles for few rows
_SPEED = {256: 1.0, 192: 0.98, 160: 0.84, 128: 0.88, 64: 0.7}
_ROW_TILES = 8  # of the batch that tiles are chosen for, 1,024 rows
_MULTIPROCESSORS = 132


def tile_columns(groups: int, n: int) -> int:
    """Columns of a tile for `groups` products of n columns each, 128 rows a tile."""

    def cost(width: int) -> tuple[float, int]:
        waves = -(-_ROW_TILES * groups * -(-n // width) // _MULTIPROCESSORS)
        return waves * width / _SPEED[width], -width

    return min(_SPEED, key=cost)


def few_columns(groups: int, n: int) -> int:
    """Columns of a tile of 64 rows where there are no more: enough tiles for every multiprocessor, if n allows."""
    return 128 if groups * n >= 128 * _MULTIPROCESSORS else 64


def coded_columns(n: int) -> int:
    """Columns of a tile of a product in e4m3 of n columns, 128 rows a tile. Both widths are as fast a column, where the
    narrow one has a tile more in flight; wo_b: 90 us with 256, 78 with 160, 68 with 192.
    """
    return min((256, 192), key=lambda width: -(-_ROW_TILES * -(-n // width) // _MULTIPROCESSORS) * width)
