# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Matrix products whose rows don't depend on their company: out[r, g] = x[r, g] @ w[g], w stored [G, K, N].

    grid   (row tile, column tile, group), row tiles fastest: neighbouring blocks share a weight tile in L2
    block  x [128, 64] and w [64, 64 .. 256] tiles stream through shared memory, four in flight, into float32 sums in
           registers; the finished tile leaves through shared memory by the bulk copy engine. With few rows the tiles
           are [64, 128] and [128, 64], and deeper in flight: their bytes set the time
           on SM100 the sums are in tensor memory, which tcgen05 fills (never run; `tensor_memory`)

How wide a tile is follows from N and the number of rows (`tiling`); K is walked in one order by all of them, so a row's
bits are the same in every batch. Rows beyond the last are zero. float32 products are in `linear_float32`.
"""

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.reference.coded import CodedWeight, Weight
from deepinfer_core.kernels.reference.packed import ArrangedWeight, PackedWeight
from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program, tma_ready
from deepinfer_kernels_nvidia.ops.coded import linear_coded
from deepinfer_kernels_nvidia.ops.linear_float32 import linear_float32
from deepinfer_kernels_nvidia.ops.packed import linear_packed
from deepinfer_kernels_nvidia.ops.tensor_memory import accumulate, read_sums
from deepinfer_kernels_nvidia.ops.tiling import FEW_ROWS, few_columns, tile_columns

__all__ = ["grouped_linear", "head_logits", "linear", "padded_product"]

_ROWS, _INNER, _STAGES, _THREADS = 128, 64, 4, 256
_TENSOR_MEMORY_NARROW, _TENSOR_MEMORY_WIDE = 64, 16384  # N up to which a tile has 64 columns, from which on 256


@program(tensor_memory=True)
def matmul_program(groups: int, k: int, n: int, out_dtype: str, few: bool, *, tensor_memory: bool = False):
    """x [rows, groups, k] bf16, w [groups, k, n] bf16 -> out [rows, groups, n]. `few`: tiles for few rows."""
    rows = T.dynamic("rows")
    tile_rows, columns, inner, stages, threads = _tile(groups, n, few=few, tensor_memory=tensor_memory)

    @T.prim_func
    def matmul(
        x: T.Tensor((rows, groups, k), "bfloat16"),
        w: T.Tensor((groups, k, n), "bfloat16"),
        out: T.Tensor((rows, groups, n), out_dtype),
    ):
        with T.Kernel(T.ceildiv(rows, tile_rows), T.ceildiv(n, columns), groups, threads=threads) as (bm, bn, g):
            x_tile = T.alloc_shared((tile_rows, inner), "bfloat16")
            w_tile = T.alloc_shared((inner, columns), "bfloat16")
            total = T.alloc_fragment((tile_rows, columns), "float32")
            T.clear(total)
            sums = T.alloc_tmem((tile_rows, columns), "float32") if tensor_memory else None
            done = T.alloc_barrier(1) if tensor_memory else None
            for i in T.Pipelined(T.ceildiv(k, inner), num_stages=stages):
                T.copy(x[bm * tile_rows : (bm + 1) * tile_rows, g, i * inner : (i + 1) * inner], x_tile)
                T.copy(w[g, i * inner : (i + 1) * inner, bn * columns : (bn + 1) * columns], w_tile)
                accumulate(x_tile, w_tile, total, sums, done, i == 0)
            if tensor_memory:
                read_sums(sums, total)
                T.copy(total, out[bm * tile_rows : (bm + 1) * tile_rows, g, bn * columns : (bn + 1) * columns])
            else:
                out_tile = T.alloc_shared((tile_rows, columns), out_dtype)  # where the last tiles of x and w were
                T.copy(total, out_tile)
                T.copy(out_tile, out[bm * tile_rows : (bm + 1) * tile_rows, g, bn * columns : (bn + 1) * columns])

    return matmul


def _tile(groups: int, n: int, *, few: bool, tensor_memory: bool) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a tile, how many are in flight, threads that multiply."""
    if tensor_memory:
        columns = 64 if n <= _TENSOR_MEMORY_NARROW else 256 if n >= _TENSOR_MEMORY_WIDE else 128
        return _ROWS, columns, _INNER, _STAGES, _THREADS
    if few:
        columns = few_columns(groups, n)
        return (64, 64, 128, 5, 128) if columns == 64 else (64, columns, 64, 8, 128)
    return _ROWS, tile_columns(groups, n), _INNER, _STAGES, _THREADS


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, G, K], weight [G, K, N], both bf16 -> [R, G, N]; see contract `grouped_linear`. Raises KernelError."""
    return _product(x, weight, torch.bfloat16)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [R, K] @ weight [K, N] -> [R, N], both bf16 or both float32, or a coded or arranged weight; see contract
    `linear`. Raises KernelError.
    """
    if isinstance(weight, CodedWeight):
        return linear_coded(x, weight)
    if isinstance(weight, ArrangedWeight):
        return linear_packed(x, weight)
    if isinstance(weight, PackedWeight):
        raise KernelError("a packed weight comes to these kernels arranged (`arranged`)")
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


def padded_product(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """x [R, G, K], weight [G, K, N], both bf16 -> [R, G, N'], where N' is N rounded up to a multiple of 8. Raises
    KernelError.
    """
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise KernelError(f"this product takes bfloat16, not {x.dtype} by {weight.dtype}")
    x, weight = tma_ready(x, weight)
    out = torch.empty(x.shape[0], x.shape[1], weight.shape[2], dtype=out_dtype, device=x.device)
    if out.numel():
        matmul_program(*weight.shape, dtype_name(out), len(x) <= FEW_ROWS)(aligned(x), aligned(weight), out)
    return out


def _product(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    return padded_product(x, weight, out_dtype)[..., : weight.shape[2]]
