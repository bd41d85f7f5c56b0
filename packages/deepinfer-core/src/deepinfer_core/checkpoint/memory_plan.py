"""What fits: bytes by part and rank, from a config alone.

    device of rank r = weights: dense parts whole, its share of the routed experts (and of Engram rows kept on devices)
                     + blocks of its sequences: compressed KV and index keys, 890 B a token in the release
                     + rings of its sequences: windows of window + backtrack slots, open pairs, token history
                     + scratch rows of the largest step, and activations (an estimate)
    host             = Engram tables where they are in host memory: one copy, shared by all ranks

Six forms of the weights; caches have the released layout in all but the last, Engram rows in all:

    packed     as released                        the least that any engine needs
    products   the large products as released     what this one holds on an accelerator whose kernels decode them,
    experts    .. of these, routed experts only   .. or decode those of experts, if it is asked to or needs the room
    bfloat16   FP8 and FP4 dequantized            what it holds on others
    float8     some of them in e4m3 instead       .. with `float8_products` (kernels/reference/coded.py)
    plain      everything in float32              what the reference holds on a CPU

Vision tensors are not loaded. Rank 0 has the largest share of everything, so it decides what fits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal, get_args

from deepinfer_core.checkpoint.manifest import TensorSpec, manifest
from deepinfer_core.checkpoint.sharding import share
from deepinfer_core.config.checks import check_choice, check_integer, check_number
from deepinfer_core.config.engine import EngramStorage
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.scheduler import BLOCK_TOKENS, IN_FLIGHT_STEPS, CacheConfig, SchedulerConfig
from deepinfer_core.errors import ConfigError
from deepinfer_core.kernels.reference.packed import GROUP

__all__ = [
    "DEFAULT_MEMORY_FRACTION",
    "DEFAULT_STEP_ROWS",
    "Form",
    "Limits",
    "MemoryPlan",
    "PartSize",
    "RankMemory",
    "Workload",
    "cache_bytes",
    "kv_bytes_per_token",
    "part_sizes",
    "plan_memory",
]

Form = Literal["packed", "products", "experts", "bfloat16", "float8", "plain"]
_RELEASED_AND_PLAIN: tuple[Form, Form] = ("packed", "plain")
DEFAULT_MEMORY_FRACTION = CacheConfig().memory_fraction
DEFAULT_STEP_ROWS = SchedulerConfig().max_num_batched_tokens

_MAX_DEVICES = 1024
_MAX_SLOTS = 1 << 20  # sequences of one rank
_MAX_BYTES = 1 << 60
_BFLOAT16, _FLOAT32 = 2, 4
_INT64 = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be run, on what. Raises ConfigError for values out of range."""

    context_tokens: int  # prompt and output of each sequence
    num_sequences: int = 1  # at once, over all devices; spread evenly
    num_devices: int = 1  # ranks: each holds the dense weights, its experts, and the caches of its sequences
    device_bytes: int | None = None  # memory of one device; None = no limit
    host_bytes: int | None = None  # memory of the host; None = no limit
    memory_fraction: float = DEFAULT_MEMORY_FRACTION  # of a device's memory that may be planned
    engram_storage: EngramStorage = "memory"
    form: Form = "packed"
    step_rows: int = DEFAULT_STEP_ROWS  # rows of the largest step
    num_drafts: int | None = None  # None = the checkpoint's block size

    def __post_init__(self) -> None:
        check_integer("context", self.context_tokens, 1, 2**31, ConfigError)
        check_integer("sequences", self.num_sequences, 1, _MAX_SLOTS, ConfigError)
        check_integer("devices", self.num_devices, 1, _MAX_DEVICES, ConfigError)
        for name, value in (("device memory", self.device_bytes), ("host memory", self.host_bytes)):
            if value is not None:
                check_integer(f"{name} in bytes", value, 1, _MAX_BYTES, ConfigError)
        check_number("memory fraction", self.memory_fraction, 0.0, 1.0, ConfigError, above_low=True)
        check_choice("engram storage", self.engram_storage, get_args(EngramStorage), ConfigError)
        check_choice("form", self.form, get_args(Form), ConfigError)
        check_integer("step rows", self.step_rows, 1, 2**22, ConfigError)
        if self.num_drafts is not None:
            check_integer("drafts", self.num_drafts, 0, 256, ConfigError)

    @property
    def tables_on_device(self) -> bool:
        """Whether Engram rows take device memory; the device of the plain form is the host itself."""
        return self.engram_storage == "device" or (self.engram_storage == "memory" and self.form == "plain")

    @property
    def budget_bytes(self) -> int | None:
        """Device memory that may be planned."""
        return None if self.device_bytes is None else int(self.device_bytes * self.memory_fraction)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Device memory of ranks `first_rank .. last_rank`, which are alike."""

    first_rank: int
    last_rank: int
    weights: Mapping[str, int]  # manifest part -> bytes
    caches: Mapping[str, int]  # "blocks", "windows", "pairs and history", "step scratch" -> bytes
    activations: int  # estimate

    @property
    def total(self) -> int:
        return sum(self.weights.values()) + sum(self.caches.values()) + self.activations


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest context and batch and fewest devices that fit, each with the other values kept; 0 = nothing fits."""

    context_tokens: int
    num_sequences: int
    num_devices: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The answer for one workload."""

    workload: Workload
    ranks: tuple[RankMemory, ...]
    host_bytes: int  # Engram tables in host memory
    disk_bytes: int  # Engram tables read from disk
    ring_slots: int
    limits: Limits | None  # None where the device memory is not limited

    @property
    def fits(self) -> bool:
        """Whether every rank and the host have room; what is not limited has."""
        budget, host = self.workload.budget_bytes, self.workload.host_bytes
        return (budget is None or self.ranks[0].total <= budget) and (host is None or self.host_bytes <= host)


def plan_memory(config: ModelConfig, workload: Workload) -> MemoryPlan:
    """Lay `workload` out. Raises ConfigError for a context beyond the model's."""
    if workload.context_tokens > config.max_position_embeddings:
        raise ConfigError(
            f"context is {workload.context_tokens}; the model has max_position_embeddings "
            f"{config.max_position_embeddings}"
        )
    sizes = _Sizes.of(config, workload.form)
    tables = sum(rows * row_bytes for rows, row_bytes in sizes.tables)
    return MemoryPlan(
        workload=workload,
        ranks=_ranks(config, sizes, workload),
        host_bytes=tables if workload.engram_storage == "memory" and not workload.tables_on_device else 0,
        disk_bytes=tables if workload.engram_storage == "disk" else 0,
        ring_slots=config.sliding_window + _backtrack(config, workload.num_drafts),
        limits=None if workload.budget_bytes is None else _limits(config, sizes, workload, workload.budget_bytes),
    )


# ---- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartSize:
    """One part of the checkpoint; *packed* bytes of all parts add up to its payload."""

    part: str
    num_parameters: int
    packed_bytes: int
    plain_bytes: int


def part_sizes(config: ModelConfig) -> list[PartSize]:
    """Sizes of all parts of the manifest, vision included, in its order."""
    parts: dict[str, Counter[str]] = {}
    # Few kinds, since experts are alike; in these forms a tensor's name does not matter.
    kinds = Counter(TensorSpec("", spec.shape, spec.dtype, spec.part) for spec in manifest(config))
    for spec, count in kinds.items():
        size = parts.setdefault(spec.part, Counter())
        size["parameters"] += count * spec.num_parameters
        for form in _RELEASED_AND_PLAIN:
            size[form] += count * _tensor_bytes(spec, form)
    return [PartSize(part, size["parameters"], size["packed"], size["plain"]) for part, size in parts.items()]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The manifest, summed up by how it is split."""

    whole: Mapping[str, int]  # part -> bytes that every rank holds
    experts: Mapping[tuple[str, int], int]  # (part, experts of a layer) -> bytes of one expert of each such layer
    tables: tuple[tuple[int, int], ...]  # (rows, bytes of a row) of each Engram table

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, config: ModelConfig, form: Form) -> _Sizes:
        whole: Counter[str] = Counter()
        experts: Counter[tuple[str, int]] = Counter()
        row_bytes: Counter[int] = Counter()
        for spec in manifest(config):
            if spec.part == "engram_table" and spec.layer is not None:
                row_bytes[spec.layer] += spec.num_bytes // spec.shape[0]
            elif spec.expert is None and not spec.deferred:
                whole[spec.part] += _tensor_bytes(spec, form)
            elif spec.expert == 0:  # all experts of a layer are alike
                num_experts = config.dspark_n_routed_experts if spec.part == "draft" else config.n_routed_experts
                experts[spec.part, num_experts] += _tensor_bytes(spec, form)
        rows = zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
        return cls(whole, experts, tuple((num_rows, row_bytes[layer]) for layer, num_rows in rows))

    def of_rank(self, rank: int, workload: Workload) -> dict[str, int]:
        parts = Counter(self.whole)
        for (part, num_experts), expert_bytes in self.experts.items():
            parts[part] += expert_bytes * len(share(num_experts, rank, workload.num_devices))
        if workload.tables_on_device:
            for num_rows, row_bytes in self.tables:
                parts["engram_table"] += row_bytes * len(share(num_rows, rank, workload.num_devices))
        return dict(parts)


# Held in float32 on accelerators, too (model/params.py), beside what is stored so; and products that may be packed, or
# that `float8_products` codes.
_FLOAT32_TENSORS = ("norm.weight", "q_weight", "k_weight", "confidence_head.proj.weight")
_PRODUCT_TENSORS = ("wq_b.weight", "wo_b.weight", "w1.weight", "w2.weight", "w3.weight")


def _tensor_bytes(spec: TensorSpec, form: Form) -> int:
    if form == "packed" or spec.part == "engram_table":
        return spec.num_bytes
    if form == "plain" or spec.dtype == "F32" or spec.name.endswith(_FLOAT32_TENSORS):
        return spec.num_parameters * _FLOAT32
    if spec.name.endswith(_PRODUCT_TENSORS):
        if form == "float8":
            return spec.num_parameters + spec.shape[0] * _FLOAT32  # a scale for each column of the product
        kept = form == "products" or (form == "experts" and spec.expert is not None)
        if kept and spec.shape[1] * (2 if spec.dtype == "I8" else 1) % GROUP == 0:
            return spec.num_bytes + spec.num_parameters // GROUP  # and for 32 values of one
    return spec.num_parameters * _BFLOAT16


# ---- caches and activations ------------------------------------------------------------------------------------------


def cache_bytes(config: ModelConfig, workload: Workload, num_slots: int) -> dict[str, int]:
    """Bytes of all state of one rank with `num_slots` sequences of full length, as `cache.state` allocates it."""
    c, step_rows = config, _up_to_8(workload.step_rows)
    backtrack = _backtrack(c, workload.num_drafts)
    window_record, _, _ = _record_bytes(c, workload.form)
    draft_rows = _up_to_8(max(workload.step_rows, num_slots * max(1, c.dspark_block_size)))
    num_blocks = num_slots * -(-workload.context_tokens // BLOCK_TOKENS) + 1  # one takes what must not be stored
    window_rows = num_slots * (c.sliding_window + backtrack) + 1
    pair_layers = sum(c.compress_ratios[layer] > 1 for layer in c.kv_source_layer_ids)
    pair_bytes = 2 * c.head_dim * _FLOAT32 * pair_layers
    pair_rows = num_slots * (backtrack + 2) + 1
    history_rows = num_slots * (backtrack + c.engram_max_ngram_size) + 1
    held = num_slots * (2 + c.dspark_block_size)
    return {
        "blocks": num_blocks * _block_bytes(c, workload.form),
        "windows": (c.num_hidden_layers + c.num_nextn_predict_layers) * window_rows * window_record,
        "pairs and history": pair_rows * pair_bytes + (history_rows + held) * _INT64,
        "step scratch": (c.num_hidden_layers * step_rows + c.num_nextn_predict_layers * draft_rows) * window_record
        + step_rows * (pair_bytes + _INT64),
    }


def _record_bytes(c: ModelConfig, form: Form) -> tuple[int, int, int]:
    """Bytes of a window key, a compressed entry and an index key (docs/model.md: Cache records)."""
    if form == "plain":
        return c.head_dim * _FLOAT32, c.head_dim * _FLOAT32, c.index_head_dim * _FLOAT32
    return (
        c.head_dim + c.head_dim // 32,
        c.head_dim // 2 + c.head_dim // 16,
        c.index_head_dim // 2 + c.index_head_dim // 32,
    )


def kv_bytes_per_token(config: ModelConfig, form: Form) -> float:
    """Compressed KV and index keys of one token over all KV sources: 890 packed in the release."""
    return _block_bytes(config, form) / BLOCK_TOKENS


def _block_bytes(c: ModelConfig, form: Form) -> int:
    """Compressed entries and index keys of 128 positions: 113,920 packed in the release."""
    _, entry, index = _record_bytes(c, form)
    return sum(BLOCK_TOKENS // c.compress_ratios[layer] * (entry + index) for layer in c.kv_source_layer_ids)


def _activation_bytes(c: ModelConfig, workload: Workload, num_slots: int) -> int:
    """Estimate of the largest tensors alive at once: streams before and after a sublayer, queries and their outputs,
    expert activations, and for rows that sample float32 logits and a copy of them.
    """
    per_row = 2 * c.hc_mult * c.hidden_size + 2 * c.num_attention_heads * c.head_dim
    per_row += (c.num_experts_per_tok + 1) * (c.hidden_size + 3 * c.moe_intermediate_size)
    sample_rows = num_slots * (1 + (c.dspark_block_size if workload.num_drafts is None else workload.num_drafts))
    element = _FLOAT32 if workload.form == "plain" else _BFLOAT16
    return workload.step_rows * per_row * element + 2 * sample_rows * c.vocab_size * _FLOAT32


def _backtrack(c: ModelConfig, num_drafts: int | None) -> int:
    if num_drafts is None:
        num_drafts = c.dspark_block_size if c.num_nextn_predict_layers else 0
    return IN_FLIGHT_STEPS * (num_drafts + 1)


def _up_to_8(rows: int) -> int:
    return -(-rows // 8) * 8


# ---- ranks and limits ------------------------------------------------------------------------------------------------


def _ranks(config: ModelConfig, sizes: _Sizes, workload: Workload) -> tuple[RankMemory, ...]:
    alone = [_rank(config, sizes, workload, rank) for rank in range(workload.num_devices)]
    groups = [list(group) for _, group in groupby(alone, key=lambda r: (r.weights, r.caches, r.activations))]
    return tuple(replace(group[0], last_rank=group[-1].last_rank) for group in groups)


def _rank(config: ModelConfig, sizes: _Sizes, workload: Workload, rank: int) -> RankMemory:
    num_slots = len(share(workload.num_sequences, rank, workload.num_devices))
    return RankMemory(
        first_rank=rank,
        last_rank=rank,
        weights=sizes.of_rank(rank, workload),
        caches=cache_bytes(config, workload, num_slots),
        activations=_activation_bytes(config, workload, num_slots),
    )


def _limits(config: ModelConfig, sizes: _Sizes, workload: Workload, budget: int) -> Limits:
    def needed(changed: Workload) -> int:
        return _rank(config, sizes, changed, 0).total

    devices = workload.num_devices
    max_blocks = -(-config.max_position_embeddings // BLOCK_TOKENS)
    blocks = bisect_right(
        range(1, max_blocks + 1),
        budget,
        key=lambda n: needed(replace(workload, context_tokens=min(n * BLOCK_TOKENS, config.max_position_embeddings))),
    )
    slots = bisect_right(
        range(1, _MAX_SLOTS // devices + 1), budget, key=lambda n: needed(replace(workload, num_sequences=n * devices))
    )
    fewest = next((n for n in range(1, _MAX_DEVICES + 1) if needed(replace(workload, num_devices=n)) <= budget), 0)
    return Limits(min(blocks * BLOCK_TOKENS, config.max_position_embeddings), slots * devices, fewest)
