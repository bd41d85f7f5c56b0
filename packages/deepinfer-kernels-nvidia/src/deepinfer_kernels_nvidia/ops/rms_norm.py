# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""RMSNorm over the last dim: out = x * rsqrt(mean(x^2) + eps) * weight, in float32.

One block a row. Its threads hold the row in registers, so x is read once; the sum has one order for every row.

    row   | t0: 8 values | t1: 8 values | .. | t0: 8 values | ..      padded with zeros to threads * 8
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program

_NARROW = 256  # up to this width one warp holds a row


@program
def rms_norm_program(dim: int, x_dtype: str, weight_dtype: str, contiguous: bool):
    """x [rows, dim] with any row stride unless `contiguous`."""
    rows, stride = T.dynamic("rows"), T.dynamic("stride", "int64")
    threads = 32 if dim <= _NARROW else 128
    width = -(-dim // (threads * 8)) * threads * 8

    @T.prim_func
    def rms_norm(
        x: T.StridedTensor((rows, dim), (dim if contiguous else stride, 1), x_dtype),
        weight: T.Tensor((dim,), weight_dtype),
        out: T.Tensor((rows, dim), x_dtype),
        eps: T.float32,
    ):
        with T.Kernel(rows, threads=threads) as row:
            value = T.alloc_fragment((width,), "float32")
            square = T.alloc_fragment((width,), "float32")
            total = T.alloc_fragment((1,), "float32")
            for d in T.Parallel(width):
                value[d] = T.if_then_else(d < dim, T.cast(x[row, d], "float32"), 0.0)
            for d in T.Parallel(width):
                square[d] = value[d] * value[d]
            T.reduce_sum(square, total, dim=0)
            for d in T.Parallel(width):
                if d < dim:
                    out[row, d] = value[d] * T.rsqrt(total[0] / dim + eps) * weight[d]

    return rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D] in the dtype of x; see contract `rms_norm`."""
    dim = x.shape[-1]
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    flat = x if x.dim() == 2 else x.view(-1, dim)
    contiguous = flat.is_contiguous()
    flat = aligned(flat) if contiguous else flat
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    if len(flat):
        rms_norm_program(dim, dtype_name(x), dtype_name(weight), contiguous)(flat, weight.contiguous(), out, eps)
    return out.view(x.shape)
