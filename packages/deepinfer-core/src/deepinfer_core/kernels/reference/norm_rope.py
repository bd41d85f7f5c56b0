"""RMSNorm and partial interleaved rotary embedding (docs/model.md: Attention).

rms_norm(x; w) = w * x * rsqrt(mean(x^2) + eps)                      in float32, rounded to the dtype of x

rope: the last `rotary` dims of a head are pairs (a, b) = (x[2k], x[2k + 1]); at position t they turn by t * f_k
      a' = a cos - b sin,  b' = b cos + a sin;  the inverse turns back.
f_k = theta^(-2k / rotary), and on layers with a compressed cache YaRN: f_k <- f_k / factor * ramp_k + f_k (1 - ramp_k),
ramp_k = clamp((k - low) / (high - low), 0, 1), c(n) = rotary * ln(L / (2 pi n)) / (2 ln theta),
low = max(floor(c(beta_fast)), 0), high = min(ceil(c(beta_slow)), rotary - 1). There is no attention temperature.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_core.config.model import YarnConfig

__all__ = ["apply_rope", "rms_norm", "rope_frequencies", "rope_table"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D]."""
    x32 = x.float()
    inverse = torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps)
    return (x32 * inverse * weight).to(x.dtype)


def rope_frequencies(rotary: int, theta: float, yarn: YarnConfig | None) -> Tensor:
    """Angular frequencies f_k in radians per position, float64 [rotary / 2]."""
    k = torch.arange(rotary // 2, dtype=torch.float64)
    frequencies = theta ** (-2.0 * k / rotary)
    if yarn is None:
        return frequencies

    def correction(turns: float) -> float:
        return rotary * math.log(yarn.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), rotary - 1)
    ramp = ((k - low) / max(high - low, 0.001)).clamp(0, 1)  # small configurations can reach low = high
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def rope_table(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Table for `apply_rope`: positions [R] int64, frequencies [P] float32 -> [R, 2, 2P] (cosines, signed sines).

    Both are repeated for the two members of a pair; the sine of the first member carries the minus sign.
    """
    angles = positions.to(torch.float32)[:, None] * frequencies.to(torch.float32)  # [R, P]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)], 1)


def apply_rope(x: Tensor, table: Tensor, *, inverse: bool = False, in_place: bool = False) -> Tensor:
    """Turn the last dims of x [R, D] or [R, H, D] by the rows of `table` [R, 2, rotary].

    `in_place` allows a kernel to overwrite x, most of which stays as it is, and to return it; this one never does.
    """
    rotary = table.shape[-1]
    cos, sin = table[:, 0], table[:, 1]
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    plain, turned = x[..., :-rotary], x[..., -rotary:].float()
    swapped = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    # Separate products and one sum: fused forms round differently in vector and scalar code.
    rotated = turned * cos - swapped * sin if inverse else turned * cos + swapped * sin
    return torch.cat([plain, rotated.to(x.dtype)], -1)
