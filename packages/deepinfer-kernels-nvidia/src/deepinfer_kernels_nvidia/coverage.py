"""Which operations this package takes for a model, and the reason against each that it does not.

Operations whose host plan one shares with the other come together: a plan is private to the table that made it.
"""

from __future__ import annotations

import torch

from deepinfer_core.config.model import ModelConfig

__all__ = ["OFFERED", "reason_against"]

OFFERED = frozenset(
    (
        "linear",
        "grouped_linear",
        "head_logits",
        "rms_norm",
        "rope_table",
        "apply_rope",
        "mhc_mix",
        "mhc_collapse",
        "mhc_expand",
        "mhc_next",
        "write_window",
        "write_entries",
        "write_index_keys",
        "copy_rows",
        "round_index",
        "pool_pairs",
        "plan_keys",
        "attend",
        "plan_index",
        "index_scores",
        "candidate_blocks",
        "select_entries",
        "route",
        "plan_experts",
        "run_experts",
        "shared_expert",
        "combine_experts",
        "engram_rows",
        "engram_gate",
        "markov_step",
        "adjust_logits",
        "filter_logits",
        "draw_token",
        "accept_drafts",
        "token_logprobs",
    )
)
_ATTENTION = frozenset(("plan_keys", "attend"))
_INDEX = frozenset(("plan_index", "index_scores"))
_EXPERTS = frozenset(("plan_experts", "run_experts", "shared_expert"))
_BFLOAT16_ONLY = _ATTENTION | _INDEX | _EXPERTS | {"grouped_linear"}
_ATTENTION_DIM_STEP = 64  # a tile of one wgmma, and whole 32-bit words in a compressed record
_MOST_ATTENTION_DIM = 512  # queries and two tiles of keys of this width fill the shared memory of a block
_INDEX_COLUMNS = 128  # of one index product: heads of whole rows
_INDEX_DIM_STEP = 32  # values that share a scale, and the depth of one fp8 wgmma
_MOST_INDEX_DIM = 256  # a thread holds its share of a key in registers
_INDEX_ENTRIES_STEP = 16  # records of any length come in whole 16-byte units
_BLOCK_TOKENS = 128
_EXPERT_DIM_STEP = 8  # rows of whole 16-byte units
_MOST_CHOSEN = 1 << 14  # of a row: keys in question and those chosen stand in the shared memory of a block
_CHOSEN = {"select_entries": "index_topk", "candidate_blocks": "candidate_topk_blocks"}
_MOST_IDS = 1 << 19  # weights of so many ids add up in 64 bits
_MOST_STREAMS = 8  # the mix of a row is held in the registers of one thread


def reason_against(op: str, config: ModelConfig, dtype: torch.dtype) -> str | None:
    """None where the kernel of `op` takes every shape that this model gives it in this dtype."""
    if op not in OFFERED:
        return f"this version of deepinfer-kernels-nvidia has no kernel for {op}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the kernels compute in bfloat16 or float32, not {dtype}"
    if op in _BFLOAT16_ONLY and dtype != torch.bfloat16:
        return "the kernel computes in bfloat16 only"
    if op in _ATTENTION and config.head_dim % _ATTENTION_DIM_STEP:
        return f"head_dim is {config.head_dim}; the attention kernel needs a multiple of {_ATTENTION_DIM_STEP}"
    if op in _ATTENTION and config.head_dim > _MOST_ATTENTION_DIM:
        return f"head_dim is {config.head_dim}; the attention kernel takes at most {_MOST_ATTENTION_DIM}"
    if op in _INDEX and (reason := _reason_against_index(config)) is not None:
        return reason
    if op in _CHOSEN and getattr(config, _CHOSEN[op]) > _MOST_CHOSEN:
        return f"{_CHOSEN[op]} is {getattr(config, _CHOSEN[op])}; the kernel chooses at most {_MOST_CHOSEN}"
    if op in _EXPERTS:
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(config, name) % _EXPERT_DIM_STEP:
                return f"{name} is {getattr(config, name)}; the expert kernels need a multiple of {_EXPERT_DIM_STEP}"
    if op == "filter_logits" and config.vocab_size > _MOST_IDS:
        return f"vocab_size is {config.vocab_size}; the kernel of filters takes at most {_MOST_IDS}"
    if op == "mhc_mix" and config.hc_mult > _MOST_STREAMS:
        return f"hc_mult is {config.hc_mult}; the kernel holds at most {_MOST_STREAMS} streams"
    return None


def _reason_against_index(config: ModelConfig) -> str | None:
    ratio = max((config.compress_ratios[layer] for layer in config.kv_source_layer_ids), default=1)
    if _INDEX_COLUMNS % config.index_n_heads:
        return f"index_n_heads is {config.index_n_heads}; the index kernel needs a divisor of {_INDEX_COLUMNS}"
    if config.index_head_dim % _INDEX_DIM_STEP:
        return f"index_head_dim is {config.index_head_dim}; the index kernel needs a multiple of {_INDEX_DIM_STEP}"
    if config.index_head_dim > _MOST_INDEX_DIM:
        return f"index_head_dim is {config.index_head_dim}; the index kernel takes at most {_MOST_INDEX_DIM}"
    if _BLOCK_TOKENS % (_INDEX_ENTRIES_STEP * ratio):
        return f"a compression ratio is {ratio}; the index kernel needs 1, 2, 4 or 8"
    if _BLOCK_TOKENS // ratio % config.candidate_block_size:
        return (
            f"candidate_block_size is {config.candidate_block_size}; the index kernel needs a divisor of a cache block"
        )
    return None
