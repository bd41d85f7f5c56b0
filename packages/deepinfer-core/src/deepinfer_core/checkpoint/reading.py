"""Reads byte ranges of validated shards, from many threads, and counts what it reads.

Plain reads instead of a mapping: a file that shrinks while it is read is then an error and not a SIGBUS. Only tables
that are to stay on disk are mapped.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.checkpoint.folder import Checkpoint
from deepinfer_core.errors import CheckpointError

__all__ = ["CheckpointReader"]

_TORCH_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}

_STEP_BYTES = 64 << 20  # progress is reported after at most this much


class CheckpointReader:
    """Tensors of one checkpoint by name. `on_bytes` is called with each number of bytes read, one call at a time."""

    def __init__(self, checkpoint: Checkpoint, on_bytes: Callable[[int], object]) -> None:
        self.checkpoint = checkpoint
        self.bytes_by_part: Counter[str] = Counter()
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """The tensor as stored, or `rows` (step 1) of its first dimension. Raises CheckpointError for missing bytes."""
        stored = self.checkpoint.tensors[name]
        shape, offset, num_bytes = stored.shape, stored.offset, stored.num_bytes
        if rows is not None:
            row_bytes = num_bytes // shape[0]
            shape, offset, num_bytes = (len(rows), *shape[1:]), offset + rows.start * row_bytes, len(rows) * row_bytes
        buffer = np.empty(num_bytes, dtype=np.uint8)
        for count in _fill(buffer, stored.path, offset):
            with self._lock:
                self.bytes_by_part[self.checkpoint.specs[name].part] += count
                self._on_bytes(count)
        return torch.from_numpy(buffer).view(_TORCH_DTYPES[stored.dtype]).view(shape)

    def map_rows(self, name: str, rows: range) -> Tensor:
        """`rows` of a matrix of one-byte elements as uint8 [len(rows), columns], mapped read-only and not read yet."""
        stored = self.checkpoint.tensors[name]
        shape = (len(rows), stored.shape[1])
        if 0 in shape:  # an empty range cannot be mapped
            return torch.empty(shape, dtype=torch.uint8)
        array = _map(stored.path, stored.offset + rows.start * shape[1], shape[0] * shape[1])
        return torch.from_dlpack(array).view(shape)  # torch.from_numpy would warn that it is read-only; nobody writes


def _fill(buffer: NDArray[np.uint8], path: Path, offset: int) -> Iterator[int]:
    """Fill `buffer` from `offset` on, in steps whose sizes are yielded."""
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while len(view):
                count = file.readinto(view[:_STEP_BYTES])
                if not count:
                    raise CheckpointError(f"{path} became shorter while it was read; fetch this shard again")
                view = view[count:]
                yield count
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); check the disk or fetch this shard again"
        ) from error


def _map(path: Path, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """Bytes of a file, mapped read-only for random access."""
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), offset + num_bytes - start, access=mmap.ACCESS_READ, offset=start)
    except (OSError, ValueError) as error:  # ValueError: the file is shorter by now
        raise CheckpointError(f"{path} cannot be mapped ({error}); check the disk or fetch this shard again") from error
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)  # a row has 264 bytes; without this the kernel reads 128 KiB around each
    return np.frombuffer(mapped, np.uint8, num_bytes, offset - start)
