"""The cluster as a discrete-event simulation.

    arrivals ─► store ─► queue ─► prefill groups ─► KV transfer ─► queue ─► decode groups ─► thinking ─► next turn
                 ▲                                                              │
                 └──────────────── prompt and answer are kept ◄─────────────────┘

One heap of (time, number, what to do). Prefill steps are events; decode steps are not (`decode_pool`), so a run costs
a few events a request whatever the length of its answer. One in `scale_down` devices and requests is simulated: step
costs stay those of the whole groups, queues are those of fewer servers, hence a little longer than in the cluster.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from deepinfer_core.cluster.decode_pool import DecodeGroup
from deepinfer_core.cluster.plan_file import ClusterPlan
from deepinfer_core.cluster.prefill_pool import PrefillGroup
from deepinfer_core.cluster.prefix_store import PrefixStore
from deepinfer_core.cluster.records import Place, Records
from deepinfer_core.cluster.request import Request
from deepinfer_core.cluster.traffic import Session, arriving_sessions, running_sessions

__all__ = ["ClusterSimulation"]

_DAY_S = 86_400.0


class ClusterSimulation:
    """A run. `records`, `decode` and `store` hold what is reported; `now_s` is the time of the simulation."""

    def __init__(
        self,
        plan: ClusterPlan,
        prefill: list[PrefillGroup],
        decode: list[DecodeGroup],
        store: PrefixStore,
        *,
        max_tokens: int,
        kv_bytes_per_token: float,
    ) -> None:
        """max_tokens: prompt and answer of the longest request; a session that comes to it ends."""
        self._plan = plan
        self._prefill = prefill
        self.decode = decode
        self.store = store
        self._max_tokens = max_tokens
        self._kv_bytes = kv_bytes_per_token
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = itertools.count()
        self._waiting: deque[Request] = deque()
        self._handed_over: deque[Request] = deque()
        self._arrivals: list[Iterator[tuple[float, Session]]] = []
        self.now_s = 0.0
        self.records = Records(plan.cluster.warmup_seconds)

    def run(self) -> None:
        """Simulate the warm-up and the seconds of the plan; to be called once."""
        c = self._plan.cluster
        self._start_traffic(c.load / c.scale_down)
        self._at(c.warmup_seconds, self._end_warmup, None)
        end_s = c.warmup_seconds + c.seconds
        while True:
            group = min(self.decode, key=lambda g: g.next_leave_s)
            event_s = self._events[0][0] if self._events else math.inf
            next_s = min(event_s, group.next_leave_s)
            if next_s > end_s:
                break
            self.now_s = next_s
            if group.next_leave_s <= event_s:
                self._leave(group)
            else:
                _, _, handle, subject = heapq.heappop(self._events)
                handle(subject)
        self.now_s = end_s
        for group in self.decode:
            group.advance(end_s)
        self.records.close(end_s)

    # ---- traffic -----------------------------------------------------------------------------------------------------

    def _start_traffic(self, load: float) -> None:
        for kind, traffic in enumerate(self._plan.traffic):
            for time_s, session in running_sessions(kind, traffic, load, self._plan.cluster.seed):
                if session.next_turn:
                    self._keep(session)
                self._at(time_s, self._ask, session)
            self._arrivals.append(arriving_sessions(kind, traffic, load, self._plan.cluster.seed))
            self._next_arrival(kind)
        if self._plan.trace is not None:
            c = self._plan.cluster
            for time_s, session in self._plan.trace.sessions(len(self._plan.traffic), c.load, c.scale_down):
                self._at(time_s, self._ask, session)

    def _next_arrival(self, kind: int) -> None:
        arrival = next(self._arrivals[kind], None)
        if arrival is not None:
            self._at(arrival[0], self._arrive, arrival[1])

    def _arrive(self, session: Session) -> None:
        self._next_arrival(session.kind)
        self._ask(session)

    def _ask(self, session: Session) -> None:
        """The next turn of a session becomes a request."""
        turn = session.turns[session.next_turn]
        prompt = session.context_tokens + turn.new_tokens
        if prompt + turn.output_tokens > self._max_tokens:
            self.records.too_long += 1
            return
        hit = self.store.hit_tokens((session.kind, session.number), prompt, self.now_s)
        if not hit:
            shared = min(prompt, session.traffic.shared_tokens + 1)
            hit = self.store.hit_tokens(session.kind, shared, self.now_s)
        request = Request(next(self._numbers), session, prompt, turn.output_tokens, hit, self.now_s)
        request.rows = request.rows_left = prompt - hit + min(hit, self._plan.prefill.replay_tokens)
        self.records.arrive(request)
        self._at(self.now_s + self._store_seconds(hit), self._ready, request)

    def _store_seconds(self, hit_tokens: int) -> float:
        store = self._plan.store
        return store.latency_s + hit_tokens * self._kv_bytes / (store.gigabytes_per_s * 1e9)

    def _keep(self, session: Session) -> None:
        traffic = session.traffic
        retention_s = traffic.retention_days * _DAY_S
        self.store.put(session.kind, traffic.shared_tokens, self.now_s, retention_s)
        self.store.put(
            (session.kind, session.number), session.context_tokens, self.now_s, retention_s, traffic.shared_tokens
        )

    # ---- prefill -----------------------------------------------------------------------------------------------------

    def _ready(self, request: Request) -> None:
        request.ready_s = self.now_s
        self._waiting.append(request)
        self.records.move("store", "prefill queue", self.now_s)
        for group in self._prefill:
            if not group.is_busy:
                self._step(group)
                break

    def _step(self, group: PrefillGroup) -> None:
        waiting = len(self._waiting)
        step = group.next_step(self._waiting, self.now_s)
        group.is_busy = step is not None
        if step is not None:
            self.records.move("prefill queue", "prefill", self.now_s, waiting - len(self._waiting))
            self.records.prefill_step(step, self.now_s)
            self._at(self.now_s + step.seconds, self._step_done, (group, step.finished))

    def _step_done(self, done: tuple[PrefillGroup, list[Request]]) -> None:
        group, finished = done
        for request in finished:
            request.first_token_s = self.now_s
            if request.output_tokens == 1:
                request.finished_s = self.now_s
                self._finish(request, "prefill")
                continue
            rate = self._plan.transfer.gigabytes_per_s * 1e9 * self._plan.prefill.expert_parallel
            begin_s = max(self.now_s, group.adapter_free_s)
            group.adapter_free_s = begin_s + request.prompt_tokens * self._kv_bytes / rate
            self.records.move("prefill", "transfer", self.now_s)
            self._at(group.adapter_free_s + self._plan.transfer.latency_s, self._hand_over, request)
        self._step(group)

    # ---- decode ------------------------------------------------------------------------------------------------------

    def _hand_over(self, request: Request) -> None:
        request.handed_over_s = self.now_s
        self._handed_over.append(request)
        self.records.move("transfer", "decode queue", self.now_s)
        self._admit()

    def _admit(self) -> None:
        """Start what waits, first come first served, in the group whose fullest rank has the fewest requests."""
        while self._handed_over:
            request = self._handed_over[0]
            for group in sorted(self.decode, key=lambda g: g.fullest_rank):
                rank = group.rank_with_room(request.total_tokens)
                if rank is not None:
                    group.join(self._handed_over.popleft(), rank, self.now_s)
                    self.records.move("decode queue", "decode", self.now_s)
                    break
            else:
                return

    def _leave(self, group: DecodeGroup) -> None:
        self._finish(group.leave(self.now_s), "decode")
        self._admit()

    def _finish(self, request: Request, place: Place) -> None:
        self.records.finish(request, place)
        session = request.session
        session.context_tokens = request.total_tokens
        session.next_turn += 1
        self._keep(session)
        if session.next_turn < len(session.turns):
            turn = session.turns[session.next_turn]
            self._at(max(self.now_s + turn.think_s, turn.not_before_s), self._ask, session)

    # ---- events ------------------------------------------------------------------------------------------------------

    def _at(self, time_s: float, handle: Callable[[Any], None], subject: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), handle, subject))

    def _end_warmup(self, _: None) -> None:
        for group in self.decode:
            group.advance(self.now_s)
            group.totals = type(group.totals)()
        self.records.end_warmup(self.now_s)
