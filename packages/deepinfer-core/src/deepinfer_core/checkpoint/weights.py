"""`ModelWeights`: what the model computes with, as plain frozen dataclasses of tensors.

    ModelWeights ─ embed, head, norm, token_classes
      ├ layers[l] : LayerWeights ─ attn_norm, ffn_norm
      │    ├ hc_attn, hc_ffn : HyperWeights
      │    ├ attn            : AttentionWeights ─ compressor?, index_key?, indexer?
      │    ├ ffn             : MoeWeights        (only the experts that this process owns)
      │    └ engram?         : EngramWeights     (table rows stay quantized until they are looked up)
      └ draft? : DraftWeights ─ stages[s] : LayerWeights, main_proj, markov and confidence heads

`?` = None where the layer has no such part. Shapes are those of a linear layer's weight, [out, in], except where noted;
letters: V vocabulary, D hidden, S streams (hc_mult), H heads, d head_dim, G o_groups, E experts of the layer, E_local
experts held here, I expert width, r Markov rank, T draft target layers. Tensors stored as F32 in the checkpoint (mHC,
sinks, router biases) and the confidence vector are float32; all others have the dtype that the loader was asked for,
but for a `Product`, which may be in the bytes of the checkpoint.
Source of every shape: the manifest (manifest.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from deepinfer_core.checkpoint.engram_store import EngramTable
from deepinfer_core.kernels.reference.packed import PackedWeight

__all__ = [
    "AttentionWeights",
    "CompressorWeights",
    "DraftWeights",
    "EngramWeights",
    "HyperWeights",
    "IndexKeyWeights",
    "IndexerWeights",
    "LayerWeights",
    "ModelWeights",
    "MoeWeights",
    "Product",
]

type Product = Tensor | PackedWeight  # packed: [.., in, out], as kernels take it


@dataclass(frozen=True, slots=True, eq=False)
class HyperWeights:
    """mHC mixes of one sublayer, float32; M = (2 + S) S rows: S pre, S post, S x S combination."""

    fn: Tensor  # [M, S D]
    base: Tensor  # [M]
    scale: Tensor  # [3] of pre, post, combination


@dataclass(frozen=True, slots=True, eq=False)
class CompressorWeights:
    """Projection of a KV source into its compressed cache."""

    wkv: Tensor  # [d, D]
    wgate: Tensor | None  # [d, D]; None at ratio 1, where nothing is pooled
    norm: Tensor  # [d]


@dataclass(frozen=True, slots=True, eq=False)
class IndexKeyWeights:
    """Index keys of a KV source, made from the compressor's latent."""

    wk: Tensor  # [index_head_dim, d]
    k_norm: Tensor  # [index_head_dim]


@dataclass(frozen=True, slots=True, eq=False)
class IndexerWeights:
    """Index queries and head weights of an index source."""

    wq_b: Product  # [index_n_heads index_head_dim, q_lora_rank]
    weights_proj: Tensor  # [index_n_heads, D]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """One attention sublayer; a KV source has `compressor` and `index_key`, an index source has `indexer`."""

    wq_a: Tensor  # [q_lora_rank, D]
    q_norm: Tensor  # [q_lora_rank]
    wq_b: Product  # [H d, q_lora_rank]
    wkv: Tensor  # [d, D]
    kv_norm: Tensor  # [d]
    wo_a: Tensor  # [G, o_lora_rank, H d / G]
    wo_b: Product  # [D, G o_lora_rank]
    sink: Tensor  # [H] float32
    compressor: CompressorWeights | None
    index_key: IndexKeyWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True, eq=False)
class MoeWeights:
    """Router, shared expert, and the routed experts held here: w1[i], w2[i], w3[i] are of expert `expert_ids[i]`."""

    gate: Tensor  # [E, D]
    bias: Tensor  # [E] float32, selection bias of text tokens
    bias_vl: Tensor  # [E] float32, selection bias of image tokens
    w1: Product  # [E_local, I, D]
    w3: Product  # [E_local, I, D]
    w2: Product  # [E_local, D, I]
    expert_ids: tuple[int, ...]  # E_local logical ids
    shared_w1: Product  # [I, D]
    shared_w3: Product  # [I, D]
    shared_w2: Product  # [D, I]


@dataclass(frozen=True, slots=True, eq=False)
class EngramWeights:
    """One Engram layer; C = (max_ngram - 1) heads columns, ordered by n-gram size, then head."""

    wkv: Tensor  # [(S + 1) D, C engram_head_dim]
    q_weight: Tensor  # [S, D]
    k_weight: Tensor  # [S, D]
    table: EngramTable
    multipliers: Tensor  # [max_ngram] int64
    primes: Tensor  # [C] int64
    offsets: Tensor  # [C] int64, first table row of each column


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One backbone layer or draft stage."""

    attn_norm: Tensor  # [D]
    ffn_norm: Tensor  # [D]
    hc_attn: HyperWeights
    hc_ffn: HyperWeights
    attn: AttentionWeights
    ffn: MoeWeights
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True, eq=False)
class DraftWeights:
    """The DSpark draft module; embedding and head are the backbone's."""

    main_proj: Tensor  # [D, T D]
    main_norm: Tensor  # [D]
    stages: list[LayerWeights]
    norm: Tensor  # [D]
    markov_embed: Tensor  # [V, r]
    markov_head: Tensor  # [V, r]
    confidence: Tensor  # [D + r] float32


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """All weights that one process holds."""

    embed: Tensor  # [V, D]
    head: Tensor  # [V, D]
    norm: Tensor  # [D]
    layers: list[LayerWeights]  # a list, so that whoever makes them into something else can let go of each
    draft: DraftWeights | None
    token_classes: Tensor  # [V] int64 Engram class of each id; ids the tokenizer lacks have the pad token's class
    fingerprint: str  # of the checkpoint (checkpoint/fingerprint.py); names the weights in cache keys
    bytes_read: Mapping[str, int] = field(default_factory=dict[str, int])  # manifest part -> bytes that loading read
