"""Context parallelism: rows of long prompts are computed by one rank each, what other rows read of them by all.

    every rank   plan of all rows, caches of all positions           its own rows through the layers
    exchanged    window keys before a piece, and the last of a segment                   every layer
                 compressed entries, index keys, open pairs                              every KV source
                 rows that cross from one split to another: at the cut, to the head      once

What is exchanged are cache records as they are stored, so that a row reads the same bits as in one process. `RowMove`
and `CacheShare` are worked out once a step (`model.step_split`); steps in which nothing is split have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.parallel.communicator import Communicator

__all__ = ["CacheShare", "RowMove", "RowSource"]


@dataclass(frozen=True, eq=False)
class RowSource:
    """Rows that each rank hands over, in the order of the ranks."""

    group: Communicator
    send: Tensor  # [counts[rank]] rows of this rank
    counts: tuple[int, ...]

    def gather(self, rows: Tensor, label: str) -> Tensor:
        """rows [n, ...] of this rank -> [sum(counts), ...] of all ranks."""
        return self.group.all_gather_rows(rows.index_select(0, self.send), self.counts, label)


@dataclass(frozen=True, eq=False)
class RowMove:
    """Rows of one set as rows of another. `take` counts on from this rank's rows to the gathered ones."""

    take: Tensor  # [n]
    source: RowSource | None = None  # None: this rank has them all, and so have the others

    def of(self, rows: Tensor, label: str) -> Tensor:
        """rows [P, ...] of this rank -> [n, ...]."""
        if self.source is not None:
            rows = torch.cat([rows, self.source.gather(rows, label)])
        return rows.index_select(0, self.take)


@dataclass(frozen=True, eq=False)
class CacheShare:
    """Cache rows that one rank has written and others read."""

    source: RowSource
    place: Tensor  # [sum(counts)] cache rows of all ranks, in the order of the ranks

    def run(self, caches: Sequence[Tensor], label: str) -> None:
        """caches [C, record], with equal row numbers: afterwards the shared rows are the same on all ranks."""
        if not len(self.place):
            return
        records = [cache.index_select(0, self.source.send).view(torch.uint8) for cache in caches]
        widths = [record.shape[1] for record in records]
        counts, group = self.source.counts, self.source.group
        gathered = group.all_gather_rows(torch.cat(records, 1), counts, label)
        for cache, record in zip(caches, gathered.split(widths, 1), strict=True):
            cache.index_copy_(0, self.place, record.contiguous().view(cache.dtype))
