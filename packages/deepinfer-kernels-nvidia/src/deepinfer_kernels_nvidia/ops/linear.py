# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Matrix products whose rows don't depend on their company: out[r, g] = x[r, g] @ w[g], w stored [G, K, N].

    grid   (row tile, column tile, group), row tiles fastest: neighbouring blocks share a weight tile in L2
    block  x [128, 64] and w [64, 128] tiles stream through shared memory, four in flight, into float32 sums
           in registers; on SM100 in tensor memory, which tcgen05 fills (never run; `tensor_memory`)

The tiling is a function of K and N alone and K is walked in one order, so a row's bits are the same in every batch;
rows beyond the last are zero. float32 products are in `linear_float32`.
"""

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.reference.coded import CodedWeight, Weight
from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program, tma_ready
from deepinfer_kernels_nvidia.ops.coded import linear_coded
from deepinfer_kernels_nvidia.ops.linear_float32 import linear_float32
from deepinfer_kernels_nvidia.ops.tensor_memory import accumulate, read_sums

__all__ = ["grouped_linear", "head_logits", "linear"]

_ROWS, _INNER, _STAGES, _THREADS = 128, 64, 4, 256
_NARROW, _WIDE = 64, 16384  # outputs up to the first take a 64-column tile, from the second on a 256-column one


@program(tensor_memory=True)
def matmul_program(groups: int, k: int, n: int, out_dtype: str = "bfloat16", *, tensor_memory: bool = False):
    """x [rows, groups, k] bf16, w [groups, k, n] bf16 -> out [rows, groups, n]."""
    rows = T.dynamic("rows")
    columns = 64 if n <= _NARROW else 256 if n >= _WIDE else 128

    @T.prim_func
    def matmul(
        x: T.Tensor((rows, groups, k), "bfloat16"),
        w: T.Tensor((groups, k, n), "bfloat16"),
        out: T.Tensor((rows, groups, n), out_dtype),
    ):
        with T.Kernel(T.ceildiv(rows, _ROWS), T.ceildiv(n, columns), groups, threads=_THREADS) as (bm, bn, g):
            x_tile = T.alloc_shared((_ROWS, _INNER), "bfloat16")
            w_tile = T.alloc_shared((_INNER, columns), "bfloat16")
            total = T.alloc_fragment((_ROWS, columns), "float32")
            T.clear(total)
            sums = T.alloc_tmem((_ROWS, columns), "float32") if tensor_memory else None
            done = T.alloc_barrier(1) if tensor_memory else None
            for i in T.Pipelined(T.ceildiv(k, _INNER), num_stages=_STAGES):
                T.copy(x[bm * _ROWS : (bm + 1) * _ROWS, g, i * _INNER : (i + 1) * _INNER], x_tile)
                T.copy(w[g, i * _INNER : (i + 1) * _INNER, bn * columns : (bn + 1) * columns], w_tile)
                accumulate(x_tile, w_tile, total, sums, done, i == 0)
            if tensor_memory:
                read_sums(sums, total)
            T.copy(total, out[bm * _ROWS : (bm + 1) * _ROWS, g, bn * columns : (bn + 1) * columns])

    return matmul


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, G, K], weight [G, K, N], both bf16 -> [R, G, N]; see contract `grouped_linear`. Raises KernelError."""
    return _product(x, weight, torch.bfloat16)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [R, K] @ weight [K, N] -> [R, N], both bf16 or both float32, or a coded weight; see contract `linear`. Raises
    KernelError.
    """
    if isinstance(weight, CodedWeight):
        return linear_coded(x, weight)
    if x.dtype == torch.float32 and weight.dtype == torch.float32:
        return linear_float32(x, weight)
    return grouped_linear(x[:, None], weight[None])[:, 0]


def head_logits(x: Tensor, head: Tensor) -> Tensor:
    """x [R, D] @ head [D, V] -> float32 [R, V], both bf16 or both float32; see contract `head_logits`. Raises
    KernelError.
    """
    if x.dtype == torch.float32 and head.dtype == torch.float32:
        return linear_float32(x, head)
    return _product(x[:, None], head[None], torch.float32)[:, 0]


def _product(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise KernelError(f"this product takes bfloat16, not {x.dtype} by {weight.dtype}")
    columns = weight.shape[2]
    x, weight = tma_ready(x, weight)
    out = torch.empty(x.shape[0], x.shape[1], weight.shape[2], dtype=out_dtype, device=x.device)
    if out.numel():
        matmul_program(*weight.shape, dtype_name(out))(aligned(x), aligned(weight), out)
    return out[..., :columns]
