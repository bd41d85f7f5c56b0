# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""float32 products on bf16 tensor cores.

A float32 has 24 significant bits, so it is the sum of three bf16, exactly:  v = v_0 + v_1 + v_2,  |v_i| <= 2^-8i |v|.

    x w = x_0 w_0 + (x_0 w_1 + x_1 w_0) + (x_0 w_2 + x_1 w_1 + x_2 w_0) + terms below 2^-24 |x| |w|, left out

    K      | part 0: up to 20 tiles of 64 | part 1 | ..      a block: a part of 64 rows and 64 columns (32 if N <= 32)
    tile   x [64 rows, 64] -> x_0 | x_1 | x_2      w [64, 64] -> w_0 | w_1 | w_2      split in shared memory

Six products (three where x is bf16 to begin with) accumulate in one float32 fragment, smallest terms first. For the
sake of small batches K is cut into parts, except where N alone fills the chip; `sum_parts` adds them in order. The
number of parts is a function of K and N, so rows are invariant.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program, tma_ready

__all__ = ["linear_float32", "matmul_parts", "num_parts"]

_ROWS, _INNER, _THREADS = 64, 64, 128
_TERMS = 3
_TILES_A_PART = 20  # tiles of K that one block walks: mHC's K = 20,480 at 1,024 rows then fills the chip once
_WIDE = 8192  # from this N on K stays whole


def num_parts(k: int, n: int) -> int:
    """How many parts K is cut into."""
    return 1 if n >= _WIDE else -(-k // (_INNER * _TILES_A_PART))


@program
def matmul_parts_program(k: int, n: int, x_dtype: str, w_dtype: str, with_squares: bool):
    """x [rows, k], w [k, n] -> parts [num_parts, rows, n], and parts of sum x^2 [num_parts, rows] if `with_squares`."""
    rows, parts = T.dynamic("rows"), num_parts(k, n)
    tiles = -(-k // (_INNER * parts))
    columns = 32 if n <= 32 else 64
    x_terms = 1 if x_dtype == "bfloat16" else _TERMS
    w_terms = 1 if w_dtype == "bfloat16" else _TERMS

    @T.macro
    def split(source, terms, count):
        """Exact: each difference of neighbouring floats is representable."""
        if count == 1:
            T.copy(source, terms[0, :, :])
        else:
            for i, j in T.Parallel(source.shape[0], source.shape[1]):
                first = T.cast(source[i, j], "bfloat16")
                rest = source[i, j] - T.cast(first, "float32")
                second = T.cast(rest, "bfloat16")
                terms[0, i, j] = first
                terms[1, i, j] = second
                terms[2, i, j] = T.cast(rest - T.cast(second, "float32"), "bfloat16")

    @T.prim_func
    def matmul_parts(
        x: T.Tensor((rows, k), x_dtype),
        w: T.Tensor((k, n), w_dtype),
        out: T.Tensor((parts, rows, n), "float32"),
        squares: T.Tensor((parts, rows), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, _ROWS), T.ceildiv(n, columns), parts, threads=_THREADS) as (bm, bn, part):
            x_tile = T.alloc_shared((_ROWS, _INNER), x_dtype)
            w_tile = T.alloc_shared((_INNER, columns), w_dtype)
            x_split = T.alloc_shared((x_terms, _ROWS, _INNER), "bfloat16")
            w_split = T.alloc_shared((w_terms, _INNER, columns), "bfloat16")
            total = T.alloc_fragment((_ROWS, columns), "float32")
            T.clear(total)
            if with_squares:
                square = T.alloc_fragment((_ROWS, _INNER), "float32")
                square_sum = T.alloc_fragment((_ROWS,), "float32")
                T.clear(square)
            for i in T.Pipelined(tiles, num_stages=2):
                first = (part * tiles + i) * _INNER
                T.copy(x[bm * _ROWS : (bm + 1) * _ROWS, first : first + _INNER], x_tile)
                T.copy(w[first : first + _INNER, bn * columns : (bn + 1) * columns], w_tile)
                split(x_tile, x_split, x_terms)
                split(w_tile, w_split, w_terms)
                for order in range(_TERMS - 1, -1, -1):
                    for a in range(x_terms):
                        if 0 <= order - a < w_terms:
                            T.gemm(x_split[a, :, :], w_split[order - a, :, :], total)
                if with_squares:
                    for r, c in T.Parallel(_ROWS, _INNER):
                        square[r, c] += T.cast(x_tile[r, c], "float32") * T.cast(x_tile[r, c], "float32")
            T.copy(total, out[part, bm * _ROWS : (bm + 1) * _ROWS, bn * columns : (bn + 1) * columns])
            if with_squares:
                T.reduce_sum(square, square_sum, dim=1)
                for r in T.Parallel(_ROWS):
                    if bm * _ROWS + r < rows and bn == 0:
                        squares[part, bm * _ROWS + r] = square_sum[r]

    return matmul_parts


@program
def sum_parts_program(parts: int, n: int):
    """parts [parts, rows, n] -> their sum [rows, n], in order."""
    rows = T.dynamic("rows")

    @T.prim_func
    def sum_parts(x: T.Tensor((parts, rows, n), "float32"), out: T.Tensor((rows, n), "float32")):
        with T.Kernel(T.ceildiv(rows * n, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            total = T.alloc_var("float32")
            if unit // n < rows:
                total = x[0, unit // n, unit % n]
                for part in T.serial(1, parts):
                    total += x[part, unit // n, unit % n]
                out[unit // n, unit % n] = total

    return sum_parts


def matmul_parts(x: Tensor, weight: Tensor, *, with_squares: bool = False) -> tuple[Tensor, Tensor]:
    """x [R, K], weight [K, N], bf16 or float32 each -> parts [P, R, N] float32 and, if `with_squares`, parts of sum x^2
    [P, R], P = num_parts(K, N). Where N is no multiple of 8 the parts have zero columns after the Nth.
    """
    x, weight = tma_ready(x, weight)
    (rows, k), n = x.shape, weight.shape[1]
    parts = torch.empty(num_parts(k, n), rows, n, dtype=torch.float32, device=x.device)
    squares = torch.empty(num_parts(k, n), rows, dtype=torch.float32, device=x.device)
    if parts.numel():
        launch = matmul_parts_program(k, n, dtype_name(x), dtype_name(weight), with_squares)
        launch(aligned(x), aligned(weight), parts, squares)
    return parts, squares


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K] @ weight [K, N] -> [R, N] float32."""
    parts, _ = matmul_parts(x, weight)
    if len(parts) == 1:
        return parts[0, :, : weight.shape[1]]
    out = torch.empty(parts.shape[1:], dtype=torch.float32, device=x.device)
    if out.numel():
        sum_parts_program(len(parts), parts.shape[2])(parts, out)
    return out[:, : weight.shape[1]]
