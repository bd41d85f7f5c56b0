# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Gated pooling of a compressor pair, channel by channel: the softmax over two gates is a logistic function.

    first, second = (a, g) of the even and the odd position
    s = 1 / (1 + exp(g_2 - g_1));  pooled = a_1 s + a_2 (1 - s)

    first, second   | a of channels 0 .. D - 1 | g of channels 0 .. D - 1 |
    pooled          | t0: 4 channels | t1 | .. |

One thread: four neighbouring channels of a row, of which it reads both a and both g.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program

_THREADS = 128
_CHUNK = 4


@program
def pool_pairs_program(dim: int, dtype: str):
    """first, second [rows, 2, dim]."""
    rows = T.dynamic("rows")
    chunk = _CHUNK if dim % _CHUNK == 0 else 1
    chunks = dim // chunk

    @T.prim_func
    def pool_pairs(
        first: T.Tensor((rows, 2, dim), dtype),
        second: T.Tensor((rows, 2, dim), dtype),
        out: T.Tensor((rows, dim), dtype),
    ):
        with T.Kernel(T.ceildiv(rows * chunks, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            row, start = unit // chunks, unit % chunks * chunk
            share = T.alloc_local((chunk,), "float32")
            if row < rows:
                for i in T.vectorized(chunk):
                    gate = T.cast(second[row, 1, start + i], "float32") - T.cast(first[row, 1, start + i], "float32")
                    share[i] = 1.0 / (1.0 + T.exp(gate))
                for i in T.vectorized(chunk):
                    out[row, start + i] = T.cast(first[row, 0, start + i], "float32") * share[i] + T.cast(
                        second[row, 0, start + i], "float32"
                    ) * (1.0 - share[i])

    return pool_pairs


def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    """first, second [R, 2, D] -> [R, D]; see contract `pool_pairs`."""
    first, second = aligned(first), aligned(second)
    out = torch.empty(first.shape[0], first.shape[2], dtype=first.dtype, device=first.device)
    if out.numel():
        pool_pairs_program(first.shape[2], dtype_name(first))(first, second, out)
    return out
