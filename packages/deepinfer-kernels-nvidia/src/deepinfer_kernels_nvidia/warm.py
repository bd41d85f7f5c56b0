"""Every program that a model runs, so that all can be compiled before the first request (`deepinfer kernels --warm`).

The list is the model's layers read as shapes: which projection, norm, cache and product occurs, with which widths.
`local_experts` is the number of experts of a main layer that this process holds, and the same share of those of a draft
stage; it is part of a program's signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.reference.packed import Packing
from deepinfer_kernels_nvidia.coverage import reason_against
from deepinfer_kernels_nvidia.jit import PROGRAMS
from deepinfer_kernels_nvidia.ops import TABLE
from deepinfer_kernels_nvidia.ops.experts import TILE
from deepinfer_kernels_nvidia.ops.linear_float32 import num_parts
from deepinfer_kernels_nvidia.ops.mhc_product import num_mix_parts
from deepinfer_kernels_nvidia.ops.route import num_route_parts

__all__ = ["variants", "warm"]

type Variant = tuple[str, tuple[Any, ...]]  # name and parameters of a program
_BLOCK_TOKENS = 128
_ROW_UNIT = 8  # products pad their widths to this


def variants(
    config: ModelConfig, local_experts: int | None = None, *, coded: bool = False, packed: Packing = "none"
) -> list[Variant]:
    """Programs of the model in bfloat16, without repetition; only those of operations that take its shapes. `coded`,
    `packed`: those of products with such weights, too.
    """
    by_op = [
        *(_coded(config, local_experts) if coded else ()),
        *(_packed(config) if packed == "products" else ()),
        *(_packed_experts(config, local_experts) if packed != "none" else ()),
        *_rows(config),
        *_sampling(),
        *_caches(config),
        *_attention(config),
        *_products(config),
        *_experts(config, local_experts),
    ]
    taken = {op: reason_against(op, config, torch.bfloat16) is None for op in TABLE}
    return list(dict.fromkeys(variant for op, variant in by_op if taken[op]))


def warm(
    config: ModelConfig,
    progress: Callable[[int, int, str], None],
    local_experts: int | None = None,
    *,
    coded: bool = False,
    packed: Packing = "none",
) -> None:
    """Compile every variant for the current GPU; `coded` and `packed` as for `variants`. `progress(done, total, name)`
    is called before each and at the end. Raises KernelError where one does not compile.
    """
    wanted = variants(config, local_experts, coded=coded, packed=packed)
    for done, (name, parameters) in enumerate(wanted):
        progress(done, len(wanted), name)
        PROGRAMS[name](*parameters)
    progress(len(wanted), len(wanted), "")


def _rows(c: ModelConfig) -> Iterator[tuple[str, Variant]]:
    for dim, contiguous in (
        (c.hidden_size, True),
        (c.q_lora_rank, False),  # parts of a joined projection
        (c.head_dim, False),
        (c.head_dim, True),
        (c.index_head_dim, True),
    ):
        yield "rms_norm", ("rms_norm", (dim, "bfloat16", "float32", contiguous))
    rotary = c.qk_rope_head_dim
    yield "rope_table", ("rope_table", (rotary // 2,))
    for heads, dim, inverse in (
        (c.num_attention_heads, c.head_dim, False),
        (c.num_attention_heads, c.head_dim, True),
        (c.index_n_heads, c.index_head_dim, False),
        (1, c.head_dim, False),
        (1, c.index_head_dim, False),
    ):
        yield "apply_rope", ("apply_rope", (heads, dim, rotary, "bfloat16", "float32", inverse))
    streams, dim = c.hc_mult, c.hidden_size
    mixes = streams * (streams + 2)
    yield "mhc_mix", ("split_weight", (mixes,))
    for few in (False, True):
        yield "mhc_mix", ("mix_parts", (streams * dim, mixes, few))
    parts = num_mix_parts(streams * dim)
    yield "mhc_mix", ("mhc_gates", (streams, dim, parts, mixes, c.hc_sinkhorn_iters, "float32"))
    yield "mhc_collapse", ("mhc_collapse", (streams, dim, "bfloat16", "float32"))
    yield "mhc_expand", ("mhc_expand", (streams, dim, "bfloat16", "float32"))
    yield "mhc_next", ("mhc_next", (streams, dim, "bfloat16", "float32", "float32"))
    yield "engram_rows", ("engram_rows", (c.engram_max_ngram_size, c.engram_n_heads))
    yield "engram_gate", ("engram_gate", (streams, dim, "bfloat16", "float32"))


def _sampling() -> Iterator[tuple[str, Variant]]:
    """Programs of sample rows, which no width of the model shapes."""
    yield "adjust_logits", ("adjust_rows", ())
    yield "filter_logits", ("filter_rows", ())
    yield "draw_token", ("draw_blocks", ())
    yield "draw_token", ("draw_best", ())
    yield "accept_drafts", ("accept", ())
    yield "token_logprobs", ("row_logprobs", ())


def _caches(c: ModelConfig) -> Iterator[tuple[str, Variant]]:
    yield "write_window", ("write_records", ("window", c.head_dim, "bfloat16"))
    yield "write_entries", ("write_records", ("compressed", c.head_dim, "bfloat16"))
    yield "write_index_keys", ("write_records", ("index", c.index_head_dim, "bfloat16"))
    yield "round_index", ("round_index", (c.index_head_dim, "bfloat16"))
    yield "pool_pairs", ("pool_pairs", (c.head_dim, "float32"))
    record = c.head_dim + c.head_dim // 32
    words = (record // 4, "int32") if record % 4 == 0 else (record, "uint8")
    yield "copy_rows", ("copy_rows", words)
    yield "copy_rows", ("copy_rows", (2 * c.head_dim, "int32"))


def _attention(c: ModelConfig) -> Iterator[tuple[str, Variant]]:
    yield "plan_keys", ("plan_keys", ())
    for has_entries in (True, False):
        yield "attend", ("attend", (c.num_attention_heads, c.head_dim, has_entries, "float32"))
    for ratio in sorted({c.compress_ratios[layer] for layer in c.kv_source_layer_ids}):
        for candidate_block in (None, c.candidate_block_size):
            shape = (c.index_n_heads, c.index_head_dim, _BLOCK_TOKENS // ratio, candidate_block)
            yield "index_scores", ("index_scores", shape)
    yield "index_scores", ("encode_queries", (c.index_n_heads, c.index_head_dim, "bfloat16"))
    yield "select_entries", ("top_k", (c.index_topk, 4, False))
    yield "candidate_blocks", ("block_best", (c.candidate_block_size,))
    yield "candidate_blocks", ("top_k", (c.candidate_topk_blocks, 1, True))


def _products(c: ModelConfig) -> Iterator[tuple[str, Variant]]:
    dim, head, query = c.hidden_size, c.head_dim, c.q_lora_rank
    low = c.o_groups * c.o_lora_rank
    shapes = [
        (dim, query + head),
        (dim, query + head + c.index_n_heads),
        (query, c.num_attention_heads * head),
        (query, c.index_n_heads * c.index_head_dim),
        (low, dim),
        (dim, head),
        (head, c.index_head_dim),
        (c.moe_intermediate_size, dim),
        (len(c.dspark_target_layer_ids) * dim, dim),
    ]
    ngrams = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    shapes.append((ngrams, (c.hc_mult + 1) * dim))
    per_group = c.num_attention_heads // c.o_groups * head
    for few in (False, True):
        for inner, outer in shapes:
            yield "linear", ("matmul", (1, _padded(inner), _padded(outer), "bfloat16", few))
        # The head, compressors of pairs, and what the Markov step adds to the drafts' logits.
        for inner, outer in ((dim, c.vocab_size), (dim, 2 * head), (c.dspark_markov_rank, c.vocab_size)):
            yield "head_logits", ("matmul", (1, _padded(inner), _padded(outer), "float32", few))
        group = _padded(per_group), _padded(c.o_lora_rank)
        yield "grouped_linear", ("matmul", (c.o_groups, *group, "bfloat16", few))
    inner = _padded(dim + c.dspark_markov_rank)
    yield "linear", ("matmul_parts", (inner, _padded(1), "float32", "float32", False))
    if num_parts(inner, _padded(1)) > 1:
        yield "linear", ("sum_parts", (num_parts(inner, _padded(1)), _padded(1)))


def _experts(c: ModelConfig, local_experts: int | None) -> Iterator[tuple[str, Variant]]:
    dim, width = c.hidden_size, c.moe_intermediate_size
    for total, chosen in (
        (c.n_routed_experts, c.num_experts_per_tok),
        (c.dspark_n_routed_experts, c.dspark_num_experts_per_tok),
    ):
        local = _local(c, total, local_experts)
        parts, columns = num_route_parts(dim), _padded(total)
        for few in (False, True):
            yield "route", ("matmul", (parts, _padded(dim // parts), columns, "float32", few))
        for bias_by_row in (False, True):
            yield "route", ("select_experts", (parts, total, columns, chosen, bias_by_row))
        yield "plan_experts", ("rank_pairs", (local,))
        yield "plan_experts", ("first_tiles", (local, TILE))
        yield "plan_experts", ("place_pairs", (local, TILE))
        yield "run_experts", ("gather_tiles", (dim, chosen))
        yield "run_experts", ("gated", (local, dim, width, True, False))
        yield "run_experts", ("down", (local, width, dim))
        yield "combine_experts", ("combine_experts", (chosen, dim, "bfloat16"))
    for few in (False, True):
        yield "shared_expert", ("gated", (1, dim, width, False, few))


def _coded(c: ModelConfig, local_experts: int | None) -> Iterator[tuple[str, Variant]]:
    dim, width, low = c.hidden_size, c.moe_intermediate_size, c.o_groups * c.o_lora_rank
    for inner in (dim, width, low, c.q_lora_rank):
        yield "linear", ("code_rows", (inner,))
    heads, index_heads = c.num_attention_heads * c.head_dim, c.index_n_heads * c.index_head_dim
    for inner, outer in ((c.q_lora_rank, heads), (c.q_lora_rank, index_heads), (low, dim), (width, dim)):
        for few in (False, True):
            yield "linear", ("matmul_coded", (inner, outer, few))
    for total, chosen in (
        (c.n_routed_experts, c.num_experts_per_tok),
        (c.dspark_n_routed_experts, c.dspark_num_experts_per_tok),
    ):
        local = _local(c, total, local_experts)
        yield "run_experts", ("gather_coded", (dim, chosen))
        yield "run_experts", ("gated_coded", (local, dim, width, True, False))
        yield "run_experts", ("down_coded", (local, width, dim))
    for few in (False, True):
        yield "shared_expert", ("gated_coded", (1, dim, width, False, few))


def _packed(c: ModelConfig) -> Iterator[tuple[str, Variant]]:
    dim, width, low = c.hidden_size, c.moe_intermediate_size, c.o_groups * c.o_lora_rank
    heads, index_heads = c.num_attention_heads * c.head_dim, c.index_n_heads * c.index_head_dim
    for few in (False, True):
        for inner, outer in ((c.q_lora_rank, heads), (c.q_lora_rank, index_heads), (low, dim), (width, dim)):
            yield "linear", ("multiply_packed", (1, inner, outer, 8, False, False, few))
        yield "shared_expert", ("multiply_packed", (1, dim, 2 * width, 8, True, False, few))


def _packed_experts(c: ModelConfig, local_experts: int | None) -> Iterator[tuple[str, Variant]]:
    dim, width = c.hidden_size, c.moe_intermediate_size
    for total in (c.n_routed_experts, c.dspark_n_routed_experts):
        local = _local(c, total, local_experts)
        for few in (False, True):
            yield "run_experts", ("multiply_packed", (local, dim, 2 * width, 4, True, True, few))
            yield "run_experts", ("multiply_packed", (local, width, dim, 4, False, True, few))


def _local(c: ModelConfig, total: int, local_experts: int | None) -> int:
    """Of `total` experts of a layer the share that a process with `local_experts` of the main layers' holds."""
    return total if local_experts is None else -(-total * local_experts // c.n_routed_experts)


def _padded(width: int) -> int:
    return -(-width // _ROW_UNIT) * _ROW_UNIT
