"""The operations in torch's dispatcher: torch.ops.deepinfer_ascend.<name>, for the dispatch key PrivateUse1.

torch-npu gives that key the name "npu". torch refuses the name while torch-npu is absent but knows the key always, so
registering works on any machine. The engine calls the plain functions; these are for graph compilers, which need a
schema, and `Meta` forms, which are the reference's: equal shapes and dtypes by contract.

Operations that take a plan (attend, index_scores, run_experts) stay plain functions: a plan is no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from deepinfer_core.kernels.reference import REFERENCE

__all__ = ["NAMESPACE", "SCHEMAS", "register"]

NAMESPACE = "deepinfer_ascend"
SCHEMAS: Mapping[str, str] = {
    "linear": "(Tensor x, Tensor weight) -> Tensor",
    "grouped_linear": "(Tensor x, Tensor weight) -> Tensor",
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "apply_rope": "(Tensor x, Tensor table, *, bool inverse=False) -> Tensor",
    "mhc_mix": (
        "(Tensor streams, Tensor fn, Tensor base, Tensor scale, *, int iterations, float norm_eps, float eps)"
        " -> (Tensor, Tensor, Tensor)"
    ),
    "mhc_collapse": "(Tensor streams, Tensor pre) -> Tensor",
    "mhc_expand": "(Tensor streams, Tensor y, Tensor post, Tensor c) -> Tensor",
    "write_window": "(Tensor(a!) cache, Tensor rows, Tensor keys) -> ()",
    "write_entries": "(Tensor(a!) cache, Tensor rows, Tensor entries) -> ()",
    "write_index_keys": "(Tensor(a!) cache, Tensor rows, Tensor keys) -> ()",
    "copy_rows": "(Tensor(a!) cache, Tensor destination, Tensor source) -> ()",
    "round_index": "(Tensor x) -> Tensor",
    "pool_pairs": "(Tensor first, Tensor second) -> Tensor",
    "shared_expert": "(Tensor x, Tensor w13, Tensor w2, float limit) -> Tensor",
    "combine_experts": "(Tensor pairs, Tensor shared) -> Tensor",
    "route": "(Tensor x, Tensor gate, Tensor bias, int k, float scale) -> (Tensor, Tensor)",
    "engram_gate": (
        "(Tensor streams, Tensor key_value, Tensor q_weight, Tensor k_weight, Tensor dead, float eps) -> Tensor"
    ),
    "engram_rows": (
        "(Tensor history, Tensor multipliers, Tensor primes, Tensor offsets, int pad_class, int heads) -> Tensor"
    ),
}


@cache
def register() -> torch.library.Library:
    """Define and register every operation of SCHEMAS, once a process; what is returned keeps them alive."""
    from deepinfer_kernels_ascend.ops import TABLE  # imports TileLang

    library: Any = torch.library.Library(NAMESPACE, "DEF")  # its methods are not typed
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        implementation: Callable[..., Any] = TABLE[name]
        library.impl(name, implementation, "PrivateUse1")
        library.impl(name, getattr(REFERENCE, name), "Meta")
    return library
