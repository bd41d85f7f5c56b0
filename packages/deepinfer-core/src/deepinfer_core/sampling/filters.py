"""Temperature, top-k, top-p and min-p of rows with different parameters: each step runs on the rows that use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.sampling import processors

__all__ = ["RowFilters", "rows_of", "to_device"]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of a numpy array on `device`; nobody waits for it."""
    # A field of one record counts as contiguous whatever its stride is; torch wants the plain stride, so copy.
    plain = torch.from_numpy(array.copy() if array.size == 1 else np.ascontiguousarray(array))
    if device.type == "cuda":
        plain = plain.pin_memory()  # torch keeps the block until the copy out of it is done
    return plain.to(device, non_blocking=True)


def rows_of(tensor: Tensor, index: NDArray[np.int64]) -> Tensor:
    """tensor[index] for ascending `index`, without a copy where that is all of it."""
    return tensor if len(index) == len(tensor) else tensor.index_select(0, to_device(index, tensor.device))


@dataclass(frozen=True, slots=True)
class RowFilters:
    """Parameters of R rows, on the host; 0, 1 and 0 turn top_k, top_p and min_p off."""

    temperature: NDArray[np.float32]  # [R] above 0
    top_k: NDArray[np.int64]  # [R]
    top_p: NDArray[np.float64]  # [R]
    min_p: NDArray[np.float64]  # [R]

    @classmethod
    def of(cls, records: NDArray[np.void]) -> RowFilters:
        """From records of `SlotTable`, one a row."""
        return cls(records["temperature"], records["top_k"], records["top_p"], records["min_p"])

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [R, ids] that softmax turns into the distribution to draw from; what may not be drawn is -inf."""
        logits = self.apply_temperature(logits)
        k = np.minimum(self.top_k, logits.shape[1])
        logits = _on_some(logits, k > 0, processors.keep_top_k, k, int(k.max(initial=0)))
        logits = _on_some(logits, self.top_p < 1.0, processors.keep_top_p, self.top_p)
        return _on_some(logits, self.min_p > 0.0, processors.keep_min_p, self.min_p)

    def apply_temperature(self, logits: Tensor) -> Tensor:
        """x / T alone."""
        return processors.apply_temperature(logits, to_device(self.temperature, logits.device))


def _on_some(
    logits: Tensor, chosen: NDArray[np.bool_], step: Callable[..., Tensor], parameter: NDArray[Any], *more: int
) -> Tensor:
    """Apply `step(rows, parameter, *more)` to the chosen rows."""
    index = np.flatnonzero(chosen)
    if not index.size:
        return logits
    result = step(rows_of(logits, index), to_device(parameter[index], logits.device), *more)
    return result if len(index) == len(logits) else logits.index_copy(0, to_device(index, logits.device), result)
