"""Which rank computes which rows of a long prompt: nested head and tail pieces, equal in rows and in attention work.

    rows of a segment    | head 0 | head 1 | head 2 |tail 2| tail 1 | tail 0 |        3 ranks, 6 pieces
    work of a row        . . . . : : : : | | | | | | | | | | | | | | | | | | |        never falls with the position

A causal row costs more the further back it can look, so a rank that takes a cheap head piece also takes the expensive
tail piece. Fixed pieces of equal length (zig-zag) balance work that grows linearly. Here it does not: windows and
selections are full after a few rows, so the length of the head is solved for. With r ranks left, N rows and work C
between the pieces that are already given away, the next rank gets N / r rows and takes as its head the a rows for which

    work(first a rows) + work(last N / r - a rows) = C / r

The left side falls from above to below the right one as a grows from 0 to N / r, because work never falls with the
position: a solution exists, up to one pair of rows. Pieces meet at even positions, so that no pair of a ratio-2
compressor is cut. Only numpy; every rank computes the same from the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_core.config.model import ModelConfig

__all__ = ["EVERYONE", "AttentionWork", "Handover", "RowSplit", "fewest_rows", "split_rows"]

EVERYONE = -1  # owner of rows that all ranks compute: those of segments too short to be worth an exchange

_PAIR = 2  # positions of the longest compressor group

type IntArray = NDArray[np.int64]
type BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class AttentionWork:
    """Multiply-adds of attention and indexer of one row, summed over `layers`.

    attention   2 H hd (min(t + 1, W) + min(visible, top k))    q k and p v over the window and the selected entries
    indexer     Hi Di visible                                   or the entries of the candidate blocks, if fewer
    visible     floor((t + 1) / ratio)
    """

    config: ModelConfig
    layers: range

    def at(self, position: IntArray) -> IntArray:
        """position [n] -> [n]; never falls as the position grows."""
        c = self.config
        seen = position.astype(np.int64) + 1
        keys = np.minimum(seen, c.sliding_window) * len(self.layers)
        for ratio, count in Counter(c.compress_ratios[layer] for layer in self.layers).items():
            if ratio:
                keys += np.minimum(seen // ratio, c.index_topk) * count
        scored = np.zeros_like(seen)
        for layer in set(self.layers) & set(c.index_source_layer_ids):
            visible = seen // c.compress_ratios[layer]
            most = c.candidate_topk_blocks * c.candidate_block_size
            scored += np.minimum(visible, most) if c.uses_candidates(layer) else visible
        return 2 * c.num_attention_heads * c.head_dim * keys + c.index_n_heads * c.index_head_dim * scored


@dataclass(frozen=True, eq=False)
class Handover:
    """Rows of a set that all ranks get from their owners."""

    rows: IntArray  # [h] those of rank 0 first
    counts: tuple[int, ...]  # of each rank
    sent: IntArray  # [counts[rank]] those of this rank


@dataclass(frozen=True, eq=False)
class RowSplit:
    """Owners of the rows of a set, seen by one of the ranks."""

    owner: IntArray  # [n] rank, or EVERYONE
    segment: IntArray  # [n] ascending
    rank: int
    size: int

    @property
    def mine(self) -> IntArray:
        """[m] numbers of the rows that this rank computes, ascending."""
        return np.flatnonzero((self.owner == self.rank) | (self.owner == EVERYONE))

    def handed_over(self, needed: BoolArray) -> Handover:
        """needed [n]: rows that a rank wants which does not compute them."""
        rows = np.flatnonzero(needed & (self.owner != EVERYONE))
        owners = self.owner[rows]
        rows = rows[np.argsort(owners, kind="stable")]
        counts = tuple(np.bincount(owners, minlength=self.size).tolist())
        start = sum(counts[: self.rank])
        return Handover(rows, counts, rows[start : start + counts[self.rank]])

    def halos(self, window: int) -> BoolArray:
        """[n] rows whose window keys a row of another rank sees: the W - 1 before each piece."""
        needed = np.zeros(len(self.owner), np.bool_)
        changes = (np.diff(self.owner) != 0) | (np.diff(self.segment) != 0)
        for begin in (1 + np.flatnonzero(changes)).tolist():  # of each piece but the first
            lowest = max(begin - window + 1, int(np.searchsorted(self.segment, self.segment[begin])))
            needed[lowest:begin] |= self.owner[lowest:begin] != self.owner[begin]
        return needed


def fewest_rows(config: ModelConfig, size: int) -> int:
    """Rows from which on a segment is split: a window for each rank, so that the rows that it saves are more than the
    window keys that it must exchange.
    """
    return size * max(config.sliding_window, 2 * _PAIR)


def split_rows(
    position: IntArray, segment: IntArray, may_split: BoolArray, work: AttentionWork, *, size: int
) -> IntArray:
    """Owner [n] of each row: position [n] ascends within a segment, segment [n] is its number, may_split [n] whether
    the rows' places are known to all ranks and the segment is long enough.

    The shells of segment i go to the ranks i, i + 1, .., so that no rank gets all the odd rows.
    """
    owner = np.full(len(position), EVERYONE, np.int64)
    numbers = np.flatnonzero(may_split)
    begins = numbers[np.flatnonzero(np.diff(segment[numbers], prepend=-1))]
    for i, begin in enumerate(begins.tolist()):
        end = int(np.searchsorted(segment, segment[begin], side="right"))
        ranks = [(i + shell) % size for shell in range(size)]
        owner[begin:end] = _nested(position[begin:end], work.at(position[begin:end]), ranks)
    return owner


def _nested(position: IntArray, work: IntArray, ranks: Sequence[int]) -> IntArray:
    """Owner [n] of the rows of one segment; the outermost pieces go to the first of `ranks`."""
    starts = np.flatnonzero((position % _PAIR == 0) | (np.arange(len(position)) == 0))
    edge = np.append(starts, len(position))  # [u + 1] where pieces may meet
    total = np.concatenate(([0], np.cumsum(work)))[edge]  # work before each edge
    owner = np.empty(len(position), np.int64)
    low, high = 0, len(starts)
    for shell, rank in enumerate(ranks):
        left = len(ranks) - shell
        take = round((high - low) / left)
        head = np.arange(take + 1)
        piece = (total[low + head] - total[low]) + (total[high] - total[high - take + head])
        first = int(np.argmin(np.abs(piece * left - (total[high] - total[low]))))
        owner[edge[low] : edge[low + first]] = rank
        owner[edge[high - take + first] : edge[high]] = rank
        low, high = low + first, high - take + first
    return owner
