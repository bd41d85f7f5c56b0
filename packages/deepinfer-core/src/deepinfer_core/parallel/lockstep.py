"""Ranks that share experts step together: what they say to each other before a step, and after it.

    rank 0   | notice: 12 rows | Engram | layer 0 .. | draft stages |        | verdict | next step
    rank 1   | notice:  3 rows | Engram | layer 0 .. | (serves)     | sample | verdict |
    rank 2   | notice: no rows | (serves the rows of the others, layer by layer)       |         a dummy step
             all_gather, 72 bytes                                               all_gather, 1 byte

Which collectives a step has, how many rows it is padded to and up to how many rows drafts are free in the next one
follow from all notices, so from the same numbers on every rank, and never from what one rank alone knows. A rank whose
step fails plays its part to the end without rows of its own; then the step counts on no rank, and all compute their
requests again.

When nobody has work the ranks pause, all at the same step. A pause holds only if all of them have seen the same
commands: the front end numbers its commands across all ranks (`epoch`), so a rank that has not yet read that somebody
else got a request keeps everybody going until it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from deepinfer_core.errors import ParallelError, PeerError
from deepinfer_core.parallel.communicator import Communicator

__all__ = ["Agreement", "Lockstep", "Notice"]


class Notice(NamedTuple):
    """What a rank says of the step that it is about to run. All zero but the epoch: a dummy step."""

    num_rows: int = 0
    fixed_rows: int = 0  # those of them that are no drafts
    runs_decoder: bool = False  # rows go through the decoder half of the layers
    drafts: bool = False  # something will be proposed
    has_work: bool = False  # requests are open, whether or not they have rows in this step
    is_closing: bool = False  # it was told to end when it has no work
    epoch: int = 0  # of the newest command that it has seen
    num_staged: int = 0  # layers whose moved experts it has received, since the start

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Notice:
        """As integers they travel."""
        num_rows, fixed_rows, runs_decoder, drafts, has_work, is_closing, epoch, num_staged = numbers
        flags = bool(runs_decoder), bool(drafts), bool(has_work), bool(is_closing)
        return cls(num_rows, fixed_rows, *flags, epoch, num_staged)


class Agreement(NamedTuple):
    """The same on all ranks."""

    step: int
    most_rows: int  # of any rank: what all pad to
    most_fixed_rows: int  # of any rank, drafts apart: up to so many, rows cost no rank any time
    runs_decoder: bool  # of some rank
    drafts: bool
    pauses: bool  # nobody has work, and nobody has seen a command that another has not
    closes: bool  # it is the end
    num_staged: int  # the smallest of any rank: what all swap in before this step


class Lockstep:
    """Steps of the ranks of `comm`. `begin_step` is told the number of each step, for the errors of its collectives."""

    def __init__(self, comm: Communicator, begin_step: Callable[[int], None] = lambda _: None) -> None:
        self.comm = comm
        self.num_steps = 0
        self._begin_step = begin_step

    def agree(self, notice: Notice) -> Agreement:
        """Before a step. Raises ParallelError where the ranks are not at the same one."""
        step = self.num_steps
        self.num_steps += 1
        self._begin_step(step)
        own = torch.tensor([step, *map(int, notice)], dtype=torch.int64, device=self.comm.device)
        rows: list[list[int]] = self.comm.all_gather(own, "notice of a step").tolist()
        behind = [f"rank {rank} at {row[0]}" for rank, row in zip(self.comm.ranks, rows, strict=True) if row[0] != step]
        if behind:
            raise ParallelError(
                f"rank {self.comm.ranks[self.comm.rank]} is at step {step}, {', '.join(behind)}: the ranks have lost "
                "each other, start the engine again"
            )
        notices = [Notice.read(row[1:]) for row in rows]
        idle = not any(one.has_work or one.num_rows for one in notices) and len({one.epoch for one in notices}) == 1
        return Agreement(
            step=step,
            most_rows=max(one.num_rows for one in notices),
            most_fixed_rows=max(one.fixed_rows for one in notices),
            runs_decoder=any(one.runs_decoder for one in notices),
            drafts=any(one.drafts for one in notices),
            pauses=idle,
            closes=idle and all(one.is_closing for one in notices),
            num_staged=min(one.num_staged for one in notices),
        )

    def conclude(self, has_failed: bool) -> None:
        """After a step: raises PeerError if it failed on another rank, so that it must not count here either."""
        own = torch.tensor([has_failed], dtype=torch.uint8, device=self.comm.device)
        failed = self.comm.all_gather(own, "verdict of a step")[:, 0].tolist()
        others = [self.comm.ranks[member] for member, bad in enumerate(failed) if bad and member != self.comm.rank]
        if others and not has_failed:
            raise PeerError(
                f"step {self.num_steps - 1} failed on rank {', '.join(map(str, others))}, so it counts nowhere"
            )
