# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""cache[destination] = cache[source] for two row lists that don't meet: scratch keys into rings, pairs into rings.

    row   | chunk of thread t | t + 1 | ..      a chunk: 4, 2 or 1 words of 32 bits (of bytes where a row has odd ones)

A row is copied as raw words, whatever its dtype, through the registers of one thread a chunk.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, program

_THREADS = 128


@program
def copy_rows_program(words: int, word_dtype: str):
    """cache [rows, words] of raw words."""
    pairs, cache_rows = T.dynamic("pairs"), T.dynamic("cache_rows")
    chunk = next(size for size in (4, 2, 1) if words % size == 0)
    chunks = words // chunk

    @T.prim_func
    def copy_rows(
        cache: T.Tensor((cache_rows, words), word_dtype),
        destination: T.Tensor((pairs,), "int64"),
        source: T.Tensor((pairs,), "int64"),
    ):
        with T.Kernel(T.ceildiv(pairs * chunks, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            pair, first = unit // chunks, unit % chunks * chunk
            moved = T.alloc_local((chunk,), word_dtype)
            if pair < pairs:
                for i in T.vectorized(chunk):
                    moved[i] = cache[source[pair], first + i]
                for i in T.vectorized(chunk):
                    cache[destination[pair], first + i] = moved[i]

    return copy_rows


def copy_rows(cache: Tensor, destination: Tensor, source: Tensor) -> None:
    """cache [N, W] of any dtype, row lists [n] int64; see contract `copy_rows`."""
    if len(destination):
        row_bytes = cache.shape[1] * cache.element_size()
        words = cache.view(torch.int32 if row_bytes % 4 == 0 else torch.uint8)
        launch = copy_rows_program(words.shape[1], "int32" if row_bytes % 4 == 0 else "uint8")
        launch(words, destination.contiguous(), source.contiguous())
