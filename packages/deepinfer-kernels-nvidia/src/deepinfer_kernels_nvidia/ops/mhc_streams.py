# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""The two linear maps of mHC over S residual streams X [S, D] of a row (model.md 2.3).

    collapse   u    = sum_i pre_i X_i
    expand     X'_j = post_j y + sum_i C[i, j] X_i          i source, j destination

Bound by memory. One thread holds eight neighbouring dims of all S streams, so every element is read and written once;
sums run in float32 in the order of i.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program

_THREADS = 128


def _chunk(dim: int) -> int:
    return next(size for size in (8, 4, 2, 1) if dim % size == 0)


@program
def mhc_collapse_program(streams: int, dim: int, dtype: str, mix_dtype: str):
    """X [rows, streams, dim], pre [rows, streams]."""
    rows = T.dynamic("rows")
    chunk = _chunk(dim)
    chunks = dim // chunk

    @T.prim_func
    def mhc_collapse(
        x: T.Tensor((rows, streams, dim), dtype),
        pre: T.Tensor((rows, streams), mix_dtype),
        out: T.Tensor((rows, dim), dtype),
    ):
        with T.Kernel(T.ceildiv(rows * chunks, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            row, first = unit // chunks, unit % chunks * chunk
            value = T.alloc_local((streams, chunk), "float32")
            total = T.alloc_local((chunk,), "float32")
            if row < rows:
                for s in T.unroll(streams):
                    for i in T.vectorized(chunk):
                        value[s, i] = x[row, s, first + i]
                for i in T.unroll(chunk):
                    total[i] = 0.0
                    for s in T.unroll(streams):
                        total[i] += value[s, i] * T.cast(pre[row, s], "float32")
                for i in T.vectorized(chunk):
                    out[row, first + i] = total[i]

    return mhc_collapse


@program
def mhc_expand_program(streams: int, dim: int, dtype: str, mix_dtype: str):
    """X [rows, streams, dim], y [rows, dim], post [rows, streams], c [rows, streams, streams]."""
    rows = T.dynamic("rows")
    chunk = _chunk(dim)
    chunks = dim // chunk

    @T.prim_func
    def mhc_expand(
        x: T.Tensor((rows, streams, dim), dtype),
        y: T.Tensor((rows, dim), dtype),
        post: T.Tensor((rows, streams), mix_dtype),
        c: T.Tensor((rows, streams, streams), mix_dtype),
        out: T.Tensor((rows, streams, dim), dtype),
    ):
        with T.Kernel(T.ceildiv(rows * chunks, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            row, first = unit // chunks, unit % chunks * chunk
            value = T.alloc_local((streams, chunk), "float32")
            added = T.alloc_local((chunk,), "float32")
            total = T.alloc_local((chunk,), "float32")
            if row < rows:
                for s in T.unroll(streams):
                    for i in T.vectorized(chunk):
                        value[s, i] = x[row, s, first + i]
                for i in T.vectorized(chunk):
                    added[i] = y[row, first + i]
                for j in T.unroll(streams):
                    for i in T.unroll(chunk):
                        total[i] = T.cast(post[row, j], "float32") * added[i]
                        for s in T.unroll(streams):
                            total[i] += T.cast(c[row, s, j], "float32") * value[s, i]
                    for i in T.vectorized(chunk):
                        out[row, j, first + i] = total[i]

    return mhc_expand


def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """streams [R, S, D], pre [R, S] -> [R, D]; see contract `mhc_collapse`."""
    streams = aligned(streams)
    rows, s, dim = streams.shape
    out = torch.empty(rows, dim, dtype=streams.dtype, device=streams.device)
    if rows:
        mhc_collapse_program(s, dim, dtype_name(streams), dtype_name(pre))(streams, pre.contiguous(), out)
    return out


def mhc_expand(streams: Tensor, y: Tensor, post: Tensor, c: Tensor) -> Tensor:
    """streams [R, S, D], y [R, D], post [R, S], c [R, S, S] -> [R, S, D]; see contract `mhc_expand`."""
    streams = aligned(streams)
    out = torch.empty_like(streams)
    if len(streams):
        launch = mhc_expand_program(*streams.shape[1:], dtype_name(streams), dtype_name(post))
        launch(streams, aligned(y), post.contiguous(), c.contiguous(), out)
    return out
