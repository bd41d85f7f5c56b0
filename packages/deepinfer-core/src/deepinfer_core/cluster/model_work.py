"""What a row of the model costs: flops, weight bytes, KV bytes and bytes sent, from the sizes of a config alone.

    half       layers          per row                                                  per cached token
    encoder    0 .. cut - 1    2 (dense + experts) params, window + selected keys       index scan of its sources
    decoder    cut .. last     the same, and candidate scans of re-indexing layers      index scan of the cut layer
    head       -               once for a row that draws a token
    draft      stages          dense + experts params, head; window only

A prompt's rows run through the encoder half, its last rows through both (decoder_prefill "compact"); a decoding row
runs through both and the head (docs/model.md). Norms, mHC's elementwise work and the look-up of
Engram rows are left out: few flops, some bytes and latency, which the calibration absorbs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepinfer_core.config.model import ModelConfig

__all__ = ["RELEASE", "DraftWork", "HalfWork", "ModelWork"]

_FP8_BYTES = 1 + 1 / 1024  # a parameter in blocks of 32 x 32 with one byte of scale
_FP4_BYTES = 1 / 2 + 1 / 32  # an expert's: groups of 32
_BF16_BYTES = 2.0
_ACTIVATION_BYTES = 1 + 1 / 32 + 2  # an element there (fp8 in groups of 32) and back (bfloat16)


class HalfWork(NamedTuple):
    """One half of the layers."""

    layers: int
    dense_params: int  # of all its layers: attention, shared expert, router, residual mixes, index queries, Engram
    window_layers: int  # layers that see their window only
    scan_per_token: float  # index keys that a row scores for each token before it
    candidate_scans: int  # layers that score the candidates of the cut layer instead


class DraftWork(NamedTuple):
    """The draft stages."""

    stages: int
    dense_params: int  # of all stages
    num_experts: int
    experts_per_row: int


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Sizes that decide the cost of a step. Bytes are of the packed form, KV bytes of one record."""

    encoder: HalfWork
    decoder: HalfWork
    draft: DraftWork
    hidden: int
    head_params: int
    expert_params: int  # of one routed expert
    num_experts: int
    experts_per_row: int
    window: int
    selected: int  # keys that a row reads from the compressed cache at most
    candidates: int  # index keys that a candidate scan scores at most
    key_flops: int  # attention of a row to one key, all heads
    score_flops: int  # score of one index key, all index heads
    window_bytes: int
    entry_bytes: int
    index_bytes: int
    kv_bytes_per_token: int
    max_tokens: int  # prompt and answer of one request

    @property
    def layers(self) -> int:
        """Layers of both halves."""
        return self.encoder.layers + self.decoder.layers

    @property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert."""
        return self.expert_params * _FP4_BYTES

    @property
    def dense_bytes(self) -> float:
        """Bytes of what every rank holds whole: both halves, draft stages, head."""
        dense = self.encoder.dense_params + self.decoder.dense_params + self.draft.dense_params
        return dense * _FP8_BYTES + self.head_params * _BF16_BYTES

    @property
    def exchange_bytes(self) -> float:
        """Bytes that a row sends to one other device and gets back in one layer."""
        return self.hidden * _ACTIVATION_BYTES

    @classmethod
    def of(cls, config: ModelConfig) -> ModelWork:
        """The work of a checkpoint."""
        c = config
        cut = c.decoder_start
        expert = 3 * c.hidden_size * c.moe_intermediate_size
        return cls(
            encoder=_half(c, range(cut)),
            decoder=_half(c, range(cut, c.num_hidden_layers)),
            draft=DraftWork(
                c.num_nextn_predict_layers,
                c.num_nextn_predict_layers * (_attention_params(c) + c.n_shared_experts * expert),
                c.dspark_n_routed_experts,
                c.dspark_num_experts_per_tok,
            ),
            hidden=c.hidden_size,
            head_params=c.vocab_size * c.hidden_size,
            expert_params=expert,
            num_experts=c.n_routed_experts,
            experts_per_row=c.num_experts_per_tok,
            window=c.sliding_window,
            selected=c.index_topk,
            candidates=c.candidate_topk_blocks * c.candidate_block_size,
            key_flops=4 * c.num_attention_heads * c.head_dim,
            score_flops=2 * c.index_n_heads * c.index_head_dim,
            window_bytes=c.head_dim + c.head_dim // 32,
            entry_bytes=c.head_dim // 2 + c.head_dim // 16,
            index_bytes=c.index_head_dim // 2 + c.index_head_dim // 32,
            kv_bytes_per_token=_kv_bytes(c),
            max_tokens=c.max_position_embeddings,
        )


def _half(c: ModelConfig, layers: range) -> HalfWork:
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    mixes = 2 * (2 * c.hc_mult + c.hc_mult**2) * c.hc_mult * c.hidden_size
    of_layer = _attention_params(c) + c.n_shared_experts * expert + c.n_routed_experts * c.hidden_size + mixes
    sources = [layer for layer in layers if layer in c.index_source_layer_ids]
    queries = len(sources) * (c.q_lora_rank * c.index_n_heads * c.index_head_dim + c.hidden_size * c.index_n_heads)
    scanning = [layer for layer in sources if not c.uses_candidates(layer)]
    engram = (c.hc_mult + 1) * c.engram_columns * c.engram_head_dim * c.hidden_size
    num_engram = sum(layer in c.engram_layer_ids for layer in layers)
    return HalfWork(
        layers=len(layers),
        dense_params=len(layers) * of_layer + queries + num_engram * engram,
        window_layers=sum(c.compress_ratios[layer] == 0 for layer in layers),
        scan_per_token=sum(1 / c.compress_ratios[layer] for layer in scanning),
        candidate_scans=len(sources) - len(scanning),
    )


def _attention_params(c: ModelConfig) -> int:
    head_width = c.num_attention_heads * c.head_dim
    query = c.hidden_size * c.q_lora_rank + c.q_lora_rank * head_width
    output = c.o_lora_rank * head_width + c.o_groups * c.o_lora_rank * c.hidden_size
    return query + c.hidden_size * c.head_dim + output


def _kv_bytes(c: ModelConfig) -> int:
    record = c.head_dim // 2 + c.head_dim // 16 + c.index_head_dim // 2 + c.index_head_dim // 32
    return round(sum(record / c.compress_ratios[layer] for layer in c.kv_source_layer_ids))


# The released checkpoint, so that a cluster can be planned without its files (a test compares it with its config).
RELEASE = ModelWork(
    encoder=HalfWork(20, 3_629_875_200, 2, 1.5, 0),
    decoder=HalfWork(20, 3_326_115_840, 0, 1.0, 4),
    draft=DraftWork(3, 486_014_976, 128, 3),
    hidden=5120,
    head_params=661_913_600,
    expert_params=35_389_440,
    num_experts=384,
    experts_per_row=6,
    window=128,
    selected=512,
    candidates=16_384,
    key_flops=131_072,
    score_flops=8_192,
    window_bytes=528,
    entry_bytes=288,
    index_bytes=68,
    kv_bytes_per_token=890,
    max_tokens=1_048_576,
)
