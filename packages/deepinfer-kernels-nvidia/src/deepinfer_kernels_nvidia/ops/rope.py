# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Interleaved rotary embedding of the last `rotary` dims, and its table (docs/model.md: Attention).

    table[r] = | cos f_0 t, cos f_0 t, cos f_1 t, ..  |  -sin f_0 t, sin f_0 t, ..  |          t = position of row r
    pair (a, b):  a' = a cos - b sin,  b' = b cos + a sin;   the inverse turns back

    head  | plain dims, left alone | pair | pair | .. |

One thread turns `chunk` neighbouring dims in place: an eighth of the bytes of the release's heads move. Who keeps x has
it copied first.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program

_THREADS = 128


@program
def rope_table_program(pairs: int):
    """One thread a frequency of a row; sine and cosine with full range reduction, angles reach 10^6 radians."""
    rows = T.dynamic("rows")

    @T.prim_func
    def rope_table(
        positions: T.Tensor((rows,), "int64"),
        frequencies: T.Tensor((pairs,), "float32"),
        table: T.Tensor((rows, 2, 2 * pairs), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows * pairs, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            row, pair = unit // pairs, unit % pairs
            if row < rows:
                angle = T.alloc_var("float32")
                angle = T.cast(positions[row], "float32") * frequencies[pair]
                table[row, 0, 2 * pair] = T.cos(angle)
                table[row, 0, 2 * pair + 1] = T.cos(angle)
                table[row, 1, 2 * pair] = -T.sin(angle)
                table[row, 1, 2 * pair + 1] = T.sin(angle)

    return rope_table


@program
def apply_rope_program(heads: int, dim: int, rotary: int, x_dtype: str, table_dtype: str, inverse: bool):
    """x [rows, heads, dim], of which the last `rotary` dims change."""
    rows = T.dynamic("rows")
    plain, chunk = dim - rotary, 8 if dim % 8 == rotary % 8 == 0 else 2
    chunks = rotary // chunk
    sign = -1.0 if inverse else 1.0

    @T.prim_func
    def apply_rope(x: T.Tensor((rows, heads, dim), x_dtype), table: T.Tensor((rows, 2, rotary), table_dtype)):
        with T.Kernel(T.ceildiv(rows * heads * chunks, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            row, head, first = unit // (heads * chunks), unit // chunks % heads, unit % chunks * chunk
            value = T.alloc_local((chunk,), "float32")
            turned = T.alloc_local((chunk,), "float32")
            if row < rows:
                for i in T.vectorized(chunk):
                    value[i] = x[row, head, plain + first + i]
                for i in T.unroll(chunk):
                    turned[i] = value[i] * table[row, 0, first + i] + sign * (value[i ^ 1] * table[row, 1, first + i])
                for i in T.vectorized(chunk):
                    x[row, head, plain + first + i] = turned[i]

    return apply_rope


def rope_table(positions: Tensor, frequencies: Tensor) -> Tensor:
    """positions [R] int64, frequencies [P] -> [R, 2, 2P] float32; see contract `rope_table`."""
    rows, pairs = len(positions), len(frequencies)
    table = torch.empty(rows, 2, 2 * pairs, dtype=torch.float32, device=positions.device)
    if rows:
        rope_table_program(pairs)(positions.contiguous(), frequencies.float().contiguous(), table)
    return table


def apply_rope(x: Tensor, table: Tensor, *, inverse: bool = False, in_place: bool = False) -> Tensor:
    """x [R, D] or [R, H, D], table [R, 2, rotary] -> as x; see contract `apply_rope`."""
    out = aligned(x) if in_place else x.clone(memory_format=torch.contiguous_format)
    if out.numel():
        shape = (out.shape[0], 1 if out.dim() == 2 else out.shape[1], out.shape[-1])
        launch = apply_rope_program(*shape[1:], table.shape[-1], dtype_name(out), dtype_name(table), inverse)
        launch(out.view(shape), aligned(table))
    return out
