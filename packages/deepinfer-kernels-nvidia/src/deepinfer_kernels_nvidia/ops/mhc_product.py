# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""The product in mHC's mixes: flattened streams X [K] in bf16 by fn [K, M] in float32, and the squares of X.

A float32 has 24 significant bits, so it is the sum of three bf16, exactly:  f = f_0 + f_1 + f_2,  |f_i| <= 2^-8i |f|.

    fn [K, M] float32  ─►  terms [K, 3 M and zeros] bf16      | f_0: M columns | f_1 | f_2 |
    X fn = X f_2 + X f_1 + X f_0                              one product of 3 M columns, three sums, smallest first

One pass over X, which is what costs: K is cut into parts of at most 1,280, a block of threads takes 128 rows of one (64
where there are few), tiles of 64 stream through shared memory. Whoever reads the parts adds them in order. The cut is a
function of K alone, so rows are invariant. Streams in float32 take `linear_float32`.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, aligned, program
from deepinfer_kernels_nvidia.ops.tiling import FEW_ROWS

__all__ = ["mix_parts", "num_mix_parts"]

_TERMS, _INNER, _STAGES = 3, 64, 4
_TILES_A_PART = 20
_UNIT = 32  # columns of the terms come in whole units: 64 bytes, a swizzle of the copy engine
_CHUNK, _THREADS = 8, 256  # columns that one thread splits


def num_mix_parts(k: int) -> int:
    """How many parts K is cut into."""
    return -(-k // (_INNER * _TILES_A_PART))


def _width(mixes: int) -> int:
    return -(-_TERMS * mixes // _UNIT) * _UNIT


@program
def split_weight_program(mixes: int):
    """w [k, mixes] float32 -> terms [k, width] bf16."""
    k, width = T.dynamic("k"), _width(mixes)
    chunk = _CHUNK if mixes % _CHUNK == 0 else 1
    chunks = width // chunk

    @T.prim_func
    def split_weight(w: T.Tensor((k, mixes), "float32"), terms: T.Tensor((k, width), "bfloat16")):
        with T.Kernel(T.ceildiv(k * chunks, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            row, first = unit // chunks, unit % chunks * chunk
            rest = T.alloc_local((chunk,), "float32")
            if row < k:
                for i in T.unroll(chunk):
                    rest[i] = 0.0
                if first < _TERMS * mixes:
                    for i in T.vectorized(chunk):
                        rest[i] = w[row, first % mixes + i]
                for term in T.unroll(_TERMS - 1):
                    if first // mixes > term:
                        for i in T.unroll(chunk):  # exact: differences of neighbouring floats are representable
                            rest[i] = rest[i] - T.cast(T.cast(rest[i], "bfloat16"), "float32")
                for i in T.vectorized(chunk):
                    terms[row, first + i] = T.cast(rest[i], "bfloat16")

    return split_weight


@program
def mix_parts_program(k: int, mixes: int, few: bool):
    """x [rows, k] bf16, terms [k, width] -> parts of the product [parts, rows, mixes], of sum x^2 [parts, rows]."""
    rows, parts, width = T.dynamic("rows"), num_mix_parts(k), _width(mixes)
    tiles = -(-k // (_INNER * parts))
    tile_rows, threads = (64, 128) if few else (128, 256)

    @T.prim_func
    def mix_parts(
        x: T.Tensor((rows, k), "bfloat16"),
        terms: T.Tensor((k, width), "bfloat16"),
        out: T.Tensor((parts, rows, mixes), "float32"),
        squares: T.Tensor((parts, rows), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, tile_rows), parts, threads=threads) as (bm, part):
            x_tile = T.alloc_shared((tile_rows, _INNER), "bfloat16")
            w_tile = T.alloc_shared((_INNER, width), "bfloat16")
            sums = T.alloc_shared((tile_rows, width), "float32")
            total = T.alloc_fragment((tile_rows, width), "float32")
            square = T.alloc_fragment((tile_rows, _INNER), "float32")
            square_sum = T.alloc_fragment((tile_rows,), "float32")
            T.clear(total)
            T.clear(square)
            for i in T.Pipelined(tiles, num_stages=_STAGES):
                first = (part * tiles + i) * _INNER
                T.copy(x[bm * tile_rows : (bm + 1) * tile_rows, first : first + _INNER], x_tile)
                T.copy(terms[first : first + _INNER, 0:width], w_tile)
                T.gemm(x_tile, w_tile, total, policy=T.GemmWarpPolicy.FullRow)
                for r, c in T.Parallel(tile_rows, _INNER):
                    square[r, c] += T.cast(x_tile[r, c], "float32") * T.cast(x_tile[r, c], "float32")
            T.copy(total, sums)
            for r, m in T.Parallel(tile_rows, mixes):
                if bm * tile_rows + r < rows:
                    out[part, bm * tile_rows + r, m] = sums[r, 2 * mixes + m] + sums[r, mixes + m] + sums[r, m]
            T.reduce_sum(square, square_sum, dim=1)
            for r in T.Parallel(tile_rows):
                if bm * tile_rows + r < rows:
                    squares[part, bm * tile_rows + r] = square_sum[r]

    return mix_parts


def mix_parts(x: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K] bf16, fn [K, M] float32, K a multiple of 8 -> parts of x fn [P, R, M] and of sum x^2 [P, R], float32;
    P = num_mix_parts(K).
    """
    (rows, k), mixes = x.shape, fn.shape[1]
    terms = torch.empty(k, _width(mixes), dtype=torch.bfloat16, device=x.device)
    parts = torch.empty(num_mix_parts(k), rows, mixes, dtype=torch.float32, device=x.device)
    squares = torch.empty(num_mix_parts(k), rows, dtype=torch.float32, device=x.device)
    if rows:
        split_weight_program(mixes)(aligned(fn), terms)
        mix_parts_program(k, mixes, rows <= FEW_ROWS)(aligned(x), terms, parts, squares)
    return parts, squares
