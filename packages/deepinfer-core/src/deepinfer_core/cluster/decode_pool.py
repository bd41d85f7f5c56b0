"""One expert-parallel decode group: its ranks step together, so all its requests advance at one rate.

    v(t)      tokens that a request present since time 0 would have gained:   dv/dt = tokens(m) / seconds(m)
              m = requests of the fullest rank, by the table of drafts and step seconds
    finish    a request that joins at v with n tokens to go leaves at v + n

Between two arrivals or departures the rate is constant, so no step needs an event of its own: time jumps from change to
change, and steps are counted by integration. This is processor sharing; with one rank and seconds(m) ~ m it is M/M/1-PS
(a test). What is rounded off: tokens come in whole steps (at most one step a request), and all requests are taken
to have the mean acceptance. The balance of experts follows the steps since the last rearrangement.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from deepinfer_core.cluster.balance import PHASES
from deepinfer_core.cluster.drafting import DraftTable
from deepinfer_core.cluster.request import Request

__all__ = ["DecodeGroup", "DecodeTotals"]

type Tables = Callable[[float, int], DraftTable]  # mean context, phase of the interval -> table

_STALE_CONTEXT = 0.05  # a table serves contexts that differ by so much from the one it was made for


class DecodeTotals:
    """Integrals over time."""

    __slots__ = (
        "busy_s", "drafts", "phase_s", "request_s", "request_steps", "stalled_s", "steps", "tokens", "uneven_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.busy_s = 0.0  # with at least one request
        self.stalled_s = 0.0  # of it, lost to rearrangements
        self.steps = self.tokens = 0.0
        self.drafts = 0.0  # of a request, over steps
        self.request_s = self.request_steps = 0.0  # requests over time and over steps
        self.uneven_s = 0.0  # requests of the fullest rank x ranks, over time
        self.phase_s = [0.0] * PHASES


class DecodeGroup:
    """Requests join the rank with the fewest; a rank has room for `max_requests` and `kv_tokens` tokens of KV."""

    def __init__(
        self,
        num_ranks: int,
        max_requests: int,
        kv_tokens: int,
        tables: Tables,
        *,
        interval_steps: int = 0,
        move_seconds: float = 0.0,
    ) -> None:
        self.num_ranks = num_ranks
        self._tables = tables
        self._max_requests = max_requests
        self._interval_steps = interval_steps
        self._move_seconds = move_seconds
        self._count = [0] * num_ranks
        self._free_tokens = [kv_tokens] * num_ranks
        self._ranks_with = [num_ranks] + [0] * max_requests  # ranks with so many requests
        self._fullest = 0
        self._leaving: list[tuple[float, int, int, Request]] = []  # (v, number, rank, request)
        self._context_at_zero = 0.0  # sum over requests of context - v
        self._v = 0.0
        self._now_s = 0.0
        self._stall_s = 0.0  # of a rearrangement, still to pass
        self._all_steps = 0.0
        self._phase: int = 0
        self._table = tables(1.0, 0)
        self._table_context = 1.0
        self.totals = DecodeTotals()
        self.next_leave_s = math.inf

    def __len__(self) -> int:
        return len(self._leaving)

    @property
    def fullest_rank(self) -> int:
        """Requests of the fullest rank."""
        return self._fullest

    def rank_with_room(self, total_tokens: int) -> int | None:
        """The rank with the fewest requests that can take one of so many tokens."""
        fewest = self._count.index(min(self._count))
        if self._has_room(fewest, total_tokens):
            return fewest
        ranks = [rank for rank in range(len(self._count)) if self._has_room(rank, total_tokens)]
        return min(ranks, key=self._count.__getitem__, default=None)

    def join(self, request: Request, rank: int, now_s: float) -> None:
        """Start to decode `request`, whose first token is known."""
        self.advance(now_s)
        request.decoding_s = now_s
        self._free_tokens[rank] -= request.total_tokens
        self._recount(rank, 1)
        self._context_at_zero += request.prompt_tokens + 1 - self._v
        heapq.heappush(self._leaving, (self._v + request.output_tokens - 1, request.number, rank, request))
        self._refresh()

    def leave(self, now_s: float) -> Request:
        """Take out the request that ends now."""
        self.advance(now_s)
        self._v, _, rank, request = heapq.heappop(self._leaving)  # exactly where it ends: no rounding adds up
        request.finished_s = now_s
        self._free_tokens[rank] += request.total_tokens
        self._recount(rank, -1)
        self._context_at_zero -= request.total_tokens - self._v
        self._refresh()
        return request

    def advance(self, now_s: float) -> None:
        """Let the time pass until `now_s`, at the rate of the last change."""
        elapsed_s, self._now_s = now_s - self._now_s, now_s
        if not self._leaving or elapsed_s <= 0:
            return
        totals, table, fullest = self.totals, self._table, self._fullest
        stalled_s = min(self._stall_s, elapsed_s)
        self._stall_s -= stalled_s
        steps = (elapsed_s - stalled_s) / table.seconds[fullest]
        gained = steps * table.tokens[fullest]
        self._v += gained
        self._all_steps += steps
        totals.busy_s += elapsed_s
        totals.stalled_s += stalled_s
        totals.steps += steps
        totals.tokens += gained * len(self._leaving)
        totals.drafts += steps * table.drafts[fullest]
        totals.request_steps += steps * len(self._leaving)
        totals.request_s += elapsed_s * len(self._leaving)
        totals.uneven_s += elapsed_s * fullest * len(self._count)
        totals.phase_s[self._phase] += elapsed_s

    def _refresh(self) -> None:
        """After a change: the table that now holds, and when the next request leaves."""
        if not self._leaving:
            self.next_leave_s = math.inf
            self._context_at_zero = 0.0
            return
        context = max(1.0, self._context_at_zero / len(self._leaving) + self._v)
        phase = self._phase_now()
        if phase != self._phase or abs(context / self._table_context - 1) > _STALE_CONTEXT:
            if phase < self._phase:
                self._stall_s += self._move_seconds
            self._phase, self._table_context = phase, context
            self._table = self._tables(context, phase)
        rate = self._table.tokens[self._fullest] / self._table.seconds[self._fullest]
        self.next_leave_s = self._now_s + self._stall_s + max(0.0, self._leaving[0][0] - self._v) / rate

    def _phase_now(self) -> int:
        if not self._interval_steps:
            return 0
        return int(self._all_steps % self._interval_steps * PHASES / self._interval_steps)

    def _has_room(self, rank: int, total_tokens: int) -> bool:
        return self._count[rank] < self._max_requests and self._free_tokens[rank] >= total_tokens

    def _recount(self, rank: int, change: int) -> None:
        self._ranks_with[self._count[rank]] -= 1
        self._count[rank] += change
        self._ranks_with[self._count[rank]] += 1
        self._fullest = max(self._fullest, self._count[rank])
        while self._fullest and not self._ranks_with[self._fullest]:
            self._fullest -= 1
