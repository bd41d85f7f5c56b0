"""Weights kept in the bytes of the checkpoint: a row of the stored matrix is a record (`records`).

    FP4   [N, K / 2] pairs of e2m1, [N, K / 32] e8m0            a row | K / 2 bytes | K / 32 scales |   as an index key
    FP8   [N, K] e4m3, [N / 32, K / 32] e8m0, one a block       a row | K bytes     | K / 32 scales |   as a window key

    PackedWeight     w[k, n] = value k of record n; the values are exact in bfloat16 and in float32
    ArrangedWeight   the same values in the order in which one provider's kernels read them

A product decodes what it reads, so how weights are kept is memory and speed, and never an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.reference.records import INDEX, WINDOW, RecordFormat, pack, unpack

__all__ = ["FP4_ROWS", "FP8_ROWS", "GROUP", "ArrangedWeight", "PackedWeight", "Packing", "join_columns", "pack_columns"]

FP4_ROWS, FP8_ROWS = INDEX, WINDOW
Packing = Literal["none", "experts", "products"]  # what stays packed: routed experts, or all large products
GROUP = 32  # values of a row that share a scale; K is a multiple of it


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [.., K, N]; see above."""

    records: Tensor  # [.., N, bytes of a row] uint8
    form: RecordFormat  # FP4_ROWS or FP8_ROWS
    dtype: torch.dtype  # of the rows that it multiplies

    @property
    def inner(self) -> int:
        """K."""
        return self.records.shape[-1] * 8 * GROUP // (self.form.value_bits * GROUP + 8)

    @property
    def shape(self) -> tuple[int, ...]:
        """[.., K, N]."""
        *outer, columns, _ = self.records.shape
        return (*outer, self.inner, columns)

    @property
    def codes(self) -> Tensor:
        """[.., N, K * bits / 8] uint8."""
        return self.records[..., : self.inner * self.form.value_bits // 8]

    @property
    def scales(self) -> Tensor:
        """[.., N, K / 32] uint8, e8m0."""
        return self.records[..., self.inner * self.form.value_bits // 8 :]

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The values [.., K, N]; exact in bfloat16 and float32."""
        return unpack(self.records, self.form).to(dtype).transpose(-1, -2).contiguous()


@dataclass(frozen=True, eq=False)
class ArrangedWeight:
    """What a provider's `arranged` made of a packed weight [.., K, N]; only its own operations read it."""

    tiles: Tensor  # [.., ..]: outer dimensions first, as everywhere
    form: RecordFormat
    shape: tuple[int, ...]  # [.., K, N]
    dtype: torch.dtype


def pack_columns(weight: Tensor, form: RecordFormat) -> PackedWeight:
    """weight [.., K, N] rounded to packed values, 32 of a column by one scale. Raises KernelError where K is no
    multiple of 32.
    """
    if weight.shape[-2] % GROUP:
        raise KernelError(f"a packed weight has a scale for {GROUP} values; K is {weight.shape[-2]}, take a multiple")
    return PackedWeight(pack(weight.transpose(-1, -2), form), form, weight.dtype)


def join_columns(*weights: PackedWeight) -> PackedWeight:
    """Weights [.., K, N1], [.., K, N2] .. of one form side by side: [.., K, N1 + N2 ..]."""
    return PackedWeight(torch.cat([weight.records for weight in weights], -2), weights[0].form, weights[0].dtype)
