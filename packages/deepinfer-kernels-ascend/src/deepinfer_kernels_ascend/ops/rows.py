# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Operations that read a row, element by element, and write a row.

    copy_rows         cache[destination] = cache[source], two row lists that don't meet; raw 32-bit words or bytes
    pool_pairs        s = 1 / (1 + exp(g_2 - g_1));  a_1 s + a_2 (1 - s)
    mhc_collapse      sum_i p_i X_i over the S streams, in float32, in order
    combine_experts   the k chosen experts in order, then the shared one, in float32

One thread an element.
"""

import torch
from torch import Tensor

from deepinfer_kernels_ascend.jit import BLOCKS, THREADS, T, dtype_name, each_unit, program


@program
def copy_rows_program(words: int, word_dtype: str):
    """cache [rows, words] of raw words."""
    pairs, cache_rows = T.dynamic("pairs"), T.dynamic("cache_rows")

    @T.prim_func
    def copy_rows(
        cache: T.Tensor((cache_rows, words), word_dtype),
        destination: T.Tensor((pairs,), "int64"),
        source: T.Tensor((pairs,), "int64"),
    ):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            for step in T.serial(each_unit(pairs * words)):
                unit = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if unit < pairs * words:
                    cache[destination[unit // words], unit % words] = cache[source[unit // words], unit % words]

    return copy_rows


@program
def pool_pairs_program(dim: int, dtype: str):
    """first, second [rows, 2, dim]: value and gate."""
    rows = T.dynamic("rows")

    @T.prim_func
    def pool_pairs(
        first: T.Tensor((rows, 2, dim), dtype),
        second: T.Tensor((rows, 2, dim), dtype),
        out: T.Tensor((rows, dim), dtype),
    ):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            share = T.alloc_var("float32")
            for step in T.serial(each_unit(rows * dim)):
                unit = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if unit < rows * dim:
                    row, d = unit // dim, unit % dim
                    share = T.cast(second[row, 1, d], "float32") - T.cast(first[row, 1, d], "float32")
                    share = 1.0 / (1.0 + T.exp(share))
                    share = T.cast(first[row, 0, d], "float32") * share + T.cast(second[row, 0, d], "float32") * (
                        1.0 - share
                    )
                    out[row, d] = T.cast(share, dtype)

    return pool_pairs


@program
def mhc_collapse_program(streams: int, dim: int, dtype: str):
    """X [rows, streams, dim], pre [rows, streams] -> [rows, dim]."""
    rows = T.dynamic("rows")

    @T.prim_func
    def mhc_collapse(
        x: T.Tensor((rows, streams, dim), dtype),
        pre: T.Tensor((rows, streams), "float32"),
        out: T.Tensor((rows, dim), dtype),
    ):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            total = T.alloc_var("float32")
            for step in T.serial(each_unit(rows * dim)):
                unit = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if unit < rows * dim:
                    row, d = unit // dim, unit % dim
                    total = 0.0
                    for s in T.serial(streams):
                        total += pre[row, s] * T.cast(x[row, s, d], "float32")
                    out[row, d] = T.cast(total, dtype)

    return mhc_collapse


@program
def combine_experts_program(choices: int, dim: int, dtype: str):
    """pairs [rows, choices, dim], shared [rows, dim] -> [rows, dim]."""
    rows = T.dynamic("rows")

    @T.prim_func
    def combine_experts(
        pairs: T.Tensor((rows, choices, dim), dtype),
        shared: T.Tensor((rows, dim), dtype),
        out: T.Tensor((rows, dim), dtype),
    ):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            total = T.alloc_var("float32")
            for step in T.serial(each_unit(rows * dim)):
                unit = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if unit < rows * dim:
                    row, d = unit // dim, unit % dim
                    total = 0.0
                    for choice in T.serial(choices):
                        total += T.cast(pairs[row, choice, d], "float32")
                    total += T.cast(shared[row, d], "float32")
                    out[row, d] = T.cast(total, dtype)

    return combine_experts


def copy_rows(cache: Tensor, destination: Tensor, source: Tensor) -> None:
    """cache [N, W] of any dtype, row lists [n] int64; see contract `copy_rows`."""
    if len(destination):
        words = cache.view(torch.int32 if cache.shape[1] * cache.element_size() % 4 == 0 else torch.uint8)
        launch = copy_rows_program(words.shape[1], str(words.dtype).removeprefix("torch."))
        launch(words, destination.contiguous(), source.contiguous())


def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    """first, second [R, 2, D] -> [R, D]; see contract `pool_pairs`."""
    out = torch.empty(first.shape[0], first.shape[2], dtype=first.dtype, device=first.device)
    if out.numel():
        pool_pairs_program(first.shape[2], dtype_name(first))(first.contiguous(), second.contiguous(), out)
    return out


def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """streams [R, S, D], pre [R, S] -> [R, D]; see contract `mhc_collapse`."""
    rows, s, dim = streams.shape
    out = torch.empty(rows, dim, dtype=streams.dtype, device=streams.device)
    if out.numel():
        mhc_collapse_program(s, dim, dtype_name(streams))(streams.contiguous(), pre.float().contiguous(), out)
    return out


def combine_experts(pairs: Tensor, shared: Tensor) -> Tensor:
    """pairs [R, k, D], shared [R, D] -> [R, D]; see contract `combine_experts`."""
    out = torch.empty_like(shared, memory_format=torch.contiguous_format)
    if out.numel():
        launch = combine_experts_program(pairs.shape[1], pairs.shape[2], dtype_name(shared))
        launch(pairs.contiguous(), shared.contiguous(), out)
    return out
