"""Weights kept in e4m3, and the rounding of rows that goes with them.

    CodedWeight   w[k, n] = codes[n, k] scale[n]          scale[n] = the power of two that brings column n below 448
    a product     out[r, n] = sum_k round(x)[r, k] w[k, n], where round(x) = e4m3(x / s_r) s_r, s_r the row's scale

The released weights are e4m3 and e2m1 times powers of two, so a column's codes are theirs, shifted; only values far
below the column's largest lose bits. The original computes these products on e4m3 rows with a scale for every 32
channels; one a row differs from that where a value lies 15 binades below the row's largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.reference.packed import ArrangedWeight, PackedWeight
from deepinfer_core.kernels.reference.rounding import ceil_power_of_two

__all__ = ["CodedWeight", "Weight", "code_columns", "plain_weight", "round_rows"]

_LARGEST = 448.0
_LEAST = 1e-4  # of what a row's scale is made for, as in the original

type Weight = Tensor | CodedWeight | PackedWeight | ArrangedWeight


@dataclass(frozen=True, eq=False)
class CodedWeight:
    """A weight [.., K, N]; see above."""

    codes: Tensor  # [.., N, K] float8_e4m3fn
    scale: Tensor  # [.., N] float32
    dtype: torch.dtype  # of the rows that it multiplies

    @property
    def shape(self) -> tuple[int, ...]:
        """[.., K, N]."""
        *outer, columns, inner = self.codes.shape
        return (*outer, inner, columns)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The values [.., K, N]; exact in bfloat16 and float32."""
        return (self.codes.to(dtype) * self.scale[..., None].to(dtype)).transpose(-1, -2).contiguous()


def plain_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values of a weight in any form [.., K, N]. Raises KernelError for one that a provider arranged for itself."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, ArrangedWeight):
        raise KernelError("a weight that is arranged for a provider's kernels came to the reference")
    return weight.decoded(dtype)


def code_columns(weight: Tensor) -> CodedWeight:
    """weight [.., K, N] in e4m3, column by column."""
    columns = weight.transpose(-1, -2).float()  # [.., N, K]
    amax = columns.abs().amax(-1, keepdim=True).clamp_min(_LARGEST * torch.finfo(torch.float32).tiny)
    scale = ceil_power_of_two(amax * (1.0 / _LARGEST))
    codes = (columns / scale).to(torch.float8_e4m3fn).contiguous()
    return CodedWeight(codes, scale[..., 0].contiguous(), weight.dtype)


def round_rows(x: Tensor) -> Tensor:
    """x [R, K] as products with coded weights take it."""
    values = x.float()
    scale = ceil_power_of_two(values.abs().amax(-1, keepdim=True).clamp_min(_LEAST) * (1.0 / _LARGEST))
    return ((values / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
