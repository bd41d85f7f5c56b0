"""Where a position of a request lives in the caches. Arithmetic only; the tensors are in `state`.

    window cache of a layer   | slot 0 ring | slot 1 ring | ... | trash | scratch: a row for each row of the step |
    entry cache of a source   | block 0 | block 1 | ... | block N - 1 | trash block |         block = 128 positions

A ring holds the last `ring_slots` positions of a slot at `slot * ring_slots + position % ring_slots`; it is longer
than the window by what rejected drafts can throw a request back, so a rejected position never displaces one that is
still needed. Within a step new keys stand in the scratch rows, so a chunk may be longer than the ring; after the
attention its last rows are copied into the ring. Open compressor pairs and token history are rings of the same kind.
Rows that must not be stored go to the trash row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.errors import CapacityError

__all__ = ["CacheLayout", "RingLayout"]


@dataclass(frozen=True)
class RingLayout:
    """One ring a slot, a trash row, and the scratch rows of a step."""

    num_slots: int
    capacity: int  # positions that a ring holds
    scratch_rows: int

    @property
    def trash_row(self) -> int:
        """A row that is written and never read."""
        return self.num_slots * self.capacity

    @property
    def scratch_start(self) -> int:
        """Cache row of the first row of the running step."""
        return self.trash_row + 1

    @property
    def num_rows(self) -> int:
        """Rows of the whole cache tensor."""
        return self.scratch_start + self.scratch_rows


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of all state of one process.

    `max_step_rows`: rows of the largest step. `backtrack`: positions that rejected drafts can take back (in-flight
    steps times drafts plus one). `form`: plain rounded values, or packed records.
    """

    config: ModelConfig
    num_slots: int
    num_blocks: int
    max_step_rows: int
    backtrack: int
    form: Literal["plain", "packed"] = "plain"

    def __post_init__(self) -> None:
        for name in ("num_slots", "num_blocks", "max_step_rows", "backtrack"):
            if getattr(self, name) < 1:
                raise CapacityError(f"{name} is {getattr(self, name)}; the cache needs at least 1")

    @property
    def window(self) -> RingLayout:
        """Window keys of a backbone layer."""
        return RingLayout(self.num_slots, self.config.sliding_window + self.backtrack, _up_to_8(self.max_step_rows))

    @property
    def draft_window(self) -> RingLayout:
        """Context keys of a draft stage; scratch holds the block keys of every slot, or the features of a step."""
        rows = max(self.max_step_rows, self.num_slots * max(1, self.config.dspark_block_size))
        return RingLayout(self.num_slots, self.config.sliding_window + self.backtrack, _up_to_8(rows))

    @property
    def pairs(self) -> RingLayout:
        """Projections of the positions whose compressor pair may still be open."""
        return RingLayout(self.num_slots, self.backtrack + 2, _up_to_8(self.max_step_rows))

    @property
    def history(self) -> RingLayout:
        """Token classes that the next n-grams look back to."""
        return RingLayout(
            self.num_slots, self.backtrack + self.config.engram_max_ngram_size, _up_to_8(self.max_step_rows)
        )

    def entries_per_block(self, ratio: int) -> int:
        """Compressed entries of one block of 128 positions."""
        return BLOCK_TOKENS // ratio

    def entry_rows(self, ratio: int) -> int:
        """Rows of an entry cache, the trash block included."""
        return (self.num_blocks + 1) * self.entries_per_block(ratio)

    def entry_trash_row(self, ratio: int) -> int:
        """First row of the trash block."""
        return self.num_blocks * self.entries_per_block(ratio)


def _up_to_8(rows: int) -> int:
    return -(-rows // 8) * 8
