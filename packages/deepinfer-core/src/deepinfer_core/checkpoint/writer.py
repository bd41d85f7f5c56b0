"""`ModelWeights` to a folder in the released layout, bit for bit what `load_model_weights` reads back.

    field ─ released_names ─► name ─ manifest ─► dtype: BF16, F32, FP8 + scale, FP4 + scale
        ─► shards in manifest order, each at most max_shard_bytes ─► index ─► config.json, tokenizer

Engram rows are written as they are stored. Files appear under their names only once they are complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from deepinfer_core.checkpoint import released_names as names
from deepinfer_core.checkpoint.folder import INDEX_NAME, SINGLE_SHARD_NAME
from deepinfer_core.checkpoint.manifest import TensorSpec, manifest
from deepinfer_core.checkpoint.quantize import quantize_fp4, quantize_fp8_blocks
from deepinfer_core.checkpoint.weights import AttentionWeights, EngramWeights, LayerWeights, ModelWeights
from deepinfer_core.config.checks import check_integer
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import CheckpointError, ConfigError

__all__ = ["write_checkpoint"]

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def write_checkpoint(
    folder: str | Path,
    weights: ModelWeights,
    config_json: Mapping[str, Any],
    *,
    tokenizer_folder: str | Path | None = None,
    max_shard_bytes: int = 10 << 30,
) -> None:
    """Write `weights` (all experts, all Engram rows) and the root object of their config.json into `folder`.

    Weights that fit one shard become `model.safetensors` without an index, as other programs write them.

    `tokenizer_folder`: where tokenizer.json, tokenizer_config.json and generation_config.json are copied from, where
    present. Raises ConfigError for a config that is not valid and CheckpointError for weights that lack a tensor of its
    manifest, have another shape, or hold values that are not finite; a config with vision layers needs tensors that
    ModelWeights cannot hold.
    """
    check_integer("max_shard_bytes", max_shard_bytes, 1, 1 << 50, ConfigError)
    config = ModelConfig.from_dict(dict(config_json))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    specs = list(manifest(config))
    values = _flatten(weights, config)
    unknown = sorted(values.keys() - {spec.name for spec in specs})
    if unknown:
        raise CheckpointError(f"the weights have {len(unknown)} tensors that their config lacks, such as {unknown[0]}")
    shards = _split(specs, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE_SHARD_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, _encoded(shard, values))
        weight_map |= {spec.name: file for spec in shard}
    if len(shards) == 1:
        (folder / INDEX_NAME).unlink(missing_ok=True)  # one of an earlier checkpoint here would be believed
    else:
        metadata = {"total_size": sum(spec.num_bytes for spec in specs)}
        _write_json(folder / INDEX_NAME, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
    _write_json(folder / "config.json", config_json)
    if tokenizer_folder is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            source = Path(tokenizer_folder) / name
            if source.exists() and source.resolve() != (folder / name).resolve():
                shutil.copyfile(source, folder / name)


# ---- fields to released names --------------------------------------------------------------------------------------


def _flatten(weights: ModelWeights, config: ModelConfig) -> dict[str, Tensor]:
    """Released name of each weight (without scales) -> its values; packed Engram tables with their scales."""
    values = dict(_block("", weights, names.TOP))
    layers = weights.layers
    if weights.draft is not None:
        last = len(weights.draft.stages) - 1
        layers = (*layers, *weights.draft.stages)
        values |= _block("mtp.0.", weights.draft, names.DRAFT_FIRST)
        values |= _block(f"mtp.{last}.", weights.draft, names.DRAFT_LAST)
    for number, layer in enumerate(layers):
        values |= _layer(layer, names.layer_prefix(number, config.num_hidden_layers))
    return values


def _layer(layer: LayerWeights, prefix: str) -> Iterator[tuple[str, Tensor]]:
    yield from _block(f"{prefix}.", layer, names.NORMS)
    yield from _block(f"{prefix}.", layer.hc_attn, names.hyper("attn"))
    yield from _block(f"{prefix}.", layer.hc_ffn, names.hyper("ffn"))
    yield from _attention(layer.attn, f"{prefix}.attn.")
    yield from _block(f"{prefix}.ffn.", layer.ffn, names.MOE)
    for matrix in names.EXPERT:
        stacked: Tensor = getattr(layer.ffn, matrix)
        for row, expert in enumerate(layer.ffn.expert_ids):
            yield names.expert_name(prefix, expert, matrix), stacked[row]
    if layer.engram is not None:
        yield from _engram(layer.engram, f"{prefix}.engram.")


def _attention(attention: AttentionWeights, prefix: str) -> Iterator[tuple[str, Tensor]]:
    yield from _block(prefix, attention, names.ATTENTION)
    yield from _block(f"{prefix}compressor.", attention.compressor, names.COMPRESSOR)
    yield from _block(f"{prefix}indexer.", attention.index_key, names.INDEX_KEY)
    yield from _block(f"{prefix}indexer.", attention.indexer, names.INDEXER)


def _engram(engram: EngramWeights, prefix: str) -> Iterator[tuple[str, Tensor]]:
    yield from _block(prefix, engram, names.ENGRAM)
    yield f"{prefix}embed.weight", engram.table.codes.view(torch.float8_e4m3fn)
    yield f"{prefix}embed.scale", engram.table.scales.view(torch.float8_e8m0fnu)


def _block(prefix: str, block: object | None, table: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    if block is not None:
        for field, name in table.items():
            value: Tensor | None = getattr(block, field)
            if value is not None:
                yield prefix + name, value


# ---- values to bytes ----------------------------------------------------------------------------------------------


def _encoded(shard: list[TensorSpec], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    encoded: dict[str, Tensor] = {}
    for spec in shard:
        if spec.name in encoded or (spec.dtype == "F8_E8M0" and spec.name not in values):
            continue  # a scale: comes with its weight, which stands right before it
        if spec.name not in values:
            raise CheckpointError(f"the weights lack {spec.name}, which the manifest of their config has")
        encoded |= _encode(spec, values[spec.name].detach().cpu())
    return encoded


def _encode(spec: TensorSpec, value: Tensor) -> dict[str, Tensor]:
    logical_shape = (*spec.shape[:-1], spec.shape[-1] * 2) if spec.dtype == "I8" else spec.shape
    if value.numel() != torch.Size(logical_shape).numel():
        raise CheckpointError(f"{spec.name} has the shape {list(value.shape)}; its config needs {list(logical_shape)}")
    value = value.reshape(logical_shape)
    if spec.part == "engram_table":  # stored bytes
        return {spec.name: value.contiguous()}
    if not torch.isfinite(value).all():
        raise CheckpointError(f"{spec.name} holds NaN or infinity; such weights are not written")
    if spec.dtype in _TORCH_DTYPES:
        # A copy: a checkpoint must not share memory between tensors, and views of stacked weights would.
        return {spec.name: value.to(_TORCH_DTYPES[spec.dtype], copy=True).contiguous()}
    codes, scales = quantize_fp4(value) if spec.dtype == "I8" else quantize_fp8_blocks(value)
    return {spec.name: codes, names.scale_name(spec.name): scales}


def _split(specs: list[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Shards in manifest order, each at most `max_shard_bytes` or one weight with its scale that alone is larger."""
    shards: list[list[TensorSpec]] = [[]]
    room = max_shard_bytes
    for i, spec in enumerate(specs):
        follows_weight = spec.dtype == "F8_E8M0"
        scale = specs[i + 1] if i + 1 < len(specs) and specs[i + 1].dtype == "F8_E8M0" else None
        needed = spec.num_bytes + (scale.num_bytes if scale and not follows_weight else 0)
        if not follows_weight and needed > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    return shards


def _write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(path)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)
