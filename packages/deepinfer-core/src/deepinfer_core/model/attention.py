"""The attention sublayer: query, window key, compressed entries, selection, sparse attention, grouped output
(docs/model.md: Attention).

x -> wq_a -> q_norm -> wq_b -> q (rope)              window keys: wkv -> kv_norm -> rope -> e4m3
  -> compressor (KV sources) -> entries, index keys  selection: published by the index source at or below the layer
o = attend(q, window + selected entries, sink) -> inverse rope -> wo_a by group -> wo_b

Window keys are written beside the query, the query is made beside a selection, rings are filled beside the output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.cache.state import ModelState
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.model.batch import Batch, RowSet
from deepinfer_core.model.beside import beside
from deepinfer_core.model.params import AttentionParams

__all__ = ["Selections", "attention", "project_output", "write_global_entries"]


@dataclass
class Selections:
    """What index sources published for the layers after them in the running step."""

    entry_plan: dict[int, Any] = field(
        default_factory=dict[int, Any]
    )  # index source -> plan_keys of the selected entries
    chosen: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # index source -> [P, k] entry numbers
    candidates: Tensor | None = None  # [P, NB] bool
    index_plan: dict[int, Any] = field(default_factory=dict[int, Any])  # ratio -> plan_index


def write_global_entries(
    x: Tensor,
    layer: int,
    params: AttentionParams,
    batch: Batch,
    state: ModelState,
    config: ModelConfig,
    kernels: Kernels,
) -> None:
    """Compressed entries and index keys of a KV source, from its normalized input x [P, D] of all rows."""
    if params.compressor_proj is None or params.compressor_norm is None or params.index_key_norm is None:
        return
    ratio, eps = config.compress_ratios[layer], config.rms_norm_eps
    if ratio > 1:  # pooling runs in float32, as in the original, on sums that are not rounded, as the head's are not
        projected = kernels.head_logits(x, params.compressor_proj)
        projected = _pool(projected, layer, batch, state, kernels).to(x.dtype)
    else:
        projected = kernels.linear(x, params.compressor_proj)
    latent = kernels.rms_norm(projected, params.compressor_norm, eps)
    rows, rope = batch.entry_rows[ratio], batch.entry_rope[ratio]
    key_proj = params.index_key_proj
    if key_proj is not None:
        key = kernels.rms_norm(kernels.linear(latent, key_proj), params.index_key_norm, eps)
        kernels.write_index_keys(state.index_keys[layer], rows, kernels.apply_rope(key, rope, in_place=True))
    kernels.write_entries(state.entries[layer], rows, kernels.apply_rope(latent, rope, in_place=True))
    share = batch.entry_share.get(ratio)
    if share is not None:
        share.run((state.entries[layer], state.index_keys[layer]), f"entries of layer {layer}")


def _pool(projected: Tensor, layer: int, batch: Batch, state: ModelState, kernels: Kernels) -> Tensor:
    """projected [P, 2 hd] of every position -> pooled with the position before; used where that completes a pair."""
    pairs = state.pairs[layer]
    pairs.index_copy_(0, batch.pair_scratch, projected)
    partner = pairs.index_select(0, batch.pair_partner)
    pooled = kernels.pool_pairs(partner.unflatten(1, (2, -1)), projected.unflatten(1, (2, -1)))
    if batch.pair_share is not None:
        batch.pair_share.run((pairs,), f"open pairs of layer {layer}")
    kernels.copy_rows(pairs, batch.pair_commit.destination, batch.pair_commit.source)
    return pooled


def attention(
    x: Tensor,
    layer: int,
    params: AttentionParams,
    rows: RowSet,
    batch: Batch,
    state: ModelState,
    selections: Selections,
    config: ModelConfig,
    kernels: Kernels,
) -> Tensor:
    """x [P, D] normalized input of the rows of `rows` -> [P, D]. Stores the rows' window keys."""
    heads, eps = config.num_attention_heads, config.rms_norm_eps
    owner = config.kv_owner(layer)
    rope = rows.rope if owner is None else rows.long_rope
    window = state.window[layer]
    parts = kernels.linear(x, params.input_proj).split(params.input_widths, 1)

    def write_keys() -> None:
        key = kernels.rms_norm(parts[1], params.kv_norm, eps)
        kernels.write_window(window, rows.scratch, kernels.apply_rope(key, rope, in_place=True))

    def make_query() -> Tensor:
        query = kernels.linear(query_latent, params.query_proj).unflatten(1, (heads, -1))
        return kernels.apply_rope(query, rope, in_place=True)

    keys_written = beside(write_keys, x.device)
    query_latent = kernels.rms_norm(parts[0], params.q_norm, eps)
    entry_cache = entry_plan = None
    if owner is not None and params.index_query_proj is not None:
        query = beside(make_query, x.device)
        _publish(query_latent, parts[2], layer, params, rows, state, selections, config, kernels)
        q = query.join()
    else:
        q = make_query()
    if owner is not None:
        selector = config.index_owner(layer)
        entry_cache, entry_plan = state.entries[owner], selections.entry_plan[-1 if selector is None else selector]
    keys_written.join()
    if rows.window_share is not None:
        rows.window_share.run((window,), f"window keys of layer {layer}")
    out = kernels.attend(q, window, rows.window_plan, entry_cache, entry_plan, params.sink)
    rings_filled = beside(lambda: kernels.copy_rows(window, rows.commit.destination, rows.commit.source), x.device)
    projected = project_output(out, rope, params, kernels)
    rings_filled.join()
    return projected


def project_output(out: Tensor, rope: Tensor, params: AttentionParams, kernels: Kernels) -> Tensor:
    """out [P, H, hd], which may be overwritten -> inverse rope -> wo_a by group of heads -> wo_b -> [P, D]."""
    turned = kernels.apply_rope(out, rope, inverse=True, in_place=True)
    groups = params.wo_a.shape[0]
    low = kernels.grouped_linear(turned.reshape(turned.shape[0], groups, -1), params.wo_a)
    return kernels.linear(low.flatten(1), params.wo_b)


# ---- indexer --------------------------------------------------------------------------------------------------------


def _publish(
    query_latent: Tensor,
    head_weights: Tensor,
    layer: int,
    params: AttentionParams,
    rows: RowSet,
    state: ModelState,
    selections: Selections,
    config: ModelConfig,
    kernels: Kernels,
) -> None:
    """Choose the entries that this layer and the ones after it read."""
    owner = config.kv_owner(layer)
    if owner is None or params.index_query_proj is None:
        return
    ratio = config.compress_ratios[layer]
    visible = rows.num_visible[ratio]
    if _all_are_selected(rows.most_visible // ratio, config):
        order = torch.arange(config.index_topk, device=visible.device)
        chosen = torch.where(order < visible[:, None], order, -1)
        if layer == config.candidate_source_layer_id:
            selections.candidates = None
    else:
        if ratio not in selections.index_plan:
            per_block = state.layout.entries_per_block(ratio)
            selections.index_plan[ratio] = kernels.plan_index(rows.blocks, per_block, visible)
        iq = kernels.linear(query_latent, params.index_query_proj).unflatten(1, (config.index_n_heads, -1))
        iq = kernels.round_index(kernels.apply_rope(iq, rows.long_rope, in_place=True))
        weights = head_weights * (config.index_head_dim * config.index_n_heads) ** -0.5
        candidates = selections.candidates if config.uses_candidates(layer) else None
        block = config.candidate_block_size
        scores = kernels.index_scores(
            iq, weights, state.index_keys[owner], selections.index_plan[ratio], candidates, block
        )
        if layer == config.candidate_source_layer_id:
            selections.candidates = kernels.candidate_blocks(scores, visible, block, config.candidate_topk_blocks)
        chosen = kernels.select_entries(scores, config.index_topk)
    selections.chosen[layer] = chosen
    selections.entry_plan[layer] = kernels.plan_keys(_entry_cache_rows(chosen, rows.blocks, ratio, state))


def _all_are_selected(most_entries: int, config: ModelConfig) -> bool:
    """Whether no row can see more entries than are selected, or more blocks than are candidates."""
    blocks = -(-most_entries // config.candidate_block_size)
    return most_entries <= config.index_topk and blocks <= config.candidate_topk_blocks


def _entry_cache_rows(chosen: Tensor, blocks: Tensor, ratio: int, state: ModelState) -> Tensor:
    """chosen [P, k] entry numbers of each row's request -> rows of the entry cache, -1 kept."""
    per_block = state.layout.entries_per_block(ratio)
    entry = chosen.clamp_min(0)
    block = blocks.gather(1, (entry // per_block).clamp_max(blocks.shape[1] - 1))
    return torch.where((chosen < 0) | (block < 0), -1, block * per_block + entry % per_block)
