# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""The two linear maps of mHC over S residual streams X [S, D] of a row, and both with the norm between.

    collapse   u    = sum_i pre_i X_i
    expand     X'_j = post_j y + sum_i C[i, j] X_i          i source, j destination
    next       X', and x = u' * rsqrt(mean(u'^2) + eps) * w, with u' the collapse of X'

Bound by memory. One thread holds eight neighbouring dims of all S streams, so every element is read and written once;
sums run in float32 in the order of i. `next` gives a row to one block: X' is collapsed while it is in registers, as the
bf16 that it is written as, and u' waits there for the sum of its squares.

    row  | t0: 8 dims x S | t1 | .. | t319 | t0 | ..      squares: a warp by shuffles, the warps in order
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program

_THREADS = 128
_NEXT_THREADS, _WARP = 320, 32  # 640 pieces of 8 of the release's 5,120 dims: two a thread
_NEXT_BLOCKS = 2  # of a multiprocessor: what a thread holds then fits 96 registers


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


@program
def mhc_next_program(streams: int, dim: int, dtype: str, mix_dtype: str, weight_dtype: str):
    """X [rows, streams, dim], y [rows, dim], post, pre [rows, streams], c [rows, streams, streams] -> X', x."""
    rows = T.dynamic("rows")
    chunk = _chunk(dim)
    chunks = dim // chunk
    threads = min(_NEXT_THREADS, -(-chunks // _WARP) * _WARP)
    turns = -(-chunks // threads)

    @T.prim_func
    def mhc_next(
        x: T.Tensor((rows, streams, dim), dtype),
        y: T.Tensor((rows, dim), dtype),
        post: T.Tensor((rows, streams), mix_dtype),
        c: T.Tensor((rows, streams, streams), mix_dtype),
        pre: T.Tensor((rows, streams), mix_dtype),
        weight: T.Tensor((dim,), weight_dtype),
        out: T.Tensor((rows, streams, dim), dtype),
        normed: T.Tensor((rows, dim), dtype),
        eps: T.float32,
    ):
        with T.Kernel(rows, threads=threads) as row:
            T.annotate_min_blocks_per_sm(_NEXT_BLOCKS)
            thread = T.get_thread_binding()
            value = T.alloc_local((streams, chunk), "float32")
            added = T.alloc_local((chunk,), "float32")
            mixed = T.alloc_local((chunk,), dtype)
            collapsed = T.alloc_local((turns, chunk), "float32")
            total = T.alloc_var("float32")
            square = T.alloc_var("float32")
            by_warp = T.alloc_shared((threads // _WARP,), "float32")
            square = 0.0
            for turn in T.unroll(turns):
                first = (turn * threads + thread) * chunk
                if turn * threads + thread < chunks:
                    for s in T.unroll(streams):
                        for i in T.vectorized(chunk):
                            value[s, i] = x[row, s, first + i]
                    for i in T.vectorized(chunk):
                        added[i] = y[row, first + i]
                    for i in T.unroll(chunk):
                        collapsed[turn, i] = 0.0
                    for j in T.unroll(streams):
                        for i in T.unroll(chunk):
                            total = T.cast(post[row, j], "float32") * added[i]
                            for s in T.unroll(streams):
                                total += T.cast(c[row, s, j], "float32") * value[s, i]
                            mixed[i] = T.cast(total, dtype)
                            collapsed[turn, i] += T.cast(mixed[i], "float32") * T.cast(pre[row, j], "float32")
                        for i in T.vectorized(chunk):
                            out[row, j, first + i] = mixed[i]
                    for i in T.unroll(chunk):
                        collapsed[turn, i] = T.cast(T.cast(collapsed[turn, i], dtype), "float32")
                        square += collapsed[turn, i] * collapsed[turn, i]
            for step in T.unroll(5):
                square += T.shfl_xor(square, 1 << step)
            if thread % _WARP == 0:
                by_warp[thread // _WARP] = square
            T.sync_threads()
            total = 0.0
            for warp in T.unroll(threads // _WARP):
                total += by_warp[warp]
            total = T.rsqrt(total / dim + eps)
            for turn in T.unroll(turns):
                first = (turn * threads + thread) * chunk
                if turn * threads + thread < chunks:
                    for i in T.vectorized(chunk):
                        normed[row, first + i] = collapsed[turn, i] * total * T.cast(weight[first + i], "float32")

    return mhc_next


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


def mhc_next(
    streams: Tensor, y: Tensor, post: Tensor, c: Tensor, pre: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """streams [R, S, D], y [R, D], post and pre [R, S], c [R, S, S], weight [D] -> X' [R, S, D], x [R, D]; see contract
    `mhc_next`.
    """
    streams, y = aligned(streams), aligned(y)
    out, normed = torch.empty_like(streams), torch.empty_like(y)
    if len(streams):
        launch = mhc_next_program(*streams.shape[1:], dtype_name(streams), dtype_name(post), dtype_name(weight))
        mixes = post.contiguous(), c.contiguous(), pre.contiguous()
        launch(streams, y, *mixes, weight.contiguous(), out, normed, eps)
    return out, normed
