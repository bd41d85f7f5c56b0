"""`Lifecycle`: requests come, get a slot, lose it, and end. Slots, blocks and the queue change together, here only.

                    admit                          finish (stop, length, abort, error)
    queue  ---------------------->  slot + blocks  ------------------------------------>  Finished
           <----------------------
                   preempt

A request that lost its slot keeps its tokens; it is computed again when its turn comes, from the same decoder cut.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.scheduling.admission import OutputForecast, peak_tokens
from deepinfer_core.scheduling.ledger import BlockLedger
from deepinfer_core.scheduling.plan import Admission, Release
from deepinfer_core.scheduling.prefix_index import Hit
from deepinfer_core.scheduling.quarantine import Quarantine
from deepinfer_core.scheduling.replay import HitOutcome, Reuse
from deepinfer_core.scheduling.request import Finished, FinishReason, Request, RequestStatus
from deepinfer_core.scheduling.slots import SlotTable
from deepinfer_core.scheduling.stats import SchedulerStats
from deepinfer_core.scheduling.waiting import WaitingQueue

__all__ = ["Lifecycle"]

_MEAN_SLACK_TOKENS = BLOCK_TOKENS // 2  # unused rest of a request's last block


class Lifecycle:
    """Live requests and where they are. `clock` gives seconds."""

    def __init__(
        self, table: SlotTable, ledger: BlockLedger, max_waiting: int, eos_token_id: int, clock: Callable[[], float]
    ) -> None:
        self.table = table
        self.ledger = ledger
        self.queue = WaitingQueue(max_waiting)
        self.quarantine = Quarantine()
        self.stats = SchedulerStats()
        self.clock = clock
        self.requests: dict[int, Request] = {}
        self.releases: list[Release] = []  # for the next plan
        self.finished: list[Finished] = []  # for the next outputs
        self._forecast = OutputForecast()
        self._eos_token_id = eos_token_id
        self._short_at_blocks = -1  # blocks that were available when the head of the queue did not fit
        self._worst_case_tokens = 0  # if every running request went on to its limit

    # ---- in ---------------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """A request waits for a slot."""
        self.queue.push(request)
        self._short_at_blocks = -1  # it may be the new head, and smaller

    def admit_next(self) -> Admission | None:
        """Give the most urgent waiting request a slot and blocks. None: nobody waits, or there is no room for the head.

        Nobody passes a head that does not fit, so a long prompt gets its turn.
        """
        while self.table.num_free and not self._is_short_of_memory():
            request = self.queue.head()
            if request is None:
                return None
            found = self.ledger.find(request)
            if self.ledger.missing_blocks(request, *found) > 0 or not self._has_room_to_grow(request):
                self._short_at_blocks = self.ledger.pool.num_available
                return None
            self.queue.pop()
            admission = self._admit(request, *found)
            if admission is not None:
                return admission
        return None

    def admit_suspect(self, request: Request) -> Admission | None:
        """Give a suspect a slot and blocks, taking them from others if need be. None: it failed at that."""
        found = self.ledger.find(request)
        while self.table.num_running and (self.table.num_free == 0 or self.ledger.missing_blocks(request, *found) > 0):
            self.preempt(self.table.least_urgent())
        self.quarantine.isolate(request)
        return self._admit(request, *found)

    def may_admit(self) -> bool:
        """Whether somebody waits who could come in, as far as is known without looking closer."""
        return bool(self.table.num_free and len(self.queue) and not self._is_short_of_memory())

    def _is_short_of_memory(self) -> bool:
        """The head of the queue did not fit, and nothing has been freed since (by a request, or by a pin)."""
        return self.ledger.pool.num_available <= self._short_at_blocks

    def _has_room_to_grow(self, request: Request) -> bool:
        """Whether the running requests and this one will probably never need more memory than there is."""
        table = self.table
        num_requests = table.num_running + 1
        room = self.ledger.pool.num_blocks * BLOCK_TOKENS - num_requests * _MEAN_SLACK_TOKENS
        if num_requests == 1 or self._worst_case_tokens + request.limit <= room:
            return True
        slots = table.running()
        length = table.length[slots]
        remaining = self._forecast.remaining(table.expected_end[slots], length, table.limit[slots])
        own_remaining = max(1, self._expected_end(request) - request.num_tokens)
        return peak_tokens(np.append(length, request.num_tokens), np.append(remaining, own_remaining)) <= room

    def _expected_end(self, request: Request) -> int:
        most = request.limit - request.prompt_tokens
        return request.prompt_tokens + self._forecast.output_tokens(most, open_end=request.params.max_tokens is None)

    def _admit(self, request: Request, hit: Hit, reuse: Reuse) -> Admission | None:
        table, now = self.table, self.clock()
        slot = table.occupy(request, self._eos_token_id)
        self._worst_case_tokens += request.limit
        try:
            self.ledger.admit(slot, request, hit, reuse)
        except Exception as error:
            self.finish(slot, FinishReason.ERROR, error=f"no cache blocks could be allocated: {error}")
            return None
        table.expected_end[slot] = self._expected_end(request)
        table.shared_tokens[slot] = reuse.shared_tokens
        table.next_position[slot] = reuse.first_position
        table.window_from[slot] = reuse.window_from
        request.first_scheduled_s = request.first_scheduled_s or now
        if request.hit_tokens is None:
            request.hit_tokens = reuse.shared_tokens
        self.stats.lookups[reuse.outcome] += 1
        if reuse.outcome is HitOutcome.HIT:
            self.stats.hit_tokens += reuse.shared_tokens
            self.stats.replayed_tokens += reuse.shared_tokens - reuse.first_position
        return Admission(
            slot=slot,
            generation=int(table.generation[slot]),
            request_number=request.number,
            token_ids=request.known_tokens(),
            prompt_tokens=request.prompt_tokens,
            first_position=reuse.first_position,
            params=request.params,
            seed=request.seed,
            content=request.content,
        )

    # ---- out --------------------------------------------------------------------------------------------------------

    def preempt(self, slot: int) -> None:
        """Take slot and blocks away; the request waits where its arrival puts it and is computed again. One that runs
        alone will run alone again: while it does, nobody comes from the queue.
        """
        request = self._leave(slot)
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self._forecast.preempted()
        if not self.quarantine.postpone(request):
            self.queue.push(request)

    def strike(self, slot: int, error: str) -> None:
        """A step with this request failed: compute it again, alone if it is the second time; end it if it was alone."""
        request = self.table.request(slot)
        if self.quarantine.convicts(request):
            self.finish(slot, FinishReason.ERROR, error=error)
            return
        self._leave(slot)
        if not self.quarantine.strike(request):
            self.queue.push(request)

    def lose_step(self, slot: int) -> None:
        """A step with this request failed, and not because of it: compute it again."""
        request = self._leave(slot)
        if not self.quarantine.postpone(request):
            self.queue.push(request)

    def finish(
        self, slot: int, reason: FinishReason, *, stop_reason: int | str | None = None, error: str | None = None
    ) -> None:
        """The request in `slot` is done; its `Finished` comes with the next outputs."""
        request = self._leave(slot)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            most = request.limit - request.prompt_tokens
            self._forecast.finished(request.num_output_tokens, most, open_end=request.params.max_tokens is None)
        self._end(request, reason, stop_reason, error)

    def abort(self, number: int) -> bool:
        """End a request wherever it is. False: it is not here (any more)."""
        request = self.requests.get(number)
        if request is None:
            return False
        if request.slot >= 0:
            self.finish(request.slot, FinishReason.ABORT)
            return True
        if request.status is RequestStatus.WAITING and not self.quarantine.discard(request):
            self.queue.discard(request)
        self._short_at_blocks = -1
        self._end(request, FinishReason.ABORT, None, None)
        return True

    def _leave(self, slot: int) -> Request:
        if self.table.announced[slot]:
            self.releases.append(Release(slot, int(self.table.generation[slot])))
        request = self.ledger.release(slot)
        self._worst_case_tokens -= request.limit
        self._short_at_blocks = -1
        return request

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None, error: str | None) -> None:
        self.quarantine.discard(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.number]
        now = self.clock()
        end = Finished(
            number=request.number,
            reason=reason,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.num_output_tokens,
            hit_tokens=request.hit_tokens or 0,
            stop_reason=stop_reason,
            error=error,
            num_preemptions=request.num_preemptions,
            queue_s=(request.first_scheduled_s or now) - request.arrival_s,
            first_token_s=(request.first_token_s or now) - request.arrival_s,
            total_s=now - request.arrival_s,
        )
        self.finished.append(end)
        self.stats.request_finished(end)
