# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Table rows of the hashed n-grams (model.md 2.6), in 64-bit integers.

    r_1 = c_0 M_0;  r_n = r_{n-1} xor (c_{n-1} M_{n-1});  row of head h of the n-gram: r_n mod prime + offset

A dead class (-1) makes itself and all older ones the pad class. One thread a column of a row.
"""

import torch
from torch import Tensor

from deepinfer_kernels_ascend.jit import BLOCKS, THREADS, T, each_unit, program


@program
def engram_rows_program(ngrams: int, heads: int):
    """history [rows, ngrams] -> table rows [rows, (ngrams - 1) heads]."""
    rows = T.dynamic("rows")
    columns = (ngrams - 1) * heads

    @T.prim_func
    def engram_rows(
        history: T.Tensor((rows, ngrams), "int64"),
        multipliers: T.Tensor((ngrams,), "int64"),
        primes: T.Tensor((columns,), "int64"),
        offsets: T.Tensor((columns,), "int64"),
        out: T.Tensor((rows, columns), "int64"),
        pad_class: T.int64,
    ):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            mixed = T.alloc_var("int64")
            token = T.alloc_var("int64")
            dead = T.alloc_var("int32")
            for step in T.serial(each_unit(rows * columns)):
                unit = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if unit < rows * columns:
                    row, column = unit // columns, unit % columns
                    mixed = T.int64(0)
                    dead = 0
                    for n in T.serial(column // heads + 2):
                        token = history[row, n]
                        if token < T.int64(0):
                            dead = 1
                        if dead != 0:
                            token = pad_class
                        mixed = mixed ^ (token * multipliers[n])
                    out[row, column] = mixed % primes[column] + offsets[column]

    return engram_rows


def engram_rows(
    history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad_class: int, heads: int
) -> Tensor:
    """history [R, N] int64 -> [R, (N - 1) heads] int64; see contract `engram_rows`."""
    rows, ngrams = history.shape
    out = torch.empty(rows, (ngrams - 1) * heads, dtype=torch.int64, device=history.device)
    if out.numel():
        launch = engram_rows_program(ngrams, heads)
        constants = (multipliers.contiguous(), primes.contiguous(), offsets.contiguous())
        launch(history.contiguous(), *constants, out, pad_class)
    return out
