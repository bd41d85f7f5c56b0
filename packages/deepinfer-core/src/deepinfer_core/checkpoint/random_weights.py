"""Random `ModelWeights` of any config, for tests and benchmarks: fan-in scaled, and tame enough to compare runs with.

Matrices are N(0, 1 / fan_in); norms and Engram's q/k weights are near 1, mHC and router parameters small and distinct.
The output projections wo_b and routed w2 are scaled by 0.2 and 0.1: with full-size ones the cache roundings amplify
last-bit differences until no two correct programs agree. The values are not rounded to FP8/FP4 grids;
Engram rows are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.checkpoint.engram_hash import EngramHash, engram_hashes
from deepinfer_core.checkpoint.engram_store import EngramTable
from deepinfer_core.checkpoint.quantize import quantize_rows
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
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.reference.packed import FP4_ROWS, FP8_ROWS, Packing, pack_columns

__all__ = ["random_weights"]

_OUTPUT_SCALE = 0.2
_EXPERT_OUTPUT_SCALE = 0.1
_TABLE_ROWS = 1 << 22  # of an Engram table, drawn at once
_FLOAT = torch.float32


def random_weights(
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    with_experts: bool = True,
    packed: Packing = "none",
) -> ModelWeights:
    """Weights, a function of the arguments; another kind of device draws other numbers. Token classes are
    `id mod engram_compressed_vocab_size`. Without experts the routed ones have [0, ..] weights. `packed`: routed
    experts, or every `Product`, are rounded to FP4 or FP8 and kept so.
    """
    device = torch.device(device)
    draw = _Draw(config, torch.Generator(device).manual_seed(seed), dtype, device, with_experts, packed)
    hashes = engram_hashes(config)
    classes = torch.arange(config.vocab_size, device=device) % config.engram_compressed_vocab_size
    return ModelWeights(
        embed=draw.normal(config.vocab_size, config.hidden_size, scale=1.0),
        head=draw.matrix(config.vocab_size, config.hidden_size),
        norm=draw.gain(config.hidden_size),
        layers=[draw.layer(layer, hashes.get(layer)) for layer in range(config.num_hidden_layers)],
        draft=draw.draft() if config.num_nextn_predict_layers else None,
        token_classes=classes,
        fingerprint=f"random-{seed}",
    )


class _Draw:
    """Draws the blocks in a fixed order from one generator."""

    def __init__(
        self,
        config: ModelConfig,
        generator: torch.Generator,
        dtype: torch.dtype,
        device: torch.device,
        with_experts: bool,
        packed: Packing,
    ) -> None:
        self.config, self.generator = config, generator
        self.dtype, self.device, self.with_experts, self.packed = dtype, device, with_experts, packed

    def normal(self, *shape: int, scale: float, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.mul_(scale).to(dtype or self.dtype)

    def matrix(self, *shape: int, scale: float = 1.0) -> Tensor:
        """[..., out, in] with variance scale^2 / in."""
        return self.normal(*shape, scale=scale * shape[-1] ** -0.5)

    def fp8(self, *shape: int, scale: float = 1.0) -> Product:
        drawn = self.matrix(*shape, scale=scale)
        return pack_columns(drawn.transpose(-1, -2), FP8_ROWS) if self.packed == "products" else drawn

    def fp4(self, *shape: int, scale: float = 1.0) -> Product:
        drawn = self.matrix(*shape, scale=scale)
        return pack_columns(drawn.transpose(-1, -2), FP4_ROWS) if self.packed != "none" else drawn

    def gain(self, *shape: int) -> Tensor:
        return (1 + self.normal(*shape, scale=0.1, dtype=torch.float32)).to(self.dtype)

    def layer(self, layer: int, engram: EngramHash | None) -> LayerWeights:
        config = self.config
        is_draft = layer >= config.num_hidden_layers
        return LayerWeights(
            attn_norm=self.gain(config.hidden_size),
            ffn_norm=self.gain(config.hidden_size),
            hc_attn=self.hyper(),
            hc_ffn=self.hyper(),
            attn=self.attention(layer),
            ffn=self.moe(config.dspark_n_routed_experts if is_draft else config.n_routed_experts),
            engram=None if engram is None else self.engram(layer, engram),
        )

    def hyper(self) -> HyperWeights:
        streams = self.config.hc_mult
        mixes, width = (2 + streams) * streams, streams * self.config.hidden_size
        return HyperWeights(
            fn=self.normal(mixes, width, scale=width**-0.5, dtype=torch.float32),
            base=self.normal(mixes, scale=0.5, dtype=torch.float32),
            scale=1 + self.normal(3, scale=0.1, dtype=torch.float32),
        )

    def attention(self, layer: int) -> AttentionWeights:
        c = self.config
        group_width = c.num_attention_heads // c.o_groups * c.head_dim
        writes_kv = layer in c.kv_source_layer_ids
        return AttentionWeights(
            wq_a=self.matrix(c.q_lora_rank, c.hidden_size),
            q_norm=self.gain(c.q_lora_rank),
            wq_b=self.fp8(c.num_attention_heads * c.head_dim, c.q_lora_rank),
            wkv=self.matrix(c.head_dim, c.hidden_size),
            kv_norm=self.gain(c.head_dim),
            wo_a=self.matrix(c.o_groups, c.o_lora_rank, group_width),
            wo_b=self.fp8(c.hidden_size, c.o_groups * c.o_lora_rank, scale=_OUTPUT_SCALE),
            sink=self.normal(c.num_attention_heads, scale=1.0, dtype=torch.float32),
            compressor=self.compressor(c.compress_ratios[layer]) if writes_kv else None,
            index_key=self.index_key() if writes_kv else None,
            indexer=self.indexer() if layer in c.index_source_layer_ids else None,
        )

    def compressor(self, ratio: int) -> CompressorWeights:
        shape = (self.config.head_dim, self.config.hidden_size)
        return CompressorWeights(
            wkv=self.matrix(*shape),
            wgate=self.matrix(*shape) if ratio > 1 else None,
            norm=self.gain(self.config.head_dim),
        )

    def index_key(self) -> IndexKeyWeights:
        width = self.config.index_head_dim
        return IndexKeyWeights(wk=self.matrix(width, self.config.head_dim), k_norm=self.gain(width))

    def indexer(self) -> IndexerWeights:
        c = self.config
        return IndexerWeights(
            wq_b=self.fp8(c.index_n_heads * c.index_head_dim, c.q_lora_rank),
            weights_proj=self.matrix(c.index_n_heads, c.hidden_size),
        )

    def moe(self, num_experts: int) -> MoeWeights:
        hidden, width = self.config.hidden_size, self.config.moe_intermediate_size
        held = num_experts if self.with_experts else 0
        return MoeWeights(
            gate=self.matrix(num_experts, hidden),
            bias=self.normal(num_experts, scale=0.1, dtype=torch.float32),
            bias_vl=self.normal(num_experts, scale=0.1, dtype=torch.float32),
            w1=self.fp4(held, width, hidden),
            w3=self.fp4(held, width, hidden),
            w2=self.fp4(held, hidden, width, scale=_EXPERT_OUTPUT_SCALE),
            expert_ids=tuple(range(held)),
            shared_w1=self.fp8(width, hidden),
            shared_w3=self.fp8(width, hidden),
            shared_w2=self.fp8(hidden, width),
        )

    def engram(self, layer: int, constants: EngramHash) -> EngramWeights:
        c = self.config
        num_rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
        parts = [
            quantize_rows(self.normal(min(_TABLE_ROWS, num_rows - start), c.engram_head_dim, scale=1.0, dtype=_FLOAT))
            for start in range(0, num_rows, _TABLE_ROWS)
        ]
        codes, scales = (torch.cat(kind) for kind in zip(*parts, strict=True))
        table = EngramTable(codes.view(torch.uint8), scales.view(torch.uint8), num_rows, 0, self.dtype, self.device)
        return EngramWeights(
            wkv=self.matrix((c.hc_mult + 1) * c.hidden_size, c.engram_columns * c.engram_head_dim),
            q_weight=self.gain(c.hc_mult, c.hidden_size),
            k_weight=self.gain(c.hc_mult, c.hidden_size),
            table=table,
            multipliers=torch.tensor(constants.multipliers, device=self.device),
            primes=torch.tensor(constants.primes, device=self.device),
            offsets=torch.tensor(constants.offsets, device=self.device),
        )

    def draft(self) -> DraftWeights:
        c = self.config
        hidden, rank = c.hidden_size, c.dspark_markov_rank
        stages = range(c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers)
        return DraftWeights(
            main_proj=self.matrix(hidden, len(c.dspark_target_layer_ids) * hidden),
            main_norm=self.gain(hidden),
            stages=[self.layer(stage, None) for stage in stages],
            norm=self.gain(hidden),
            markov_embed=self.normal(c.vocab_size, rank, scale=1.0),
            markov_head=self.matrix(c.vocab_size, rank),
            confidence=self.normal(hidden + rank, scale=(hidden + rank) ** -0.5, dtype=torch.float32),
        )
