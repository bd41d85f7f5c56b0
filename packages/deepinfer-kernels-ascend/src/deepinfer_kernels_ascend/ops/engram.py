# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Engram (docs/model.md: Engram): table rows of the hashed n-grams, in 64-bit integers, and the gate, in float32.

    r_1 = c_0 M_0;  r_n = r_{n-1} xor (c_{n-1} M_{n-1});  row of head h of the n-gram: r_n mod prime + offset

A dead class (-1) makes itself and all older ones the pad class. One thread a column of a row.

    d_i  = (X_i qw_i kw_i) . key_i * rsqrt(mean(X_i^2) + eps) * rsqrt(mean(key_i^2) + eps) * D^-0.5
    X_i += sigmoid(sign(d_i) sqrt(max(|d_i|, 1e-6))) * value           0 where the row is dead (an image)

    key_value row   | key of stream 0 | key of stream 1 | .. | value |           (S + 1) D

The sums of a row and stream are cut into parts of 128 dims, one thread a part (`gate_sums`); every thread of
`gate_apply`, which writes 64 elements, adds the parts up again, in order: that saves a pass.
"""

import torch
from torch import Tensor

from deepinfer_kernels_ascend.jit import BLOCKS, THREADS, T, dtype_name, each_unit, program

_PART = 128  # dims of a partial sum
_CHUNK = 64  # elements that a thread of gate_apply writes


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


@program
def gate_sums_program(streams: int, dim: int, dtype: str):
    """X [rows, streams, dim], key_value [rows, streams + 1, dim], weight [streams, dim] -> sums [rows, streams, parts,
    3] of X weight key, X^2, key^2.
    """
    rows = T.dynamic("rows")
    parts = -(-dim // _PART)

    @T.prim_func
    def gate_sums(
        x: T.Tensor((rows, streams, dim), dtype),
        key_value: T.Tensor((rows, streams + 1, dim), dtype),
        weight: T.Tensor((streams, dim), "float32"),
        sums: T.Tensor((rows, streams, parts, 3), "float32"),
    ):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            value = T.alloc_var("float32")
            key = T.alloc_var("float32")
            dot = T.alloc_var("float32")
            value_square = T.alloc_var("float32")
            key_square = T.alloc_var("float32")
            for step in T.serial(each_unit(rows * streams * parts)):
                unit = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if unit < rows * streams * parts:
                    row, s, part = unit // (streams * parts), unit // parts % streams, unit % parts
                    dot = 0.0
                    value_square = 0.0
                    key_square = 0.0
                    for i in T.serial(_PART):
                        if part * _PART + i < dim:
                            value = T.cast(x[row, s, part * _PART + i], "float32")
                            key = T.cast(key_value[row, s, part * _PART + i], "float32")
                            dot += value * weight[s, part * _PART + i] * key
                            value_square += value * value
                            key_square += key * key
                    sums[row, s, part, 0] = dot
                    sums[row, s, part, 1] = value_square
                    sums[row, s, part, 2] = key_square

    return gate_sums


@program
def gate_apply_program(streams: int, dim: int, dtype: str):
    """X, key_value, sums as above, dead [rows] -> X'."""
    rows = T.dynamic("rows")
    parts, chunks = -(-dim // _PART), -(-dim // _CHUNK)

    @T.prim_func
    def gate_apply(
        x: T.Tensor((rows, streams, dim), dtype),
        key_value: T.Tensor((rows, streams + 1, dim), dtype),
        sums: T.Tensor((rows, streams, parts, 3), "float32"),
        dead: T.Tensor((rows,), "uint8"),
        out: T.Tensor((rows, streams, dim), dtype),
        eps: T.float32,
    ):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            dot = T.alloc_var("float32")
            value_square = T.alloc_var("float32")
            key_square = T.alloc_var("float32")
            gate = T.alloc_var("float32")
            for step in T.serial(each_unit(rows * streams * chunks)):
                unit = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if unit < rows * streams * chunks:
                    row, s, first = unit // (streams * chunks), unit // chunks % streams, unit % chunks * _CHUNK
                    dot = 0.0
                    value_square = 0.0
                    key_square = 0.0
                    for part in T.serial(parts):
                        dot += sums[row, s, part, 0]
                        value_square += sums[row, s, part, 1]
                        key_square += sums[row, s, part, 2]
                    value_square = value_square / dim + eps
                    key_square = key_square / dim + eps
                    dot = dot / T.sqrt(value_square) / T.sqrt(key_square) * (float(dim) ** -0.5)
                    gate = T.sqrt(T.max(T.abs(dot), 1e-6))
                    if dot < 0.0:
                        gate = -gate
                    if dot == 0.0:
                        gate = 0.0
                    gate = 1.0 / (1.0 + T.exp(-gate))
                    if T.cast(dead[row], "int32") != 0:
                        gate = 0.0
                    for i in T.serial(_CHUNK):
                        if first + i < dim:
                            dot = T.cast(x[row, s, first + i], "float32")
                            dot += gate * T.cast(key_value[row, streams, first + i], "float32")
                            out[row, s, first + i] = T.cast(dot, dtype)

    return gate_apply


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


def engram_gate(
    streams: Tensor, key_value: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor, eps: float
) -> Tensor:
    """streams [R, S, D], key_value [R, (S + 1) D] of one dtype, q_weight and k_weight [S, D], dead [R] bool -> [R, S,
    D]; see contract `engram_gate`.
    """
    rows, s, dim = streams.shape
    x = streams.contiguous()
    out = torch.empty_like(x)
    if rows:
        both = key_value.contiguous().view(rows, s + 1, dim)
        sums = torch.empty(rows, s, -(-dim // _PART), 3, dtype=torch.float32, device=x.device)
        gate_sums_program(s, dim, dtype_name(x))(x, both, (q_weight.float() * k_weight.float()).contiguous(), sums)
        gate_apply_program(s, dim, dtype_name(x))(x, both, sums, dead.contiguous().view(torch.uint8), out, float(eps))
    return out
