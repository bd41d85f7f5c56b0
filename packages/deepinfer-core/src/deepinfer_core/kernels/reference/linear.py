"""Row-invariant matrix products.

BLAS picks another kernel, with another order of additions, for another number of rows: row 0 of a 1-row product and
row 0 of a 512-row product differ in the last bit. Here every product runs in tiles of 8 rows, as a
batch of equal [8, K] x [K, N] products, so the bits of a row depend on that row alone:

    x [R, K] -> [R / 8, 8, K] @ [K, N] (shared by all tiles) -> [R / 8, 8, N] -> [R, N]

Weights are stored as [K, N], contiguous: with that layout the tiles cost little over one big product, while [N, K]
would make them 2 to 4 times slower (benchmarks/model_cpu.py shows both). Rows are padded to a multiple of 8; the model
pads once a step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_core.kernels.reference.coded import CodedWeight, Weight, plain_weight, round_rows

__all__ = ["ROW_TILE", "grouped_linear", "head_logits", "linear", "pad_rows", "tile_product"]

ROW_TILE = 8
_SPLIT_INNER = 512  # from about 1,024 on, a lone product is split over threads along K, a product in a batch never is
_NARROW = 8  # a lone product with one column takes another kernel


def pad_rows(x: Tensor) -> Tensor:
    """x [R, ...] with zero rows appended up to a multiple of ROW_TILE."""
    missing = -x.shape[0] % ROW_TILE
    return x if missing == 0 else F.pad(x, [0, 0] * (x.dim() - 1) + [0, missing])


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [R, K] @ weight [K, N] -> [R, N]; bits of row r depend on x[r] and weight only."""
    if isinstance(weight, CodedWeight):
        x = round_rows(x)
    weight = plain_weight(weight, x.dtype)
    rows = x.shape[0]
    tiles = pad_rows(x).unflatten(0, (-1, ROW_TILE))  # [n, 8, K]
    out = tile_product(tiles, weight.expand(tiles.shape[0], -1, -1)).flatten(0, 1)
    return out if out.shape[0] == rows else out[:rows]


def head_logits(x: Tensor, head: Tensor) -> Tensor:
    """x [R, D] @ head [D, V] -> float32 [R, V], both of one dtype, whose values float32 holds exactly."""
    return linear(x.float(), head.float())


def tile_product(tiles: Tensor, weights: Tensor) -> Tensor:
    """tiles [n, 8, K] @ weights [n, K, N] -> [n, 8, N], each tile with the same bits whatever n is.

    Where the library treats a lone product differently, the tile is computed twice: the second core would idle anyway.
    """
    if tiles.shape[0] == 1 and (tiles.shape[2] >= _SPLIT_INNER or weights.shape[2] < _NARROW):
        return torch.bmm(tiles.expand(2, -1, -1), weights.expand(2, -1, -1))[:1]
    return torch.bmm(tiles, weights)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, G, K], weight [G, K, N] -> [R, G, N]: group g of every row times its own matrix."""
    rows, groups, _ = x.shape
    padded = pad_rows(x)
    n = padded.shape[0] // ROW_TILE
    tiles = padded.view(n, ROW_TILE, groups, -1).transpose(1, 2).flatten(0, 1)  # [n * G, 8, K]
    out = tile_product(tiles, weight.expand(n, -1, -1, -1).flatten(0, 1))  # [n * G, 8, N]
    out = out.view(n, groups, ROW_TILE, -1).transpose(1, 2).reshape(n * ROW_TILE, groups, -1)
    return out[:rows]
