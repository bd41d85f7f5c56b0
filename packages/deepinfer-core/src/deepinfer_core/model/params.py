"""Weights in the form that the kernels take: products as [K, N], projections of one input side by side, mHC scales by
column.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer_core.checkpoint.engram_store import EngramTable
from deepinfer_core.checkpoint.weights import (
    AttentionWeights,
    DraftWeights,
    EngramWeights,
    HyperWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    Product,
)
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import CheckpointError
from deepinfer_core.kernels.reference.coded import Weight, code_columns
from deepinfer_core.kernels.reference.norm_rope import rope_frequencies
from deepinfer_core.kernels.reference.packed import ArrangedWeight, PackedWeight, join_columns

__all__ = [
    "Arrange",
    "AttentionParams",
    "DraftParams",
    "EngramParams",
    "HyperParams",
    "LayerParams",
    "ModelParams",
    "MoeParams",
    "build_params",
]

_log = logging.getLogger(__name__)

type Arrange = Callable[[PackedWeight, bool], Weight]  # `arranged` of a provider (contract `TakesPacked`)


@dataclass(frozen=True, eq=False)
class HyperParams:
    """One mHC mix; M = 2 S + S * S."""

    fn: Tensor  # [S * D, M]
    base: Tensor  # [M]
    scale: Tensor  # [M]


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """One attention sublayer. `input_proj` is wq_a | wkv | indexer.weights_proj, split by `input_widths`."""

    input_proj: Tensor  # [D, q_lora + hd (+ Hi)]
    input_widths: tuple[int, ...]
    q_norm: Tensor
    kv_norm: Tensor
    query_proj: Weight  # [q_lora, H * hd]
    index_query_proj: Weight | None  # [q_lora, Hi * Di]
    wo_a: Tensor  # [G, H / G * hd, o_lora]
    wo_b: Weight  # [G * o_lora, D]
    sink: Tensor  # [H] float32
    compressor_proj: Tensor | None  # [D, hd] or [D, 2 hd]: wkv (| wgate)
    compressor_norm: Tensor | None
    index_key_proj: Tensor | None  # [hd, Di]
    index_key_norm: Tensor | None


@dataclass(frozen=True, eq=False)
class MoeParams:
    """Router, routed experts held here, shared expert; gate and up projections side by side."""

    gate: Tensor  # [D, E] in the dtype of the activations, as released; route's product has float32 sums
    bias: Tensor  # [E]
    bias_vl: Tensor  # [E]
    w13: Weight  # [E_local, D, 2 I]
    w2: Weight  # [E_local, I, D]
    shared_w13: Weight  # [D, 2 I]
    shared_w2: Weight  # [I, D]
    num_chosen: int


@dataclass(frozen=True, eq=False)
class EngramParams:
    """One Engram layer."""

    wkv: Tensor  # [C * hd, (S + 1) * D]
    q_weight: Tensor  # [S, D]
    k_weight: Tensor  # [S, D]
    table: EngramTable
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor


@dataclass(frozen=True, eq=False)
class LayerParams:
    """One backbone layer or draft stage."""

    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HyperParams
    hc_ffn: HyperParams
    attn: AttentionParams
    ffn: MoeParams
    engram: EngramParams | None


@dataclass(frozen=True, eq=False)
class DraftParams:
    """The DSpark module."""

    main_proj: Tensor  # [T * D, D]
    main_norm: Tensor
    stages: tuple[LayerParams, ...]
    norm: Tensor
    markov_embed: Tensor  # [V, r]
    markov_head: Tensor  # [r, V]
    confidence: Tensor  # [D + r, 1] float32


@dataclass(frozen=True, eq=False)
class ModelParams:
    """Everything that a forward pass reads and never writes."""

    embed: Tensor  # [V, D]
    head: Tensor  # [D, V] in the dtype of the activations
    norm: Tensor
    layers: tuple[LayerParams, ...]
    draft: DraftParams | None
    token_classes: Tensor  # [V]
    pad_class: int
    frequencies: Tensor  # [rotary / 2] window-only layers and draft stages
    long_frequencies: Tensor  # [rotary / 2] layers with a compressed cache (YaRN)

    def engram_tables(self) -> dict[int, EngramTable]:
        """Layer -> its table, or the part of it that is held here."""
        return {index: layer.engram.table for index, layer in enumerate(self.layers) if layer.engram is not None}


def build_params(
    weights: ModelWeights,
    config: ModelConfig,
    *,
    coded: bool = False,
    arrange: Arrange | None = None,
    consume: bool = False,
) -> ModelParams:
    """Transposes and joins; the numbers stay what they are.

    `coded`: products that the original computes on e4m3 rows get coded weights (kernels/reference/coded.py). `arrange`
    lays packed weights out for a provider's kernels; without it they are decoded. `consume`: layers and draft stages
    are taken out of `weights` one by one, so that the model is never held twice. Packed weights that the kernels cannot
    read are decoded, and a warning says how many.
    """
    form = _Form(coded, arrange)
    rotary = config.qk_rope_head_dim
    device = weights.embed.device
    params = ModelParams(
        embed=weights.embed,
        head=_kn(weights.head.to(weights.embed.dtype)),
        norm=weights.norm.float(),
        layers=_layers(weights.layers, config.num_experts_per_tok, form, consume),
        draft=None if weights.draft is None else _draft(weights.draft, config, form, consume),
        token_classes=weights.token_classes,
        pad_class=int(weights.token_classes[config.engram_pad_token_id]),
        frequencies=rope_frequencies(rotary, config.rope_theta, None).float().to(device),
        long_frequencies=rope_frequencies(rotary, config.compress_rope_theta, config.rope_scaling).float().to(device),
    )
    if form.decoded:
        _log.warning(
            "%d packed weights were decoded, since these kernels cannot read their scales or shapes (the first has "
            "shape %s): answers are the same, but they take more memory than `deepinfer plan` counts",
            len(form.decoded),
            list(form.decoded[0]),
        )
    return params


def _kn(weight: Tensor) -> Tensor:
    return weight.transpose(-1, -2).contiguous()


@dataclass(frozen=True)
class _Form:
    """What the weights of products become."""

    coded: bool
    arrange: Arrange | None
    decoded: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])  # shapes that could not be arranged

    def product(self, weight: Product, *, halves: bool = False) -> Weight:
        """weight [.., N, K], or packed -> [.., K, N]. `halves`: gate and up projections side by side."""
        if isinstance(weight, Tensor):
            return code_columns(weight.transpose(-1, -2)) if self.coded else _kn(weight)
        if self.coded or self.arrange is None:
            values = weight.decoded(weight.dtype)
            return code_columns(values) if self.coded else values
        made = self.arrange(weight, halves)
        if isinstance(made, Tensor):
            self.decoded.append(weight.shape)
        return made

    def mlp(self, w1: Product, w3: Product, w2: Product) -> tuple[Weight, Weight]:
        """Gate and up projections side by side, and the down projection; both arranged or neither."""
        w13 = _side_by_side(w1, w3)
        made = self.product(w13, halves=True), self.product(w2)
        if isinstance(made[0], ArrangedWeight) != isinstance(made[1], ArrangedWeight):
            self.decoded.extend(one.shape for one in made if isinstance(one, ArrangedWeight))
            plain = _Form(self.coded, None)
            made = plain.product(w13), plain.product(w2)
        return made


def _side_by_side(w1: Product, w3: Product) -> Product:
    """As columns of one product."""
    if isinstance(w1, Tensor) and isinstance(w3, Tensor):
        return torch.cat([w1, w3], -2)
    if isinstance(w1, PackedWeight) and isinstance(w3, PackedWeight):
        return join_columns(w1, w3)
    raise CheckpointError("of an expert's gate and up projections one is quantized and the other is not")


def _layers(weights: list[LayerWeights], num_chosen: int, form: _Form, consume: bool) -> tuple[LayerParams, ...]:
    count = len(weights)
    return tuple(_layer(weights.pop(0) if consume else weights[i], num_chosen, form) for i in range(count))


def _layer(w: LayerWeights, num_chosen: int, form: _Form) -> LayerParams:
    return LayerParams(
        attn_norm=w.attn_norm.float(),
        ffn_norm=w.ffn_norm.float(),
        hc_attn=_hyper(w.hc_attn),
        hc_ffn=_hyper(w.hc_ffn),
        attn=_attention(w.attn, form),
        ffn=_moe(w.ffn, num_chosen, form),
        engram=None if w.engram is None else _engram(w.engram),
    )


def _hyper(w: HyperWeights) -> HyperParams:
    mixes = w.fn.shape[0]
    streams = int((1 + mixes) ** 0.5) - 1  # M = S^2 + 2 S = (S + 1)^2 - 1
    widths = torch.tensor([streams, streams, streams * streams], device=w.fn.device)
    return HyperParams(_kn(w.fn), w.base, torch.repeat_interleave(w.scale, widths))


def _attention(w: AttentionWeights, form: _Form) -> AttentionParams:
    parts = [w.wq_a, w.wkv] + ([] if w.indexer is None else [w.indexer.weights_proj])
    compressor = None
    if w.compressor is not None:
        members = [w.compressor.wkv] + ([] if w.compressor.wgate is None else [w.compressor.wgate])
        compressor = _kn(torch.cat(members))
    return AttentionParams(
        input_proj=_kn(torch.cat(parts)),
        input_widths=tuple(part.shape[0] for part in parts),
        q_norm=w.q_norm.float(),
        kv_norm=w.kv_norm.float(),
        query_proj=form.product(w.wq_b),
        index_query_proj=None if w.indexer is None else form.product(w.indexer.wq_b),
        wo_a=_kn(w.wo_a),
        wo_b=form.product(w.wo_b),
        sink=w.sink,
        compressor_proj=compressor,
        compressor_norm=None if w.compressor is None else w.compressor.norm.float(),
        index_key_proj=None if w.index_key is None else _kn(w.index_key.wk),
        index_key_norm=None if w.index_key is None else w.index_key.k_norm.float(),
    )


def _moe(w: MoeWeights, num_chosen: int, form: _Form) -> MoeParams:
    w13, w2 = form.mlp(w.w1, w.w3, w.w2)
    shared_w13, shared_w2 = form.mlp(w.shared_w1, w.shared_w3, w.shared_w2)
    return MoeParams(
        gate=_kn(w.gate),
        bias=w.bias,
        bias_vl=w.bias_vl,
        w13=w13,
        w2=w2,
        shared_w13=shared_w13,
        shared_w2=shared_w2,
        num_chosen=num_chosen,
    )


def _engram(w: EngramWeights) -> EngramParams:
    return EngramParams(
        wkv=_kn(w.wkv),
        q_weight=w.q_weight.float(),
        k_weight=w.k_weight.float(),
        table=w.table,
        multipliers=w.multipliers,
        primes=w.primes,
        offsets=w.offsets,
    )


def _draft(w: DraftWeights, config: ModelConfig, form: _Form, consume: bool) -> DraftParams:
    return DraftParams(
        main_proj=_kn(w.main_proj),
        main_norm=w.main_norm.float(),
        stages=_layers(w.stages, config.dspark_num_experts_per_tok, form, consume),
        norm=w.norm.float(),
        markov_embed=w.markov_embed,
        markov_head=_kn(w.markov_head),
        confidence=w.confidence.float()[:, None].contiguous(),
    )
