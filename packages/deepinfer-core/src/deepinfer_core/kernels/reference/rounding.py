"""Cache roundings: the low-precision formats in which keys are stored, applied as value -> value.

    record        values            group  scale                                        bytes (512 or 128 wide)
    window        e4m3, |v| <= 448     32  2^ceil(log2(max(amax, 1e-4) / 448))          528
    compressed    e2m1, |v| <= 6       16  e4m3(max(amax, 6 * 2^-9) / 6)                288
    index         e2m1, |v| <= 6       32  2^ceil(log2(max(amax, 6 * 2^-126) / 6))      68

The model was trained with these roundings, so they are part of it on every backend and in every dtype. All results are
exact in bfloat16. Powers of two are built from the bits of the float: `2 ** ceil(log2(x))` in floating point is off
for one mantissa per binade. Rounding is to nearest, ties to even.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "ceil_power_of_two",
    "round_compressed",
    "round_e2m1",
    "round_e4m3",
    "round_index",
    "round_window",
    "straight_through",
]

_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0


def ceil_power_of_two(x: Tensor) -> Tensor:
    """Smallest power of two >= x, for positive normal float32 x."""
    return ((x.view(torch.int32) + _MANTISSA) & _EXPONENT).view(torch.float32)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 value of float32 x, saturating at +-448."""
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with the sign of float32 x, ties to the even code, saturating at +-6."""
    x = x.clamp(-_E2M1_MAX, _E2M1_MAX)
    # Spacing of the grid at |x|: half of the power of two at or below it, at least 0.5.
    step = (x.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_min(1.0) * 0.5
    return torch.round(x / step) * step


def round_window(x: Tensor) -> Tensor:
    """Window keys as stored: [..., D], D a multiple of 32."""
    groups = _groups(x, 32)
    scale = ceil_power_of_two(groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) * (1.0 / _E4M3_MAX))
    return _restore(round_e4m3(groups / scale) * scale, x)


def round_compressed(x: Tensor) -> Tensor:
    """Compressed entries as stored: [..., D], D a multiple of 16."""
    groups = _groups(x, 16)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(_E2M1_MAX * 2.0**-9)
    scale = round_e4m3(amax / _E2M1_MAX)
    return _restore(round_e2m1(groups / scale) * scale, x)


def round_index(x: Tensor) -> Tensor:
    """Index keys as stored, and index queries: [..., D], D a multiple of 32."""
    groups = _groups(x, 32)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(_E2M1_MAX * 2.0**-126)
    scale = ceil_power_of_two(amax / _E2M1_MAX)
    return _restore(round_e2m1(groups / scale) * scale, x)


def straight_through(rounded: Tensor, x: Tensor) -> Tensor:
    """`rounded` in the forward pass, the gradient of the identity in the backward pass (training only)."""
    return x + (rounded - x).detach()


def _groups(x: Tensor, size: int) -> Tensor:
    return x.float().unflatten(-1, (-1, size))  # [..., D / size, size]


def _restore(groups: Tensor, like: Tensor) -> Tensor:
    return groups.flatten(-2).to(like.dtype)
