"""Reads and validates the header of a safetensors file before anything in the file is used.

    | u64 little-endian n | n bytes of JSON                                                      | payload            |
                            {"name": {"dtype": .., "shape": [..], "data_offsets": [a, b]}, "__metadata__": {"k": "v"}}

A header comes from strangers, so every claim is checked against the size of the file:
the header's length, JSON without duplicate names, known dtypes, sizes in range, dtype x shape = b - a, and offsets that
tile the payload from 0 to its end without gap or overlap. Whatever is wrong is a CheckpointError that names the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from deepinfer_core.checkpoint.strict_json import parse_strict_object
from deepinfer_core.errors import CheckpointError

__all__ = ["ShardHeader", "StoredTensor", "parse_header", "read_header"]

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_MAX_DIMENSIONS = 8
_MAX_INT = 2**63 - 1
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes are: `num_bytes` from `offset` of `path`, row-major, little-endian."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """A validated header: its own bytes and the tensors of its file."""

    path: Path
    raw: bytes  # length prefix and JSON
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path) -> ShardHeader:
    """Read and validate the header of `path`. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            header_bytes = _header_length(prefix, file_bytes, path)
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); fetch this shard again") from error
    return ShardHeader(path, prefix + text, parse_header(text, file_bytes - 8 - header_bytes, path))


def parse_header(text: bytes, payload_bytes: int, path: Path) -> dict[str, StoredTensor]:
    """The tensors that the JSON `text` describes in a file with `payload_bytes` after it. Raises CheckpointError."""
    try:
        entries = parse_strict_object(text)
    except ValueError as error:
        raise _damaged(path, f"its header cannot be read, {error}") from error
    _check_metadata(entries.pop("__metadata__", {}), path)
    payload_start = 8 + len(text)
    tensors = {name: _tensor(name, entry, payload_start, path) for name, entry in entries.items()}
    _check_tiling(tensors, payload_start, payload_bytes, path)
    return tensors


def _header_length(prefix: bytes, file_bytes: int, path: Path) -> int:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > file_bytes - 8:
        raise _damaged(
            path, f"it has {file_bytes} bytes, less than its header claims; the file is truncated or not safetensors"
        )
    if length > _MAX_HEADER_BYTES:
        raise _damaged(path, f"its header claims {length} bytes; the limit is {_MAX_HEADER_BYTES}")
    return length


def _check_metadata(metadata: Any, path: Path) -> None:
    if not isinstance(metadata, dict):
        raise _damaged(path, "its __metadata__ is not an object of strings")
    values: dict[str, Any] = metadata
    if not all(isinstance(value, str) for value in values.values()):
        raise _damaged(path, "its __metadata__ is not an object of strings")


def _tensor(name: str, entry: Any, payload_start: int, path: Path) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"the entry of {name[:200]!r} does not have exactly dtype, shape and data_offsets")
    fields: dict[str, Any] = entry
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise _damaged(path, f"{name[:200]!r} has the unknown dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise _damaged(path, f"{name[:200]!r} has an impossible shape")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"{name[:200]!r} has impossible data_offsets")
    start, end = offsets
    if end - start != prod(shape) * _DTYPE_BYTES[dtype]:
        raise _damaged(path, f"{name[:200]!r} is {dtype} {shape}, but its data_offsets span {end - start} bytes")
    return StoredTensor(name, path, dtype, tuple(shape), payload_start + start, end - start)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_INT for value in values)


def _check_tiling(tensors: Mapping[str, StoredTensor], payload_start: int, payload_bytes: int, path: Path) -> None:
    position = payload_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "leaves a gap before it"
            raise _damaged(path, f"{tensor.name[:200]!r} {what}")
        position += tensor.num_bytes
    if position != payload_start + payload_bytes:
        needed = position - payload_start
        raise _damaged(path, f"its tensors need {needed} bytes and it has {payload_bytes}: truncated or too long")


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}; fetch this shard again")
