"""The files of a checkpoint folder, opened as one validated set of tensors.

    config.json                      ──► manifest: name -> spec    ─┐
    model.safetensors.index.json     ──► weight_map: name -> shard ─┼─► Checkpoint: name -> spec and place of its bytes
    model-0000i-of-0000n.safetensors ──► validated headers         ─┘

Without an index a single `model.safetensors` is accepted. Nothing but headers is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_core.checkpoint.manifest import TensorSpec, check_against_manifest
from deepinfer_core.checkpoint.safetensors_header import ShardHeader, StoredTensor, read_header
from deepinfer_core.checkpoint.strict_json import parse_strict_object
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import CheckpointError, ModelNotFoundError

__all__ = ["INDEX_NAME", "SINGLE_SHARD_NAME", "Checkpoint", "missing_shards", "open_checkpoint", "read_weight_map"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_SHARD_NAME = "model.safetensors"
_MAX_INDEX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose headers agree with its config."""

    folder: Path
    specs: Mapping[str, TensorSpec]
    tensors: Mapping[str, StoredTensor]
    headers: tuple[ShardHeader, ...]  # in the order of file names


def open_checkpoint(folder: Path, config: ModelConfig) -> Checkpoint:
    """Read index and headers and compare them with the manifest of `config`.

    Raises ModelNotFoundError for a folder without weights and CheckpointError for whatever does not fit together.
    """
    weight_map = read_weight_map(folder)
    if weight_map is None:
        if not (folder / SINGLE_SHARD_NAME).exists():
            raise ModelNotFoundError(
                f"{folder} holds neither {INDEX_NAME} nor {SINGLE_SHARD_NAME}; name a folder with a complete checkpoint"
            )
        headers = (read_header(folder / SINGLE_SHARD_NAME),)
    else:
        headers = tuple(read_header(_shard(folder, name)) for name in sorted(set(weight_map.values())))
        _check_index(weight_map, headers, folder)
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{name} is stored in both {tensors[name].path} and {header.path}; fetch the checkpoint again"
                )
            tensors[name] = tensor
    specs = check_against_manifest(config, {name: (t.dtype, t.shape) for name, t in tensors.items()}, str(folder))
    return Checkpoint(folder, specs, tensors, headers)


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name -> shard file name from the folder's index, None where there is no index. Raises CheckpointError."""
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; the limit is {_MAX_INDEX_BYTES}")
        index = parse_strict_object(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); fetch it again") from error
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read, {error}; fetch it again") from error
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; fetch it again")
    names: dict[str, Any] = weight_map
    for name, file in names.items():
        # A plain name in this folder: nothing else may be opened on behalf of a downloaded file.
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or Path(file).name != file
            or "\\" in file
            or "\0" in file
        ):
            raise CheckpointError(
                f"{path} places {name[:200]!r} in {str(file)[:200]!r}, which is no safetensors file of this folder"
            )
    return names


def missing_shards(folder: Path) -> list[str]:
    """Shard files that the folder should hold and doesn't, by name; its index says which. Raises CheckpointError."""
    weight_map = read_weight_map(folder)
    names = {SINGLE_SHARD_NAME} if weight_map is None else set(weight_map.values())
    return sorted(name for name in names if not (folder / name).is_file())


def _shard(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, but {INDEX_NAME} names it; fetch this shard")
    return path


def _check_index(weight_map: Mapping[str, str], headers: tuple[ShardHeader, ...], folder: Path) -> None:
    by_file = {header.path.name: header for header in headers}
    for name, file in weight_map.items():
        if name not in by_file[file].tensors:
            raise CheckpointError(
                f"{folder / file} does not hold {name[:200]!r}, but {INDEX_NAME} places it there; fetch both again"
            )
