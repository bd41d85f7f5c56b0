# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Engram (docs/model.md: Engram): which table rows an n-gram names, and the gate of what they hold on the streams.

    c_i  = token class i positions back; pad from the first dead one (below 0) on
    r_1  = c_0 M_0;  r_n = r_{n-1} xor (c_{n-1} M_{n-1});  row of head h of the n-gram: r_n mod prime + offset

One thread a row and column (n-gram, head) walks the history; products of 64 bits never overflow. The gate, in float32:

    d_i  = (X_i qw_i kw_i) . key_i * rsqrt(mean(X_i^2) + eps) * rsqrt(mean(key_i^2) + eps) * D^-0.5
    X_i += sigmoid(sign(d_i) sqrt(max(|d_i|, 1e-6))) * value           0 where the row is dead (an image)

    key_value row   | key of stream 0 | key of stream 1 | .. | value |           (S + 1) D

One block a row and stream: its threads hold X_i and key_i in registers, so both are read once, and the three sums have
one order for every row.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program

__all__ = ["engram_gate", "engram_rows"]

_THREADS = 128


@program
def engram_rows_program(ngrams: int, heads: int):
    """history [rows, ngrams] -> out [rows, (ngrams - 1) * heads]."""
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
        with T.Kernel(T.ceildiv(rows * columns, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            mixed = T.alloc_var("int64")
            is_dead = T.alloc_var("int32")
            if unit < rows * columns:
                row, column = unit // columns, unit % columns
                mixed = T.int64(0)
                is_dead = 0
                for n in T.unroll(ngrams):
                    if n <= column // heads + 1:
                        if history[row, n] < T.int64(0):
                            is_dead = 1
                        mixed = mixed ^ (T.if_then_else(is_dead == 1, pad_class, history[row, n]) * multipliers[n])
                out[row, column] = mixed % primes[column] + offsets[column]

    return engram_rows


@program
def engram_gate_program(streams: int, dim: int, dtype: str, weight_dtype: str):
    """X [rows, streams, dim], key_value [rows, streams + 1, dim] -> X'."""
    rows = T.dynamic("rows")
    width = -(-dim // (_THREADS * 8)) * _THREADS * 8

    @T.prim_func
    def engram_gate(
        x: T.Tensor((rows, streams, dim), dtype),
        key_value: T.Tensor((rows, streams + 1, dim), dtype),
        q_weight: T.Tensor((streams, dim), weight_dtype),
        k_weight: T.Tensor((streams, dim), weight_dtype),
        dead: T.Tensor((rows,), "uint8"),
        out: T.Tensor((rows, streams, dim), dtype),
        eps: T.float32,
    ):
        with T.Kernel(rows, streams, threads=_THREADS) as (row, s):
            value = T.alloc_fragment((width,), "float32")
            key = T.alloc_fragment((width,), "float32")
            product = T.alloc_fragment((width,), "float32")
            dot = T.alloc_fragment((1,), "float32")
            value_square = T.alloc_fragment((1,), "float32")
            key_square = T.alloc_fragment((1,), "float32")
            gate = T.alloc_fragment((1,), "float32")
            for d in T.Parallel(width):
                value[d] = T.if_then_else(d < dim, T.cast(x[row, s, d], "float32"), 0.0)
                key[d] = T.if_then_else(d < dim, T.cast(key_value[row, s, d], "float32"), 0.0)
            for d in T.Parallel(width):
                product[d] = T.if_then_else(
                    d < dim,
                    value[d] * (T.cast(q_weight[s, d], "float32") * T.cast(k_weight[s, d], "float32")) * key[d],
                    0.0,
                )
            T.reduce_sum(product, dot, dim=0)
            for d in T.Parallel(width):
                product[d] = value[d] * value[d]
            T.reduce_sum(product, value_square, dim=0)
            for d in T.Parallel(width):
                product[d] = key[d] * key[d]
            T.reduce_sum(product, key_square, dim=0)
            for i in T.Parallel(1):
                inverse = T.rsqrt(value_square[i] / dim + eps) * T.rsqrt(key_square[i] / dim + eps)
                scaled = dot[i] * inverse * (float(dim) ** -0.5)
                root = T.sqrt(T.max(T.abs(scaled), 1e-6))
                signed = T.if_then_else(scaled > 0.0, root, T.if_then_else(scaled < 0.0, -root, 0.0))
                gate[i] = T.if_then_else(dead[row] != 0, 0.0, 1.0 / (1.0 + T.exp(-signed)))
            for d in T.Parallel(width):
                if d < dim:
                    out[row, s, d] = value[d] + gate[0] * T.cast(key_value[row, streams, d], "float32")

    return engram_gate


def engram_gate(
    streams: Tensor, key_value: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor, eps: float
) -> Tensor:
    """streams [R, S, D], key_value [R, (S + 1) D] of one dtype, q_weight and k_weight [S, D], dead [R] bool -> [R, S,
    D]; see contract `engram_gate`.
    """
    rows, s, dim = streams.shape
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if rows:
        launch = engram_gate_program(s, dim, dtype_name(streams), dtype_name(q_weight))
        parts = aligned(key_value).view(rows, s + 1, dim)
        launch(
            aligned(streams), parts, q_weight.contiguous(), k_weight.contiguous(), dead.contiguous().view(torch.uint8),
            out, eps,
        )  # fmt: skip
    return out


def engram_rows(
    history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad_class: int, heads: int
) -> Tensor:
    """history [R, N], multipliers [N], primes and offsets [(N - 1) heads], all int64 -> table rows [R, (N - 1) heads];
    see contract `engram_rows`.
    """
    rows, ngrams = history.shape
    out = torch.empty(rows, (ngrams - 1) * heads, dtype=torch.int64, device=history.device)
    if out.numel():
        launch = engram_rows_program(ngrams, heads)
        launch(
            history.contiguous(), multipliers.contiguous(), primes.contiguous(), offsets.contiguous(), out, pad_class
        )
    return out
