"""Which rank takes a request: the one that is least loaded with it, where load is what would be short first.

    slots     open requests / slots of a rank
    cache     tokens of open requests, with the prompts of those that wait / tokens that its cache holds
    prefill   prompt tokens that are not computed / rows of a step

All ranks step together, so a step takes as long as the fullest rank needs, and of a rank as long as the scarcest of
these: the load is the largest of them, not their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RankCapacity", "RankLoad", "choose_rank"]


@dataclass(frozen=True, slots=True)
class RankCapacity:
    """Of every rank, each at least 1."""

    slots: int
    cache_tokens: int
    step_rows: int


@dataclass(slots=True)
class RankLoad:
    """What one rank has to do."""

    requests: int = 0
    context_tokens: int = 0  # prompts and answers so far
    prefill_tokens: int = 0  # of prompts that have given no token yet

    def share(self, capacity: RankCapacity, prompt_tokens: int = 0) -> float:
        """The scarcest of slots, cache and rows, with one more request of so many tokens; 1 = exactly full."""
        more = 1 if prompt_tokens else 0
        return max(
            (self.requests + more) / capacity.slots,
            (self.context_tokens + prompt_tokens) / capacity.cache_tokens,
            (self.prefill_tokens + prompt_tokens) / capacity.step_rows,
        )


def choose_rank(loads: Sequence[RankLoad], capacity: RankCapacity, prompt_tokens: int) -> int:
    """The rank with the smallest share once it has the request; of equals the one with fewer requests, or the first."""
    return min(range(len(loads)), key=lambda rank: (loads[rank].share(capacity, prompt_tokens), loads[rank].requests))
