"""What a case of the conformance suite is: one operation on one shape, its inputs by row, which a test may cut, and
those that all rows share.

A case runs an operation through a `Kernels` table: `run(kernels, rows, shared)` -> tuple of tensors with one row an
input row, or, for operations that write, the whole cache after the write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference.records import RecordFormat, pack, unpack

__all__ = ["CacheContent", "Case", "Inputs", "Run"]

type Inputs = dict[str, Any]
type Run = Callable[[Kernels, Inputs, Inputs], tuple[Tensor, ...]]


@dataclass(frozen=True)
class CacheContent:
    """What a cache holds; the test stores it in the form that the provider wants."""

    values: Tensor  # [rows, dim] float32
    fmt: RecordFormat

    def stored(self, form: str, dtype: torch.dtype, device: str) -> Tensor:
        """Packed records, or the rounded values in `dtype`."""
        records = pack(self.values, self.fmt)
        return (records if form == "packed" else unpack(records, self.fmt).to(dtype)).to(device)


@dataclass(frozen=True)
class Case:
    """One operation on one shape. `make(rows, generator)` gives row inputs and shared ones, float32 on the CPU."""

    op: str
    name: str
    make: Callable[[int, torch.Generator], tuple[Inputs, Inputs]]
    run: Run
    by_row: bool = True  # outputs have one row an input row
    coded: bool = False  # its weights are coded; only for operations that a provider takes such weights for
    packed: bool = False  # or packed
