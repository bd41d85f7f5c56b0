"""The reference provider: every operation of the contract in plain torch, on any device.

It is the oracle of all other providers and the product on the CPU. No Python loop runs over tokens or heads.
"""

from __future__ import annotations

from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference.adjust import adjust_logits
from deepinfer_core.kernels.reference.cache_ops import (
    attend,
    copy_rows,
    index_scores,
    plan_index,
    plan_keys,
    write_entries,
    write_index_keys,
    write_window,
)
from deepinfer_core.kernels.reference.compressor import pool_pairs
from deepinfer_core.kernels.reference.draw import draw_token
from deepinfer_core.kernels.reference.dspark import markov_step
from deepinfer_core.kernels.reference.engram import engram_gate, engram_rows
from deepinfer_core.kernels.reference.filters import filter_logits
from deepinfer_core.kernels.reference.indexer import candidate_blocks, select_entries
from deepinfer_core.kernels.reference.linear import grouped_linear, head_logits, linear
from deepinfer_core.kernels.reference.logprobs import token_logprobs
from deepinfer_core.kernels.reference.mhc import mhc_collapse, mhc_expand, mhc_mix, mhc_next
from deepinfer_core.kernels.reference.moe import combine_experts, plan_tiles, route, run_experts, shared_expert
from deepinfer_core.kernels.reference.norm_rope import apply_rope, rms_norm, rope_table
from deepinfer_core.kernels.reference.rounding import round_index
from deepinfer_core.kernels.reference.verify import accept_drafts

__all__ = ["REFERENCE"]

REFERENCE = Kernels(
    linear=linear,
    grouped_linear=grouped_linear,
    head_logits=head_logits,
    rms_norm=rms_norm,
    rope_table=rope_table,
    apply_rope=apply_rope,
    mhc_mix=mhc_mix,
    mhc_collapse=mhc_collapse,
    mhc_expand=mhc_expand,
    mhc_next=mhc_next,
    write_window=write_window,
    write_entries=write_entries,
    write_index_keys=write_index_keys,
    copy_rows=copy_rows,
    round_index=round_index,
    pool_pairs=pool_pairs,
    plan_keys=plan_keys,
    attend=attend,
    plan_index=plan_index,
    index_scores=index_scores,
    candidate_blocks=candidate_blocks,
    select_entries=select_entries,
    route=route,
    plan_experts=plan_tiles,
    run_experts=run_experts,
    shared_expert=shared_expert,
    combine_experts=combine_experts,
    engram_rows=engram_rows,
    engram_gate=engram_gate,
    markov_step=markov_step,
    adjust_logits=adjust_logits,
    filter_logits=filter_logits,
    draw_token=draw_token,
    accept_drafts=accept_drafts,
    token_logprobs=token_logprobs,
)
