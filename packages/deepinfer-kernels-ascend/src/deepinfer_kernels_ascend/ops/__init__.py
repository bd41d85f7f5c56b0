"""The operations that this package implements, by their name in the contract. Importing it imports TileLang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepinfer_kernels_ascend.ops.cache_read import attend, index_scores, plan_index, plan_keys
from deepinfer_kernels_ascend.ops.cache_write import round_index, write_entries, write_index_keys, write_window
from deepinfer_kernels_ascend.ops.dense import grouped_linear, linear, rms_norm
from deepinfer_kernels_ascend.ops.engram import engram_gate, engram_rows
from deepinfer_kernels_ascend.ops.experts import plan_experts, run_experts, shared_expert
from deepinfer_kernels_ascend.ops.mhc import mhc_expand, mhc_mix
from deepinfer_kernels_ascend.ops.rope import apply_rope
from deepinfer_kernels_ascend.ops.route import route
from deepinfer_kernels_ascend.ops.rows import combine_experts, copy_rows, mhc_collapse, pool_pairs

__all__ = ["TABLE"]

TABLE: Mapping[str, Callable[..., Any]] = {
    "linear": linear,
    "grouped_linear": grouped_linear,
    "rms_norm": rms_norm,
    "apply_rope": apply_rope,
    "mhc_mix": mhc_mix,
    "mhc_collapse": mhc_collapse,
    "mhc_expand": mhc_expand,
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
    "plan_experts": plan_experts,
    "run_experts": run_experts,
    "shared_expert": shared_expert,
    "combine_experts": combine_experts,
    "route": route,
    "engram_rows": engram_rows,
    "engram_gate": engram_gate,
}
