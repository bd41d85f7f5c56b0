"""Reference forms of the operations that read and write caches: thin compositions of records, attention and indexer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.kernels.reference import attention, indexer
from deepinfer_core.kernels.reference.records import COMPRESSED, INDEX, WINDOW, read_rows, write_rows

__all__ = [
    "IndexPlan",
    "KeyPlan",
    "attend",
    "copy_rows",
    "index_scores",
    "plan_index",
    "plan_keys",
    "write_entries",
    "write_index_keys",
    "write_window",
]

_ROWS_PER_PASS = 128  # bounds the gathered keys of a prefill; a row's bits don't depend on it


def write_window(cache: Tensor, rows: Tensor, keys: Tensor) -> None:
    """Round keys [R, hd] to window records and store them in cache[rows]."""
    write_rows(cache, rows, keys, WINDOW)


def write_entries(cache: Tensor, rows: Tensor, entries: Tensor) -> None:
    """Round rotated latents [R, hd] to compressed records and store them in cache[rows]."""
    write_rows(cache, rows, entries, COMPRESSED)


def write_index_keys(cache: Tensor, rows: Tensor, keys: Tensor) -> None:
    """Round rotated index keys [R, Di] and store them in cache[rows]."""
    write_rows(cache, rows, keys, INDEX)


def copy_rows(cache: Tensor, destination: Tensor, source: Tensor) -> None:
    """cache[destination] = cache[source]; the two row lists don't meet."""
    cache.index_copy_(0, destination, cache.index_select(0, source))


@dataclass(frozen=True)
class KeyPlan:
    """Cache rows that each query row reads, and the bias that hides the invisible ones."""

    rows: Tensor  # [R, K] int64, 0 where invisible
    bias: Tensor  # [R, K] float32, 0 or -inf


def plan_keys(rows: Tensor) -> KeyPlan:
    """rows [R, K] of a cache, -1 = invisible."""
    invisible = rows < 0
    bias = torch.zeros(rows.shape, device=rows.device).masked_fill_(invisible, float("-inf"))
    return KeyPlan(rows.masked_fill(invisible, 0), bias)


def attend(
    q: Tensor,
    window_cache: Tensor,
    window: KeyPlan,
    entry_cache: Tensor | None,
    entries: KeyPlan | None,
    sink: Tensor,
) -> Tensor:
    """q [R, H, hd] -> [R, H, hd]; see attention.py. Long inputs go through in passes of equal arithmetic."""
    outputs: list[Tensor] = []
    for start in range(0, q.shape[0], _ROWS_PER_PASS):
        part = slice(start, start + _ROWS_PER_PASS)
        window_keys = read_rows(window_cache, window.rows[part], WINDOW, q.dtype)
        entry_keys = entry_bias = None
        if entry_cache is not None and entries is not None:
            entry_keys = read_rows(entry_cache, entries.rows[part], COMPRESSED, q.dtype)
            entry_bias = entries.bias[part].to(q.dtype)
        outputs.append(
            attention.sparse_attention(
                q[part], window_keys, window.bias[part].to(q.dtype), entry_keys, entry_bias, sink
            )
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass(frozen=True)
class IndexPlan:
    """Index-key blocks that each query row may see."""

    blocks: Tensor  # [R, B] block numbers, 0 where the request has none
    entries_per_block: int
    num_visible: Tensor  # [R]


def plan_index(blocks: Tensor, entries_per_block: int, num_visible: Tensor) -> IndexPlan:
    """blocks [R, B] block numbers, -1 = none; num_visible [R] entries that the row may see."""
    return IndexPlan(blocks.clamp_min(0), entries_per_block, num_visible)


def index_scores(
    iq: Tensor, weights: Tensor, cache: Tensor, plan: IndexPlan, candidates: Tensor | None, candidate_block: int
) -> Tensor:
    """iq [R, Hi, Di], weights [R, Hi], index cache -> scores [R, B * entries_per_block], -inf where invisible or not a
    candidate.
    """
    offsets = torch.arange(plan.entries_per_block, device=iq.device)
    outputs: list[Tensor] = []
    for start in range(0, iq.shape[0], _ROWS_PER_PASS):
        part = slice(start, start + _ROWS_PER_PASS)
        rows = plan.blocks[part][..., None] * plan.entries_per_block + offsets  # [r, B, P]
        keys = read_rows(cache, rows, INDEX, iq.dtype)
        outputs.append(indexer.index_scores(iq[part], weights[part], keys, plan.num_visible[part]))
    scores = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return scores if candidates is None else indexer.mask_to_candidates(scores, candidates, candidate_block)
