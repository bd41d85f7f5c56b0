"""Engram: hashed n-gram memory, gated into the streams (docs/model.md: Engram).

    c_i  = token class i positions back; pad from the first position before 0, or the first image token, on
    r_1  = c_0 M_0;  r_n = r_{n-1} xor (c_{n-1} M_{n-1})
    row of head h of the n-gram: r_n mod prime + offset,  n = 2 .. max

    key | value = rows wkv;  per stream i, in float32:
    d_i  = (X_i qw_i kw_i) . key_i * rsqrt(mean(X_i^2) + eps) * rsqrt(mean(key_i^2) + eps) * D^-0.5
    X_i += sigmoid(sign(d_i) sqrt(max(|d_i|, 1e-6))) * value

The gate is 0 on image positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.kernels.reference.elementwise import sigmoid

__all__ = ["DEAD_CLASS", "engram_gate", "engram_rows"]

DEAD_CLASS = -1


def engram_rows(
    history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad_class: int, heads: int
) -> Tensor:
    """history [R, N] int64: class of the token and of the N - 1 before it, DEAD_CLASS where there is none or it is an
    image; multipliers [N], primes and offsets [(N - 1) * heads] -> table rows [R, (N - 1) * heads] int64.

    A dead class makes all older ones pad, too. Products never overflow: the multipliers are drawn below 2^63 / classes.
    """
    dead = torch.cummax((history < 0).to(torch.int8), 1).values.bool()
    products = torch.where(dead, pad_class, history) * multipliers  # [R, N]
    mixed = [products[:, 0]]
    for n in range(1, history.shape[1]):
        mixed.append(mixed[-1] ^ products[:, n])
    per_column = torch.stack(mixed[1:], 1).repeat_interleave(heads, 1)  # [R, (N - 1) * heads]
    return per_column % primes + offsets


def engram_gate(
    streams: Tensor, key_value: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor, eps: float
) -> Tensor:
    """streams [R, S, D], key_value [R, (S + 1) * D], q_weight and k_weight [S, D], dead [R] bool -> streams."""
    rows, s, d = streams.shape
    x = streams.float()
    key = key_value[:, : s * d].view(rows, s, d).float()
    value = key_value[:, s * d :].view(rows, 1, d).float()
    dot = (x * (q_weight * k_weight) * key).sum(-1)
    inverse = torch.rsqrt((x * x).mean(-1) + eps) * torch.rsqrt((key * key).mean(-1) + eps)
    d_i = dot * inverse * d**-0.5
    gate = sigmoid(torch.sign(d_i) * torch.sqrt(d_i.abs().clamp_min(1e-6)))
    gate = gate.masked_fill(dead[:, None], 0.0)
    return (x + gate[..., None] * value).to(streams.dtype)
