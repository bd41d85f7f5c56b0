"""Every TileLang program that a model runs on Ascend, so that all can be compiled before the first request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepinfer_core.config.model import ModelConfig
from deepinfer_kernels_ascend.coverage import reason_against
from deepinfer_kernels_ascend.jit import PROGRAMS
from deepinfer_kernels_ascend.ops import TABLE

__all__ = ["variants", "warm"]

type Variant = tuple[str, tuple[Any, ...]]  # name and parameters of a program
_DTYPE = "bfloat16"


def variants(config: ModelConfig) -> list[Variant]:
    """Programs of the model in bfloat16, without repetition; only those of operations that take its shapes."""
    taken = {op: reason_against(op, config, torch.bfloat16) is None for op in TABLE}
    found = [variant for op, variant in (*_caches(config), *_rows(config)) if taken[op]]
    return list(dict.fromkeys(found))


def warm(config: ModelConfig, progress: Callable[[int, int, str], None], local_experts: int | None = None) -> None:
    """Compile every variant. `progress(done, total, name)` is called before each and at the end. `local_experts` is
    part of no program here. Raises KernelError where one does not compile.
    """
    wanted = variants(config)
    for done, (name, parameters) in enumerate(wanted):
        progress(done, len(wanted), name)
        PROGRAMS[name](*parameters)
    progress(len(wanted), len(wanted), "")


def _caches(c: ModelConfig) -> Iterator[tuple[str, Variant]]:
    for op, kind, dim in (
        ("write_window", "window", c.head_dim),
        ("write_entries", "compressed", c.head_dim),
        ("write_index_keys", "index", c.index_head_dim),
    ):
        yield op, ("write_records", (kind, dim, _DTYPE))
        yield ("index_scores" if kind == "index" else "attend"), ("read_records", (kind, dim, _DTYPE))
    yield "round_index", ("round_index", (c.index_head_dim, _DTYPE))
    record = c.head_dim + c.head_dim // 32
    yield "copy_rows", ("copy_rows", (record // 4, "int32") if record % 4 == 0 else (record, "uint8"))
    yield "copy_rows", ("copy_rows", (2 * c.head_dim, "int32"))
    yield "pool_pairs", ("pool_pairs", (c.head_dim, "float32"))


def _rows(c: ModelConfig) -> Iterator[tuple[str, Variant]]:
    rotary, streams, dim = c.qk_rope_head_dim, c.hc_mult, c.hidden_size
    for heads, width, inverse in (
        (c.num_attention_heads, c.head_dim, False),
        (c.num_attention_heads, c.head_dim, True),
        (c.index_n_heads, c.index_head_dim, False),
        (1, c.head_dim, False),
        (1, c.index_head_dim, False),
    ):
        yield "apply_rope", ("apply_rope", (heads, width, rotary, _DTYPE, "float32", inverse))
    yield "mhc_mix", ("sinkhorn", (streams, c.hc_sinkhorn_iters))
    yield "mhc_collapse", ("mhc_collapse", (streams, dim, _DTYPE))
    for chosen in (c.num_experts_per_tok, c.dspark_num_experts_per_tok):
        yield "combine_experts", ("combine_experts", (chosen, dim, _DTYPE))
    yield "shared_expert", ("gated_activation", (c.moe_intermediate_size, _DTYPE))
    yield "engram_rows", ("engram_rows", (c.engram_max_ngram_size, c.engram_n_heads))
    yield "engram_gate", ("gate_sums", (streams, dim, _DTYPE))
    yield "engram_gate", ("gate_apply", (streams, dim, _DTYPE))
    for experts, chosen in (
        (c.n_routed_experts, c.num_experts_per_tok),
        (c.dspark_n_routed_experts, c.dspark_num_experts_per_tok),
    ):
        yield "route", ("select_experts", (experts, chosen, False))
        yield "route", ("select_experts", (experts, chosen, True))  # a row with images has a bias of its own
