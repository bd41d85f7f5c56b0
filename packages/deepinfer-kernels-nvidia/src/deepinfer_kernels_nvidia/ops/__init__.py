"""The operations that this package implements, by their name in the contract. Importing it imports TileLang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepinfer_kernels_nvidia.ops.adjust import adjust_logits
from deepinfer_kernels_nvidia.ops.attention import attend, plan_keys
from deepinfer_kernels_nvidia.ops.cache_write import round_index, write_entries, write_index_keys, write_window
from deepinfer_kernels_nvidia.ops.copy_rows import copy_rows
from deepinfer_kernels_nvidia.ops.draw import draw_token
from deepinfer_kernels_nvidia.ops.dspark import markov_step
from deepinfer_kernels_nvidia.ops.engram import engram_gate, engram_rows
from deepinfer_kernels_nvidia.ops.experts import combine_experts, plan_experts, run_experts, shared_expert
from deepinfer_kernels_nvidia.ops.filters import filter_logits
from deepinfer_kernels_nvidia.ops.indexer import index_scores, plan_index
from deepinfer_kernels_nvidia.ops.linear import grouped_linear, head_logits, linear
from deepinfer_kernels_nvidia.ops.logprobs import token_logprobs
from deepinfer_kernels_nvidia.ops.mhc_mix import mhc_mix
from deepinfer_kernels_nvidia.ops.mhc_streams import mhc_collapse, mhc_expand, mhc_next
from deepinfer_kernels_nvidia.ops.pool_pairs import pool_pairs
from deepinfer_kernels_nvidia.ops.rms_norm import rms_norm
from deepinfer_kernels_nvidia.ops.rope import apply_rope, rope_table
from deepinfer_kernels_nvidia.ops.route import route
from deepinfer_kernels_nvidia.ops.select import candidate_blocks, select_entries
from deepinfer_kernels_nvidia.ops.verify import accept_drafts

__all__ = ["TABLE"]

TABLE: Mapping[str, Callable[..., Any]] = {
    "linear": linear,
    "grouped_linear": grouped_linear,
    "head_logits": head_logits,
    "rms_norm": rms_norm,
    "rope_table": rope_table,
    "apply_rope": apply_rope,
    "mhc_mix": mhc_mix,
    "mhc_collapse": mhc_collapse,
    "mhc_expand": mhc_expand,
    "mhc_next": mhc_next,
    "write_window": write_window,
    "write_entries": write_entries,
    "write_index_keys": write_index_keys,
    "copy_rows": copy_rows,
    "round_index": round_index,
    "pool_pairs": pool_pairs,
    "plan_keys": plan_keys,
    "attend": attend,
    "plan_index": plan_index,
    "index_scores": index_scores,
    "candidate_blocks": candidate_blocks,
    "select_entries": select_entries,
    "route": route,
    "plan_experts": plan_experts,
    "run_experts": run_experts,
    "shared_expert": shared_expert,
    "combine_experts": combine_experts,
    "engram_rows": engram_rows,
    "engram_gate": engram_gate,
    "markov_step": markov_step,
    "adjust_logits": adjust_logits,
    "filter_logits": filter_logits,
    "draw_token": draw_token,
    "accept_drafts": accept_drafts,
    "token_logprobs": token_logprobs,
}
