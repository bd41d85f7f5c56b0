"""Which operations this package takes for a model, from where, and the reason against each that it does not."""

from __future__ import annotations

import torch

from deepinfer_core.config.model import ModelConfig

__all__ = ["OFFERED", "ROW_INVARIANT", "reason_against"]

# One thread walks over a group or an element of one row in one order: independent of the batch by construction.
ROW_INVARIANT = frozenset(
    (
        "apply_rope",
        "write_window",
        "write_entries",
        "write_index_keys",
        "round_index",
        "copy_rows",
        "pool_pairs",
        "mhc_collapse",
        "combine_experts",
        "engram_rows",
        "engram_gate",
        "plan_keys",
        "plan_index",
    )
)
# These use products and reductions of torch or torch_npu.
_FROM_LIBRARIES = frozenset(
    (
        "rms_norm",
        "linear",
        "grouped_linear",
        "mhc_mix",
        "mhc_expand",
        "attend",
        "index_scores",
        "route",
        "plan_experts",
        "run_experts",
        "shared_expert",
    )
)
OFFERED = ROW_INVARIANT | _FROM_LIBRARIES

_BFLOAT16_ONLY = frozenset(("mhc_mix", "mhc_expand", "plan_experts", "run_experts", "shared_expert"))
_NPU_STREAMS = (4, 6, 8)  # documented for npu_mhc_pre and npu_mhc_post
_REASONS = {
    "head_logits": "the product must come out in float32, not rounded; torch's own gives the dtype of its inputs",
    "rope_table": "angles reach 10^6 radians; the range of the device's sine is not documented",
}


def reason_against(op: str, config: ModelConfig, dtype: torch.dtype) -> str | None:
    """None where the kernel of `op` takes every shape that this model gives it in this dtype."""
    if op not in OFFERED:
        return _REASONS.get(op, f"this version of deepinfer-kernels-ascend has no kernel for {op}")
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the kernels compute in bfloat16 or float32, not {dtype}"
    if op in _BFLOAT16_ONLY and dtype != torch.bfloat16:
        return "the kernel computes in bfloat16 only"
    if op in ("mhc_mix", "mhc_expand") and config.hc_mult not in _NPU_STREAMS:
        return f"hc_mult is {config.hc_mult}; torch_npu's mHC operations take 4, 6 or 8 streams"
    if op == "run_experts" and config.n_routed_experts < 2:
        return "npu_grouped_matmul needs at least two groups"
    return None
