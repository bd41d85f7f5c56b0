"""A checkpoint folder to `ModelWeights`: one thread a layer, each reads only the ranges that this process owns.

    open_checkpoint (headers against manifest) ─► layers in parallel: read ─► to device ─► dequantize ─► check finite
                                                  └ Engram rows: kept packed, in memory, on the device or mapped on disk

Routed experts are chosen by layer; draft stage s counts as layer num_hidden_layers + s. A quantized weight and its
scale are read together and dequantized on the target device, exactly (dequantize.py), or, of the large products, kept
in the bytes of the checkpoint (kernels/reference/packed.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer_core.checkpoint import released_names as names
from deepinfer_core.checkpoint.dequantize import BLOCK, dequantize_fp4, dequantize_fp8_blocks, fp8_records
from deepinfer_core.checkpoint.engram_hash import EngramHash, engram_hashes
from deepinfer_core.checkpoint.engram_store import EngramTable
from deepinfer_core.checkpoint.fingerprint import weights_fingerprint
from deepinfer_core.checkpoint.folder import Checkpoint, open_checkpoint
from deepinfer_core.checkpoint.manifest import TensorSpec
from deepinfer_core.checkpoint.mapped_memory import on_cuda_in_place
from deepinfer_core.checkpoint.reading import CheckpointReader
from deepinfer_core.checkpoint.token_classes import load_token_classes
from deepinfer_core.checkpoint.weights import (
    AttentionWeights,
    CompressorWeights,
    DraftWeights,
    EngramWeights,
    HyperWeights,
    IndexerWeights,
    IndexKeyWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    Product,
)
from deepinfer_core.config.engine import EngramStorage
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import CheckpointError, ConfigError
from deepinfer_core.kernels.reference.packed import FP4_ROWS, FP8_ROWS, PackedWeight, Packing
from deepinfer_core.kernels.reference.records import unpack

__all__ = ["load_model_weights"]

_MAX_THREADS = 16
_log = logging.getLogger(__name__)


def load_model_weights(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    experts: Mapping[int, Sequence[int]] | None = None,
    engram_rows: Mapping[int, range] | None = None,
    engram_storage: EngramStorage = "memory",
    draft: bool = True,
    packed: Packing = "none",
    progress: bool = True,
) -> ModelWeights:
    """Load the weights of one process.

    `experts` maps a layer to the logical ids of its routed experts to hold, in order; layers it lacks hold all.
    `engram_rows` maps an Engram layer to the table rows to hold; layers it lacks hold all. `engram_storage`: "memory"
    (host), "device", or "disk" (memory-mapped, only looked-up rows are read). `draft=False` leaves the draft module
    out. `packed`: routed experts, or every `Product`, stay in FP4 or FP8 where their columns are whole groups of 32.

    Raises ConfigError for a selection outside the model, ModelNotFoundError for a folder without weights, and
    CheckpointError for files that are damaged or do not match `config`, naming the tensor.
    """
    folder = Path(folder)
    selection = _Selection(config, experts or {}, engram_rows or {}, engram_storage, draft)
    checkpoint = open_checkpoint(folder, config)
    _report_deferred(checkpoint)
    wanted_bytes = sum(selection.bytes_of(spec) for spec in checkpoint.specs.values())
    with tqdm(
        total=wanted_bytes, desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024, disable=not progress
    ) as bar:
        source = _Source(CheckpointReader(checkpoint, bar.update), selection, dtype, torch.device(device), packed)
        return _assemble(source, config, checkpoint)


def _report_deferred(checkpoint: Checkpoint) -> None:
    deferred = [spec for spec in checkpoint.specs.values() if spec.deferred]
    if deferred:
        megabytes = sum(spec.num_bytes for spec in deferred) / 1e6
        _log.warning(
            "%d vision tensors (%.0f MB) are not loaded: this version takes text only", len(deferred), megabytes
        )


@dataclass(frozen=True, slots=True)
class _Selection:
    """Which part of the model this process holds."""

    config: ModelConfig
    experts: Mapping[int, Sequence[int]]
    engram_rows: Mapping[int, range]
    engram_storage: EngramStorage
    draft: bool

    def __post_init__(self) -> None:
        config = self.config
        if self.engram_storage not in ("memory", "device", "disk"):
            raise ConfigError(f"engram_storage is {self.engram_storage!r}; it must be 'memory', 'device' or 'disk'")
        for layer, ids in self.experts.items():
            if not 0 <= layer < config.num_hidden_layers + config.num_nextn_predict_layers:
                raise ConfigError(f"experts names layer {layer}; the model has {config.num_hidden_layers} layers and "
                                  f"{config.num_nextn_predict_layers} draft stages after them")  # fmt: skip
            outside = [expert for expert in ids if not 0 <= expert < self._num_experts(layer)]
            if outside:
                raise ConfigError(
                    f"experts[{layer}] holds {outside[0]}; the layer has experts 0 to {self._num_experts(layer) - 1}"
                )
        for layer, rows in self.engram_rows.items():
            if layer not in config.engram_layer_ids:
                raise ConfigError(f"engram_rows names layer {layer}; Engram layers are {list(config.engram_layer_ids)}")
            if rows.step != 1 or not 0 <= rows.start <= rows.stop <= self._num_rows(layer):
                raise ConfigError(
                    f"engram_rows[{layer}] is {rows}; it must be a range of step 1 within 0 to {self._num_rows(layer)}"
                )

    def expert_ids(self, layer: int) -> tuple[int, ...]:
        return tuple(self.experts.get(layer, range(self._num_experts(layer))))

    def rows(self, layer: int) -> range:
        return self.engram_rows.get(layer, range(self._num_rows(layer)))

    def bytes_of(self, spec: TensorSpec) -> int:
        """How many bytes of a tensor loading will read."""
        if spec.deferred or (spec.part == "draft" and not self.draft):
            return 0
        if spec.layer is not None and spec.expert is not None and spec.layer in self.experts:
            return spec.num_bytes * list(self.experts[spec.layer]).count(spec.expert)
        if spec.part == "engram_table" and spec.layer is not None:
            if self.engram_storage == "disk":
                return 0
            return spec.num_bytes // spec.shape[0] * len(self.rows(spec.layer))
        return spec.num_bytes

    def _num_experts(self, layer: int) -> int:
        return (
            self.config.n_routed_experts
            if layer < self.config.num_hidden_layers
            else self.config.dspark_n_routed_experts
        )

    def _num_rows(self, layer: int) -> int:
        return self.config.engram_num_embeddings[self.config.engram_layer_ids.index(layer)]


def _assemble(source: _Source, config: ModelConfig, checkpoint: Checkpoint) -> ModelWeights:
    hashes = engram_hashes(config)
    classes = load_token_classes(checkpoint.folder, config)
    stages = config.num_nextn_predict_layers if source.selection.draft else 0
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="load") as pool:
        layers = pool.map(
            lambda layer: _layer(source, config, layer, hashes.get(layer)), range(config.num_hidden_layers + stages)
        )
        loaded = list(layers)
    backbone, drafter = loaded[: config.num_hidden_layers], loaded[config.num_hidden_layers :]
    top = source.block("", names.TOP)
    return ModelWeights(
        **top,
        layers=backbone,
        draft=_draft(source, drafter) if drafter else None,
        token_classes=torch.tensor(classes, dtype=torch.int64, device=source.device),
        fingerprint=weights_fingerprint(checkpoint),
        bytes_read=dict(source.reader.bytes_by_part),
    )


def _layer(source: _Source, config: ModelConfig, layer: int, engram: EngramHash | None) -> LayerWeights:
    prefix = names.layer_prefix(layer, config.num_hidden_layers)
    return LayerWeights(
        **source.block(f"{prefix}.", names.NORMS),
        hc_attn=HyperWeights(**source.block(f"{prefix}.", names.hyper("attn"))),
        hc_ffn=HyperWeights(**source.block(f"{prefix}.", names.hyper("ffn"))),
        attn=_attention(source, config, layer, f"{prefix}.attn."),
        ffn=_moe(source, layer, prefix),
        engram=None if engram is None else _engram(source, config, layer, f"{prefix}.engram.", engram),
    )


def _attention(source: _Source, config: ModelConfig, layer: int, prefix: str) -> AttentionWeights:
    weights = source.block(prefix, names.ATTENTION)
    weights["wo_a"] = weights["wo_a"].unflatten(0, (config.o_groups, config.o_lora_rank))
    writes_kv = layer in config.kv_source_layer_ids
    indexes = layer in config.index_source_layer_ids
    return AttentionWeights(
        **weights,
        compressor=CompressorWeights(**source.block(f"{prefix}compressor.", names.COMPRESSOR)) if writes_kv else None,
        index_key=IndexKeyWeights(**source.block(f"{prefix}indexer.", names.INDEX_KEY)) if writes_kv else None,
        indexer=IndexerWeights(**source.block(f"{prefix}indexer.", names.INDEXER)) if indexes else None,
    )


def _moe(source: _Source, layer: int, prefix: str) -> MoeWeights:
    expert_ids = source.selection.expert_ids(layer)
    routed: dict[str, Any] = {matrix: source.experts(prefix, expert_ids, matrix) for matrix in names.EXPERT}
    return MoeWeights(**source.block(f"{prefix}.ffn.", names.MOE), **routed, expert_ids=expert_ids)


def _engram(source: _Source, config: ModelConfig, layer: int, prefix: str, constants: EngramHash) -> EngramWeights:
    def integers(values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=source.device)

    return EngramWeights(
        **source.block(prefix, names.ENGRAM),
        table=source.table(f"{prefix}embed.weight", source.selection.rows(layer)),
        multipliers=integers(constants.multipliers),
        primes=integers(constants.primes),
        offsets=integers(constants.offsets),
    )


def _draft(source: _Source, stages: list[LayerWeights]) -> DraftWeights:
    last = source.block(f"mtp.{len(stages) - 1}.", names.DRAFT_LAST)
    last["confidence"] = last["confidence"].to(torch.float32).flatten()
    return DraftWeights(**source.block("mtp.0.", names.DRAFT_FIRST), stages=stages, **last)


@dataclass(frozen=True, slots=True)
class _Source:
    """Stored tensors by name, as the tensors to compute with."""

    reader: CheckpointReader
    selection: _Selection
    dtype: torch.dtype
    device: torch.device
    packed: Packing  # what is left in its bytes

    def block(self, prefix: str, table: Mapping[str, str]) -> dict[str, Any]:
        """The fields of one dataclass; None for a tensor that the manifest does not have."""
        specs = self.reader.checkpoint.specs
        return {
            field: self.weight(prefix + name, field in names.PRODUCTS) if prefix + name in specs else None
            for field, name in table.items()
        }

    def weight(self, name: str, is_product: bool) -> Product:
        stored = self.reader.read(name).to(self.device)
        if stored.dtype == torch.float8_e4m3fn:
            scales = self.reader.read(names.scale_name(name)).to(self.device)
            if self.packed == "products" and is_product and stored.shape[1] % BLOCK == 0:
                records = fp8_records(stored, scales)
                _require_finite(name, unpack(records, FP8_ROWS).to(self.dtype))
                return PackedWeight(records, FP8_ROWS, self.dtype)
            values = dequantize_fp8_blocks(stored, scales, self.dtype)
        else:  # F32 is kept: mHC, sinks and router biases need it
            values = stored if stored.dtype == torch.float32 else stored.to(self.dtype)
        _require_finite(name, values)
        return values

    def experts(self, prefix: str, expert_ids: Sequence[int], matrix: str) -> Product:
        """[E_local, rows, columns] of one matrix of the chosen experts."""
        rows, half = self.reader.checkpoint.specs[names.expert_name(prefix, 0, matrix)].shape
        keeps = self.packed != "none" and 2 * half % BLOCK == 0
        width, dtype = (half + 2 * half // BLOCK, torch.uint8) if keeps else (2 * half, self.dtype)
        held = torch.empty(len(expert_ids), rows, width, dtype=dtype, device=self.device)
        for i, expert in enumerate(expert_ids):
            name = names.expert_name(prefix, expert, matrix)
            codes, scales = (self.reader.read(part).to(self.device) for part in (name, names.scale_name(name)))
            if keeps:
                held[i, :, :half], held[i, :, half:] = codes.view(torch.uint8), scales.view(torch.uint8)
            else:
                held[i] = dequantize_fp4(codes, scales, self.dtype)
            _require_finite(name, unpack(held[i], FP4_ROWS).to(self.dtype) if keeps else held[i])
        return PackedWeight(held, FP4_ROWS, self.dtype) if keeps else held

    def table(self, name: str, rows: range) -> EngramTable:
        stored = [self._table_bytes(part, rows) for part in (name, names.scale_name(name))]
        num_rows = self.reader.checkpoint.specs[name].shape[0]
        return EngramTable(stored[0], stored[1], num_rows, rows.start, self.dtype, self.device)

    def _table_bytes(self, name: str, rows: range) -> Tensor:
        if self.selection.engram_storage == "disk":
            return self.reader.map_rows(name, rows)
        stored = self.reader.read(name, rows).view(torch.uint8)
        if self.selection.engram_storage == "device":
            return stored.to(self.device)
        return on_cuda_in_place(stored.contiguous(), self.device) if self.device.type == "cuda" else stored


def _require_finite(name: str, values: Tensor) -> None:
    # The sum is finite whenever all values are, short of overflow: the exact look is then rarely taken.
    if not torch.isfinite(values.sum(dtype=torch.float32)) and not cast(bool, torch.isfinite(values).all().item()):
        raise CheckpointError(f"{name} holds NaN or infinity; the checkpoint is damaged, fetch it again")
