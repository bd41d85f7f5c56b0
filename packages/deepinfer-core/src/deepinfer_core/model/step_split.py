"""The rows of a step split over the ranks of a context group: who computes which, and what crosses between them.

    encoder rows  ── at the cut ──►  decoder rows  ── before the head ──►  sampled rows, on every rank
      split by their work              split anew, or on every rank if few

A segment is split where its places are in the plan and its rows are enough (`fewest_rows`); all other rows, those of
decoding requests above all, are computed by every rank, at no exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.cache.layout import CacheLayout
from deepinfer_core.model.step_arrays import committed_rows, kept_rows
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.context import CacheShare, RowMove, RowSource
from deepinfer_core.parallel.context_split import EVERYONE, AttentionWork, RowSplit, fewest_rows, split_rows
from deepinfer_core.scheduling.plan import RowKind, StepPlan, TokenSource, Writes

__all__ = ["SplitSet", "StepSplit", "split_step"]

_NOBODY = -2  # owner of rows that a set does not have

type IntArray = NDArray[np.int64]
type BoolArray = NDArray[np.bool_]
type ToTensor = Callable[[IntArray], Tensor]  # numbers of rows -> on the device


@dataclass(frozen=True, eq=False)
class SplitSet:
    """The rows of a half of the model, their owners, and which of their window keys others read."""

    group: Communicator
    split: RowSplit
    window: BoolArray  # [n] before a piece of another rank, or among the last of a segment
    tail: BoolArray  # [n] among the last of a segment: those that go into rings

    @property
    def mine(self) -> IntArray:
        """[m] numbers of this rank's rows."""
        return self.split.mine

    def share(self, needed: BoolArray, cache_rows: ToTensor) -> CacheShare:
        """needed [n]: rows that other ranks read; cache_rows: numbers of rows -> rows of the caches."""
        handover = self.split.handed_over(needed)
        source = RowSource(self.group, cache_rows(handover.sent), handover.counts)
        return CacheShare(source, cache_rows(handover.rows))

    def move(self, owner: IntArray, wanted: IntArray, padded: int, to_tensor: ToTensor) -> RowMove:
        """The rows `wanted`, out of `padded` with padding, on this rank; owner [n]: who wants each."""
        handover = self.split.handed_over((owner != _NOBODY) & (owner != self.split.owner))
        place = np.full(len(owner), _NOBODY, np.int64)  # among this rank's rows, then the gathered ones
        place[handover.rows] = padded + np.arange(len(handover.rows))
        place[self.mine] = np.arange(len(self.mine))
        if not len(handover.rows):
            return RowMove(to_tensor(place[wanted]))
        return RowMove(
            to_tensor(place[wanted]), RowSource(self.group, to_tensor(place[handover.sent]), handover.counts)
        )


@dataclass(frozen=True, eq=False)
class StepSplit:
    """Splits of the R rows of a step and of the K kept ones, those of the decoder half."""

    encoder: SplitSet
    decoder: SplitSet | None  # None: every rank computes all kept rows
    kept: IntArray  # [K] rows of the plan
    sampled: IntArray  # [N] numbers among the kept ones
    pair_tail: BoolArray  # [R] whose compressor pair may still be open
    entries: dict[int, BoolArray]  # ratio -> [R] that complete an entry

    def places(self, elsewhere: int) -> IntArray:
        """[R] which of this rank's rows each row of the step is, `elsewhere` for those of others."""
        found = np.full(len(self.encoder.split.owner), elsewhere)
        found[self.encoder.mine] = np.arange(len(self.encoder.mine))
        return found

    def to_decoder(self, padded: int, length: int, to_tensor: ToTensor) -> RowMove:
        """Of this rank's `padded` encoder rows, its `length` decoder rows; both count padding."""
        owner = np.full(len(self.encoder.split.owner), _NOBODY, np.int64)
        owner[self.kept] = EVERYONE if self.decoder is None else self.decoder.split.owner
        wanted = self.kept if self.decoder is None else self.kept[self.decoder.mine]
        padding = np.full(length - len(wanted), wanted[0])
        return self.encoder.move(owner, np.concatenate([wanted, padding]), padded, to_tensor)

    def to_samples(self, padded: int, to_tensor: ToTensor) -> RowMove:
        """Of this rank's `padded` decoder rows, the sampled ones of all ranks."""
        if self.decoder is None:
            return RowMove(to_tensor(self.sampled))
        owner = np.full(len(self.decoder.split.owner), _NOBODY, np.int64)
        owner[self.sampled] = EVERYONE
        return self.decoder.move(owner, self.sampled, padded, to_tensor)


def split_step(
    plan: StepPlan, layout: CacheLayout, group: Communicator | None, *, mask_decoder: bool = False
) -> StepSplit | None:
    """The split of a step over `group`; None where every rank computes every row."""
    if group is None or group.size == 1:
        return None
    config, every_row = layout.config, np.arange(plan.num_rows)
    kept = kept_rows(plan, layout, mask_decoder=mask_decoder)
    all_kept = len(kept) == plan.num_rows
    cut, last = config.decoder_start, config.num_hidden_layers
    encoder = _split_set(every_row, plan, AttentionWork(config, range(last if all_kept else cut)), layout, group)
    if encoder is None:
        return None
    decoder = encoder if all_kept else _split_set(kept, plan, AttentionWork(config, range(cut, last)), layout, group)
    writes = (plan.row_writes & Writes.GLOBAL) != 0
    ratios = {config.compress_ratios[layer] for layer in config.kv_source_layer_ids}
    return StepSplit(
        encoder=encoder,
        decoder=decoder,
        kept=kept,
        sampled=np.flatnonzero(plan.row_sample[kept]),
        pair_tail=_marks(committed_rows(plan, every_row, layout.pairs.capacity), plan.num_rows),
        entries={ratio: writes & ((plan.row_position + 1) % ratio == 0) for ratio in ratios},
    )


def _split_set(
    rows: IntArray, plan: StepPlan, work: AttentionWork, layout: CacheLayout, group: Communicator
) -> SplitSet | None:
    """rows [n] of the plan; None if no segment has enough of them."""
    step_segment = np.repeat(np.arange(plan.num_segments), np.diff(plan.segment_start))
    # Where a held row stands is known to the device alone; dummy rows only keep other ranks company.
    is_open = (plan.row_source == TokenSource.HELD) | (plan.row_kind == RowKind.DUMMY)
    has_open = np.bincount(step_segment[is_open], minlength=plan.num_segments) > 0
    segment = step_segment[rows]
    counts = np.bincount(segment, minlength=plan.num_segments)
    may_split = ~has_open & (counts >= fewest_rows(work.config, group.size))
    if not may_split.any():
        return None
    owner = split_rows(plan.row_position[rows], segment, may_split[segment], work, size=group.size)
    split = RowSplit(owner, segment, group.rank, group.size)
    tail = _marks(committed_rows(plan, rows, layout.window.capacity), len(rows))
    return SplitSet(group, split, split.halos(layout.config.sliding_window) | tail, tail)


def _marks(numbers: IntArray, length: int) -> BoolArray:
    marks = np.zeros(length, np.bool_)
    marks[numbers] = True
    return marks
