# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""The mixes of single-pass mHC, Sinkhorn included (docs/model.md: Residual streams).

    m    = (flatten(X) fn) * rsqrt(mean(flatten(X)^2) + norm_eps)                           [S + S + S * S]
    pre  = sigmoid(m[:S] scale + base) + eps;   post = 2 sigmoid(m[S:2S] scale + base)
    C    = Sinkhorn(softmax_j(m[2S:] scale + base)): C += eps; columns; then (iterations - 1) times rows, columns

    product   [parts, rows, mixes]     sums of a block  row 0 | m_0: t0 | m_1: t1 | .. | m_23: t23 | squares: t24 |
    squares   [parts, rows]                             row 1 | m_0: t25 | ..
    then                               thread r: pre, post and C of row r

The product comes in parts together with those of the sum of squares (`mhc_product`). The threads of a block add them in
order, each for one mix of one row, so that many loads are under way at once; then one thread a row keeps its S x S
matrix in registers. Its reciprocals are the hardware's, within two units of the last place: 39 exact divisions in a row
took most of the time.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, dtype_name, program
from deepinfer_kernels_nvidia.ops.linear_float32 import matmul_parts
from deepinfer_kernels_nvidia.ops.mhc_product import mix_parts

_THREADS = 128
_ROW_UNIT = 8  # elements: rows of whole 16-byte units, as the copy engine wants
_ROWS = 8  # of a block of threads: few rows exist, and small blocks spread over the chip


@program
def mhc_gates_program(streams: int, dim: int, parts: int, columns: int, iterations: int, mix_dtype: str):
    """parts of the product (columns >= its width) and of the sum of squares -> pre, post, c."""
    rows = T.dynamic("rows")
    mixes = streams * (streams + 2)

    @T.prim_func
    def mhc_gates(
        products: T.Tensor((parts, rows, columns), "float32"),
        squares: T.Tensor((parts, rows), "float32"),
        base: T.Tensor((mixes,), mix_dtype),
        scale: T.Tensor((mixes,), mix_dtype),
        pre: T.Tensor((rows, streams), "float32"),
        post: T.Tensor((rows, streams), "float32"),
        c: T.Tensor((rows, streams, streams), "float32"),
        norm_eps: T.float32,
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows, _ROWS), threads=_THREADS) as block:
            thread = T.get_thread_binding()
            sums = T.alloc_shared((_ROWS, mixes + 1), "float32")  # of the mixes, then of squares
            mix = T.alloc_local((mixes,), "float32")
            matrix = T.alloc_local((streams, streams), "float32")
            held = T.alloc_local((parts,), "float32")
            total = T.alloc_var("float32")
            inverse = T.alloc_var("float32")
            row = block * _ROWS + thread
            for step in T.serial(-(-_ROWS * (mixes + 1) // _THREADS)):
                r, m = (step * _THREADS + thread) // (mixes + 1), (step * _THREADS + thread) % (mixes + 1)
                if r < _ROWS and block * _ROWS + r < rows:
                    for part in T.unroll(parts):
                        if m < mixes:
                            held[part] = products[part, block * _ROWS + r, m]
                        else:
                            held[part] = squares[part, block * _ROWS + r]
                    total = 0.0
                    for part in T.unroll(parts):
                        total += held[part]
                    sums[r, m] = total
            T.sync_threads()
            if thread < _ROWS and row < rows:
                for m in T.unroll(mixes):
                    mix[m] = sums[thread, m]
                total = sums[thread, mixes]
                inverse = T.rsqrt(total / (streams * dim) + norm_eps)
                for m in T.unroll(mixes):
                    mix[m] = mix[m] * inverse * T.cast(scale[m], "float32") + T.cast(base[m], "float32")
                for s in T.unroll(streams):
                    pre[row, s] = T.fast_rcp(1.0 + T.exp(-mix[s])) + eps
                    post[row, s] = 2.0 * T.fast_rcp(1.0 + T.exp(-mix[streams + s]))
                for i in T.unroll(streams):
                    total = mix[2 * streams + i * streams]
                    for j in T.unroll(streams):
                        total = T.max(total, mix[2 * streams + i * streams + j])
                    for j in T.unroll(streams):
                        matrix[i, j] = T.exp(mix[2 * streams + i * streams + j] - total)
                    total = 0.0
                    for j in T.unroll(streams):
                        total += matrix[i, j]
                    inverse = T.fast_rcp(total)
                    for j in T.unroll(streams):
                        matrix[i, j] = matrix[i, j] * inverse + eps
                for step in T.serial(iterations):
                    if step > 0:
                        for i in T.unroll(streams):
                            total = eps
                            for j in T.unroll(streams):
                                total += matrix[i, j]
                            inverse = T.fast_rcp(total)
                            for j in T.unroll(streams):
                                matrix[i, j] *= inverse
                    for j in T.unroll(streams):
                        total = eps
                        for i in T.unroll(streams):
                            total += matrix[i, j]
                        inverse = T.fast_rcp(total)
                        for i in T.unroll(streams):
                            matrix[i, j] *= inverse
                for i in T.unroll(streams):
                    for j in T.unroll(streams):
                        c[row, i, j] = matrix[i, j]

    return mhc_gates


def mhc_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iterations: int, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [R, S, D], fn [S * D, M], base and scale [M] -> pre, post [R, S], C [R, S, S], float32."""
    rows, s, dim = streams.shape
    pre, post = (torch.empty(rows, s, dtype=torch.float32, device=streams.device) for _ in range(2))
    c = torch.empty(rows, s, s, dtype=torch.float32, device=streams.device)
    if rows:
        flat = streams.flatten(1)
        products, squares = _products(flat, fn)
        launch = mhc_gates_program(s, dim, len(products), products.shape[2], iterations, dtype_name(base))
        launch(products, squares, base.contiguous(), scale.contiguous(), pre, post, c, norm_eps, eps)
    return pre, post, c


def _products(x: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K], fn [K, M] -> parts of x fn [P, R, >= M] and of sum x^2 [P, R]."""
    if x.dtype == torch.bfloat16 and fn.dtype == torch.float32 and x.shape[1] % _ROW_UNIT == 0:
        return mix_parts(x, fn)
    return matmul_parts(x, fn, with_squares=True)
