# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Interleaved rotary embedding of the last `rotary` dims of each head (docs/model.md: Attention).

    table[r] = | cos, cos of each pair |  -sin, sin of each pair |
    pair (a, b):  a' = a cos - b sin,  b' = b cos + a sin;   the inverse turns back

torch_npu's rotary operations take one dtype for heads and table and turn whole heads; here the table stays float32. One
thread turns or copies `chunk` neighbouring dims.
"""

import torch
from torch import Tensor

from deepinfer_kernels_ascend.jit import BLOCKS, THREADS, T, dtype_name, each_unit, program


@program
def apply_rope_program(heads: int, dim: int, rotary: int, x_dtype: str, table_dtype: str, inverse: bool):
    """x [rows, heads, dim]."""
    rows = T.dynamic("rows")
    plain = dim - rotary
    chunk = 8 if dim % 8 == 0 and rotary % 8 == 0 else 2
    chunks = dim // chunk
    sign = -1.0 if inverse else 1.0

    @T.prim_func
    def apply_rope(
        x: T.Tensor((rows, heads, dim), x_dtype),
        table: T.Tensor((rows, 2, rotary), table_dtype),
        out: T.Tensor((rows, heads, dim), x_dtype),
    ):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            turned = T.alloc_var("float32")
            for step in T.serial(each_unit(rows * heads * chunks)):
                unit = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if unit < rows * heads * chunks:
                    row, head, first = unit // (heads * chunks), unit // chunks % heads, unit % chunks * chunk
                    for i in T.serial(chunk):
                        if first < plain:
                            out[row, head, first + i] = x[row, head, first + i]
                        else:
                            turned = T.cast(x[row, head, first + i], "float32") * T.cast(
                                table[row, 0, first - plain + i], "float32"
                            )
                            turned += (
                                sign
                                * T.cast(x[row, head, first + (i ^ 1)], "float32")
                                * T.cast(table[row, 1, first - plain + i], "float32")
                            )
                            out[row, head, first + i] = T.cast(turned, x_dtype)

    return apply_rope


def apply_rope(x: Tensor, table: Tensor, *, inverse: bool = False, in_place: bool = False) -> Tensor:
    """x [R, D] or [R, H, D], table [R, 2, rotary] -> as x; see contract `apply_rope`.

    `in_place` allows x to be overwritten, which is not done: a dim is written before its partner has read it.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        heads = 1 if x.dim() == 2 else x.shape[1]
        shape = (x.shape[0], heads, x.shape[-1])
        launch = apply_rope_program(*shape[1:], table.shape[-1], dtype_name(x), dtype_name(table), inverse)
        launch(x.view(shape), table.contiguous(), out.view(shape))
    return out
