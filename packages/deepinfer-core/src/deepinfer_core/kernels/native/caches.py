"""Caches, attention and indexer: contract functions over the C library. Caches are plain float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.kernels.native.dense import rows_of
from deepinfer_core.kernels.native.library import Library, failure

__all__ = ["CacheOps", "IndexPlan"]

_WINDOW, _COMPRESSED, _INDEX = 0, 1, 2  # formats of caches.c


@dataclass(frozen=True, slots=True, eq=False)
class IndexPlan:
    """Index-key blocks that each query row may see."""

    blocks: Tensor  # [R, B] int64
    entries_per_block: int
    num_visible: Tensor  # [R] int64


class CacheOps:
    """Methods are named as in the contract."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._write_rows = library.function("write_rows")
        self._copy_rows = library.function("copy_rows")
        self._round_index = library.function("round_index")
        self._pool_pairs = library.function("pool_pairs")
        self._attend = library.function("attend")
        self._index_scores = library.function("index_scores")
        self._select_entries = library.function("select_entries")
        self._candidate_blocks = library.function("candidate_blocks")

    # ---- caches ------------------------------------------------------------------------------------------------------

    def write_window(self, cache: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Round keys [R, hd] to window records and store them in cache[rows]."""
        self._write(cache, rows, keys, _WINDOW)

    def write_entries(self, cache: Tensor, rows: Tensor, entries: Tensor) -> None:
        """Round latents [R, hd] to compressed records and store them in cache[rows]."""
        self._write(cache, rows, entries, _COMPRESSED)

    def write_index_keys(self, cache: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Round index keys [R, Di] and store them in cache[rows]."""
        self._write(cache, rows, keys, _INDEX)

    def _write(self, cache: Tensor, rows: Tensor, values: Tensor, record: int) -> None:
        rows, values = rows.contiguous(), rows_of(values)
        count, dim = values.shape
        status = self._write_rows(
            cache.data_ptr(), cache.shape[0], rows.data_ptr(), values.data_ptr(), values.stride()[0], count, dim, record
        )
        if status:
            raise failure(status, "write to a cache")

    def copy_rows(self, cache: Tensor, destination: Tensor, source: Tensor) -> None:
        """cache[destination] = cache[source]; the two row lists don't meet."""
        destination, source = destination.contiguous(), source.contiguous()
        status = self._copy_rows(
            cache.data_ptr(), cache.shape[0], destination.data_ptr(), source.data_ptr(), source.shape[0], cache.shape[1]
        )
        if status:
            raise failure(status, "copy_rows")

    def round_index(self, x: Tensor) -> Tensor:
        """Index queries [..., Di], rounded."""
        x = x.contiguous()
        out, dim = torch.empty_like(x), x.shape[-1]
        status = self._round_index(x.data_ptr(), out.data_ptr(), x.numel() // dim, dim)
        if status:
            raise failure(status, "round_index")
        return out

    def pool_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """first, second [R, 2, D] -> [R, D]."""
        first, second = first.contiguous(), second.contiguous()
        rows, _, dim = first.shape
        out = first.new_empty(rows, dim)
        status = self._pool_pairs(first.data_ptr(), second.data_ptr(), out.data_ptr(), rows, dim)
        if status:
            raise failure(status, "pool_pairs")
        return out

    # ---- attention ---------------------------------------------------------------------------------------------------

    def plan_keys(self, rows: Tensor) -> Tensor:
        """rows [R, K] of a cache, negative = invisible; the plan is the list itself."""
        return rows.contiguous()

    def attend(
        self,
        q: Tensor,
        window_cache: Tensor,
        window: Tensor,
        entry_cache: Tensor | None,
        entries: Tensor | None,
        sink: Tensor,
    ) -> Tensor:
        """q [R, H, hd], plans [R, W] and [R, E] -> [R, H, hd]."""
        q = q.contiguous()
        rows, heads, dim = q.shape
        num_entries = entry_rows = entry_address = plan_address = 0
        if entry_cache is not None and entries is not None:
            num_entries, entry_rows = entries.shape[1], entry_cache.shape[0]
            entry_address, plan_address = entry_cache.data_ptr(), entries.data_ptr()
        out = torch.empty_like(q)
        threads = self._library.threads_for(2 * rows * heads * dim * (window.shape[1] + num_entries))
        status = self._attend(
            q.data_ptr(), window_cache.data_ptr(), window_cache.shape[0], window.data_ptr(), window.shape[1],
            entry_address, entry_rows, plan_address, num_entries, sink.contiguous().data_ptr(), out.data_ptr(),
            rows, heads, dim, threads,
        )  # fmt: skip
        if status:
            raise failure(status, "attend")
        return out

    # ---- indexer -----------------------------------------------------------------------------------------------------

    def plan_index(self, blocks: Tensor, entries_per_block: int, num_visible: Tensor) -> IndexPlan:
        """blocks [R, B] block numbers, -1 = none; num_visible [R]."""
        return IndexPlan(blocks.contiguous(), entries_per_block, num_visible.contiguous())

    def index_scores(
        self,
        iq: Tensor,
        weights: Tensor,
        cache: Tensor,
        plan: IndexPlan,
        candidates: Tensor | None,
        candidate_block: int,
    ) -> Tensor:
        """iq [R, Hi, Di], weights [R, Hi] -> scores [R, B * entries_per_block]."""
        iq, weights = iq.contiguous(), weights.contiguous()
        rows, heads, dim = iq.shape
        num_blocks = plan.blocks.shape[1]
        out = iq.new_empty(rows, num_blocks * plan.entries_per_block)
        marks = None if candidates is None else candidates.contiguous()
        threads = self._library.threads_for(rows * heads * dim * out.shape[1])
        status = self._index_scores(
            iq.data_ptr(), weights.data_ptr(), cache.data_ptr(), cache.shape[0], plan.blocks.data_ptr(), num_blocks,
            plan.entries_per_block, plan.num_visible.data_ptr(), 0 if marks is None else marks.data_ptr(),
            0 if marks is None else marks.shape[1], candidate_block, out.data_ptr(), rows, heads, dim, threads,
        )  # fmt: skip
        if status:
            raise failure(status, "index_scores")
        return out

    def candidate_blocks(self, scores: Tensor, num_visible: Tensor, block: int, top_blocks: int) -> Tensor:
        """scores [R, N], num_visible [R] -> [R, ceil(N / block)] bool."""
        scores, num_visible = scores.contiguous(), num_visible.contiguous()
        rows, n = scores.shape
        out = torch.empty(rows, -(-n // block), dtype=torch.bool)
        status = self._candidate_blocks(
            scores.data_ptr(), num_visible.data_ptr(), out.data_ptr(), rows, n, block, top_blocks,
            self._library.threads_for(8 * rows * n),
        )  # fmt: skip
        if status:
            raise failure(status, "candidate_blocks")
        return out

    def select_entries(self, scores: Tensor, k: int) -> Tensor:
        """scores [R, N] -> [R, k] entry numbers, ascending, then -1."""
        scores = scores.contiguous()
        rows, n = scores.shape
        out = torch.empty(rows, k, dtype=torch.int64)
        threads = self._library.threads_for(50 * rows * n)  # a comparison of the selection counts as many multiply-adds
        status = self._select_entries(scores.data_ptr(), out.data_ptr(), rows, n, k, threads)
        if status:
            raise failure(status, "select_entries")
        return out
