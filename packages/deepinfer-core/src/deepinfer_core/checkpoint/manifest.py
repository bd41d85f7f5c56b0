"""The tensors that a checkpoint of a given config must hold: names, shapes, dtypes (docs/model.md: Checkpoint).

    embed head norm | layers.0 .. L-1 | mtp.0 .. S-1 | vision aligner image_*     96,085 tensors, 510 GB in the release

    X.weight F8_E4M3 [a, b]       has X.scale F8_E8M0 [ceil(a / 32), ceil(b / 32)]
    X.weight I8 [a, b / 2]        has X.scale F8_E8M0 [a, ceil(b / 32)]          routed experts: two FP4 codes a byte
    embed.weight F8_E4M3 [r, w]   has embed.scale F8_E8M0 [r, ceil(w / 32)]      Engram tables

Vision tensors are *deferred*: part of the manifest, checked and counted, not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import CheckpointError

__all__ = ["Part", "TensorSpec", "TensorType", "check_against_manifest", "manifest"]

type Part = Literal[
    "embedding",
    "attention",
    "compressor",  # of KV sources: compressed KV and index keys
    "indexer",  # of index sources: index queries
    "experts",
    "shared_expert",
    "router",
    "mhc",
    "norm",
    "engram",
    "engram_table",
    "draft",
    "vision",
]
type TensorType = Literal["F8_E4M3", "F8_E8M0", "I8", "BF16", "F32"]

_BYTES: dict[TensorType, int] = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
_BLOCK = 32
_NAMES_SHOWN = 5


class TensorSpec(NamedTuple):  # not a frozen dataclass: the release has 96,085, and these are made three times faster
    """One tensor of the checkpoint. `layer` of draft stage s is num_hidden_layers + s."""

    name: str
    shape: tuple[int, ...]
    dtype: TensorType
    part: Part
    layer: int | None = None
    expert: int | None = None

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        """Weights that the tensor stands for: scales are none, a byte of packed FP4 is two."""
        return {"F8_E8M0": 0, "I8": 2}.get(self.dtype, 1) * prod(self.shape)

    @property
    def deferred(self) -> bool:
        """Whether the tensor is checked but not loaded."""
        return self.part == "vision"


def manifest(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint of `config`, lazily, in the order embeddings, layers, draft stages, vision."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield TensorSpec("embed.weight", (vocab, hidden), "BF16", "embedding")
    yield TensorSpec("head.weight", (vocab, hidden), "BF16", "embedding")
    yield TensorSpec("norm.weight", (hidden,), "BF16", "norm")
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, layer)
    for stage in range(config.num_nextn_predict_layers):
        yield from _draft_stage(config, stage)
    yield from _vision(config)


def check_against_manifest(
    config: ModelConfig, found: Mapping[str, tuple[str, tuple[int, ...]]], where: str
) -> dict[str, TensorSpec]:
    """The manifest by name, once `found`, name -> (dtype, shape), agrees with it; ("", ()) stands for unknown.

    Raises CheckpointError that names missing, unused, mistyped and misshapen tensors.
    """
    specs = {spec.name: spec for spec in manifest(config)}
    missing = [name for name in specs if name not in found]
    unused = [name for name in found if name not in specs]
    wrong: list[str] = []
    for name, (dtype, shape) in found.items():
        spec = specs.get(name)
        if spec is not None and dtype and (dtype, shape) != (spec.dtype, spec.shape):
            wrong.append(f"{name} is {dtype} {list(shape)} instead of {spec.dtype} {list(spec.shape)}")
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_NAMES_SHOWN])}{', ...' if len(names) > _NAMES_SHOWN else ''}"
        for what, names in (
            ("missing", missing),
            ("not part of the model", unused),
            ("of the wrong type or shape", wrong),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{where} does not hold the tensors that its config.json asks for ({'; '.join(problems)}); fetch it again"
        )
    return specs


# ---- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scope:
    """Makes specs below one name prefix; `draft` relabels every part."""

    prefix: str
    layer: int
    draft: bool

    def spec(
        self, name: str, shape: tuple[int, ...], dtype: TensorType, part: Part, expert: int | None = None
    ) -> TensorSpec:
        return TensorSpec(f"{self.prefix}.{name}", shape, dtype, "draft" if self.draft else part, self.layer, expert)

    def fp8(self, name: str, rows: int, columns: int, part: Part) -> Iterator[TensorSpec]:
        yield self.spec(f"{name}.weight", (rows, columns), "F8_E4M3", part)
        yield self.spec(f"{name}.scale", (_blocks(rows), _blocks(columns)), "F8_E8M0", part)

    def fp4(self, name: str, rows: int, columns: int, part: Part, expert: int) -> Iterator[TensorSpec]:
        yield self.spec(f"{name}.weight", (rows, columns // 2), "I8", part, expert)
        yield self.spec(f"{name}.scale", (rows, _blocks(columns)), "F8_E8M0", part, expert)


def _blocks(width: int) -> int:
    return -(-width // _BLOCK)


def _layer(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    scope = _Scope(f"layers.{layer}", layer, draft=False)
    yield from _common(config, scope, config.n_routed_experts)
    if layer in config.kv_source_layer_ids:
        yield from _kv_source(config, scope)
    if layer in config.index_source_layer_ids:
        yield from scope.fp8(
            "attn.indexer.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank, "indexer"
        )
        yield scope.spec(
            "attn.indexer.weights_proj.weight", (config.index_n_heads, config.hidden_size), "BF16", "indexer"
        )
    if layer in config.engram_layer_ids:
        yield from _engram(config, scope)


def _common(config: ModelConfig, scope: _Scope, num_experts: int) -> Iterator[TensorSpec]:
    """What every layer and draft stage has."""
    hidden, streams = config.hidden_size, config.hc_mult
    for sublayer in ("attn", "ffn"):
        mixes = (2 + streams) * streams
        yield scope.spec(f"{sublayer}_norm.weight", (hidden,), "BF16", "norm")
        yield scope.spec(f"hc_{sublayer}_fn", (mixes, streams * hidden), "F32", "mhc")
        yield scope.spec(f"hc_{sublayer}_base", (mixes,), "F32", "mhc")
        yield scope.spec(f"hc_{sublayer}_scale", (3,), "F32", "mhc")
    yield from _attention(config, scope)
    yield scope.spec("ffn.gate.weight", (num_experts, hidden), "BF16", "router")
    yield scope.spec("ffn.gate.bias", (num_experts,), "F32", "router")
    yield scope.spec("ffn.gate.bias_vl", (num_experts,), "F32", "router")
    width = config.moe_intermediate_size
    for name, rows, columns in (("w1", width, hidden), ("w3", width, hidden), ("w2", hidden, width)):
        yield from scope.fp8(f"ffn.shared_experts.{name}", rows, columns, "shared_expert")
        for expert in range(num_experts):
            yield from scope.fp4(f"ffn.experts.{expert}.{name}", rows, columns, "experts", expert)


def _attention(config: ModelConfig, scope: _Scope) -> Iterator[TensorSpec]:
    hidden, groups, heads = config.hidden_size, config.o_groups, config.num_attention_heads
    yield scope.spec("attn.attn_sink", (heads,), "F32", "attention")
    yield scope.spec("attn.q_norm.weight", (config.q_lora_rank,), "BF16", "attention")
    yield scope.spec("attn.kv_norm.weight", (config.head_dim,), "BF16", "attention")
    yield from scope.fp8("attn.wq_a", config.q_lora_rank, hidden, "attention")
    yield from scope.fp8("attn.wq_b", heads * config.head_dim, config.q_lora_rank, "attention")
    yield from scope.fp8("attn.wkv", config.head_dim, hidden, "attention")
    yield from scope.fp8("attn.wo_a", groups * config.o_lora_rank, heads // groups * config.head_dim, "attention")
    yield from scope.fp8("attn.wo_b", hidden, groups * config.o_lora_rank, "attention")


def _kv_source(config: ModelConfig, scope: _Scope) -> Iterator[TensorSpec]:
    hidden, head = config.hidden_size, config.head_dim
    yield scope.spec("attn.compressor.wkv.weight", (head, hidden), "BF16", "compressor")
    if config.compress_ratios[scope.layer] > 1:  # only groups of several tokens are pooled
        yield scope.spec("attn.compressor.wgate.weight", (head, hidden), "BF16", "compressor")
    yield scope.spec("attn.compressor.norm.weight", (head,), "BF16", "compressor")
    yield scope.spec("attn.indexer.wk.weight", (config.index_head_dim, head), "BF16", "compressor")
    yield scope.spec("attn.indexer.k_norm.weight", (config.index_head_dim,), "BF16", "compressor")


def _engram(config: ModelConfig, scope: _Scope) -> Iterator[TensorSpec]:
    rows = config.engram_num_embeddings[config.engram_layer_ids.index(scope.layer)]
    width, streams, hidden = config.engram_head_dim, config.hc_mult, config.hidden_size
    yield scope.spec("engram.embed.weight", (rows, width), "F8_E4M3", "engram_table")
    yield scope.spec("engram.embed.scale", (rows, _blocks(width)), "F8_E8M0", "engram_table")
    yield from scope.fp8("engram.wkv", (streams + 1) * hidden, config.engram_columns * width, "engram")
    yield scope.spec("engram.q_weight", (streams, hidden), "BF16", "engram")
    yield scope.spec("engram.k_weight", (streams, hidden), "BF16", "engram")


def _draft_stage(config: ModelConfig, stage: int) -> Iterator[TensorSpec]:
    """The first stage owns the projection of the target's features, the last one the heads."""
    scope = _Scope(f"mtp.{stage}", config.num_hidden_layers + stage, draft=True)
    hidden, vocab, rank = config.hidden_size, config.vocab_size, config.dspark_markov_rank
    yield from _common(config, scope, config.dspark_n_routed_experts)
    if stage == 0:
        yield from scope.fp8("main_proj", hidden, len(config.dspark_target_layer_ids) * hidden, "draft")
        yield scope.spec("main_norm.weight", (hidden,), "BF16", "draft")
    if stage == config.num_nextn_predict_layers - 1:
        yield scope.spec("norm.weight", (hidden,), "BF16", "draft")
        yield scope.spec("markov_head.embed.weight", (vocab, rank), "BF16", "draft")
        yield scope.spec("markov_head.head.weight", (vocab, rank), "BF16", "draft")
        yield scope.spec("confidence_head.proj.weight", (1, hidden + rank), "BF16", "draft")


def _vision(config: ModelConfig) -> Iterator[TensorSpec]:
    vision = config.vision
    if vision is None or vision.num_hidden_layers == 0:
        return
    hidden, width, inner = config.hidden_size, vision.hidden_size, vision.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "image_start": (hidden,),
        "image_end": (hidden,),
        "image_newline": (hidden,),
        "vision.patch_embed.proj.weight": (width, 3 * vision.patch_size**2),
        "vision.patch_embed.proj.bias": (width,),
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (hidden, width * vision.downsample_ratio**2),
        "aligner.w1.bias": (hidden,),
        "aligner.w2.weight": (hidden, hidden),
        "aligner.w2.bias": (hidden,),
    }
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        shapes |= {
            f"{prefix}.norm1.weight": (width,),
            f"{prefix}.norm2.weight": (width,),
            f"{prefix}.attn.wqkv.weight": (3 * width, width),
            f"{prefix}.attn.wqkv.bias": (3 * width,),
            f"{prefix}.attn.wo.weight": (width, width),
            f"{prefix}.attn.wo.bias": (width,),
            f"{prefix}.mlp.w1.weight": (2 * inner, width),
            f"{prefix}.mlp.w2.weight": (width, inner),
        }
    for name, shape in shapes.items():
        yield TensorSpec(name, shape, "BF16", "vision")
