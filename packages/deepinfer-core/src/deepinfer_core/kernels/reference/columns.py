"""Columns that the host knows: which rows of a step want something, and what. They go to the device without a wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["rows_of", "to_device"]


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
