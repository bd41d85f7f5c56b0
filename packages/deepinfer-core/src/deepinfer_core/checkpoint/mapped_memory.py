"""Host memory as a tensor of a CUDA device, in place: kernels read it over the bus, row by row, and nobody copies it.

    tensor on the host ── pinned where it lies (cudaHostRegister) ── same addresses on the device ── CUDA tensor

An Engram table of 98 GB stays in host memory, and a step that reads 24 rows of it for each token needs neither the host
nor a copy of row numbers to it, so it can be captured in a graph.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.errors import CapacityError

__all__ = ["on_cuda_in_place"]

_PORTABLE_AND_MAPPED = 1 | 2  # of cudaHostRegister
# Pages are pinned whole and once, and what is smaller may share them with its neighbours on the heap.
_SMALLEST_BYTES = 64 << 20


class _Owner:
    """Keeps the memory, and describes it as CUDA's array protocol does; at its end the memory is given free."""

    def __init__(self, stored: Tensor) -> None:
        self.stored = stored
        self.__cuda_array_interface__ = {
            "shape": tuple(stored.shape),
            "typestr": "|u1",
            "data": (stored.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def on_cuda_in_place(stored: Tensor, device: torch.device) -> Tensor:
    """uint8 `stored`, contiguous on the host -> the same bytes as a tensor of a CUDA device; few bytes are moved there.
    Raises CapacityError where the system does not let that much memory be pinned.
    """
    if stored.numel() < _SMALLEST_BYTES:
        return stored.to(device)
    runtime: Any = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(stored.data_ptr(), stored.numel(), _PORTABLE_AND_MAPPED))
    if status:
        raise CapacityError(
            f"{stored.numel() / 1e9:.1f} GB of host memory could not be pinned for the GPU (CUDA error {status}); "
            "raise the limit of locked memory, or set engram_storage to 'device' or 'disk'"
        )
    owner = _Owner(stored)
    weakref.finalize(owner, runtime.cudaHostUnregister, stored.data_ptr())
    return torch.as_tensor(owner, device=device)
