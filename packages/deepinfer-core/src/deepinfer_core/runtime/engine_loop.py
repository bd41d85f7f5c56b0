"""The two engine loops: one step after the other, or planning step N + 1 while step N runs.

    plain       schedule 0 | run 0 ..... | commit 0 | schedule 1 | run 1 ..... | commit 1
    overlapped  schedule 0 | schedule 1 | wait 0 .. | commit 0 | schedule 2 | wait 1 .. | commit 1
                device     | step 0 ............... | step 1 ........................... | step 2

Both make the same calls on the same scheduler, so with batch-invariant results they give the same tokens; the plain
loop is the oracle of the other. A step that fails on the device is abandoned: its requests are computed again, and
one that fails alone ends with that error. A step that was launched behind it may fail for that alone, so nothing new is
planned on top of it until it is done. On a device that always fails every request ends with the error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from deepinfer_core.config.scheduler import IN_FLIGHT_STEPS
from deepinfer_core.errors import PeerError
from deepinfer_core.scheduling.plan import StepPlan, StepResult
from deepinfer_core.scheduling.request import StepOutputs
from deepinfer_core.scheduling.scheduler import Scheduler

__all__ = ["Device", "EngineLoop", "make_loop"]


class Device[Ticket](Protocol):
    """Runs plans in the order of their launch."""

    def launch(self, plan: StepPlan, /) -> Ticket:
        """Start a step, or queue it until it is waited for, and return at once. An exception: it will not run."""
        ...

    def wait(self, ticket: Ticket, /) -> StepResult:
        """The result of a launched step. An exception means that its effects are unknown."""
        ...


class EngineLoop[Ticket]:
    """Drives a scheduler and a device with up to `depth` steps launched: 1 is the plain loop, 2 the overlapped one."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device[Ticket],
        *,
        depth: int = IN_FLIGHT_STEPS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self._device = device
        self._depth = depth
        self._clock = clock
        self._launched: deque[tuple[StepPlan, Ticket | Exception, float]] = deque()
        self._last_done_s = 0.0
        self._is_recovering = False  # a step failed, and steps that were planned before that was known are not done

    @property
    def has_work(self) -> bool:
        """Whether requests, launched steps or ends to report are left; who waits for blocks from outside counts."""
        return self.scheduler.num_unfinished > 0 or bool(self._launched) or self.scheduler.has_ends

    @property
    def num_launched(self) -> int:
        """Steps that are launched and not committed."""
        return len(self._launched)

    def step(self) -> StepOutputs:
        """Launch what can be launched, then commit the oldest step. Outputs are empty when there was nothing to do."""
        self._is_recovering = self._is_recovering and bool(self._launched)
        while len(self._launched) < self._depth and not self._is_recovering and not self._has_failed_launch():
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self._launch(plan)
        if not self._launched:
            return self.scheduler.take_finished()
        plan, ticket, launched_s = self._launched[0]
        result = self._result(ticket)  # interrupted by Ctrl-C, the step stays the oldest, to be waited for again
        done_s = self._clock()
        self._launched.popleft()
        try:
            if isinstance(result, Exception):
                raise result
            outputs = self.scheduler.commit(plan, result)
        except Exception as error:
            self.scheduler.abandon(plan, str(error), is_own=not isinstance(error, PeerError))
            self._is_recovering = True
            return self.scheduler.take_finished()
        if not result.is_cold:
            self.scheduler.observe_seconds(plan, done_s - max(launched_s, self._last_done_s))
        self._last_done_s = done_s
        return outputs

    def _result(self, ticket: Ticket | Exception) -> StepResult | Exception:
        try:
            return ticket if isinstance(ticket, Exception) else self._device.wait(ticket)
        except Exception as error:
            return error

    def _launch(self, plan: StepPlan) -> None:
        launched_s = self._clock()
        try:
            ticket = self._device.launch(plan)
        except Exception as error:
            self._launched.append((plan, error, launched_s))  # abandoned when the steps before it are committed
        else:
            self._launched.append((plan, ticket, launched_s))

    def _has_failed_launch(self) -> bool:
        return bool(self._launched) and isinstance(self._launched[-1][1], Exception)


def make_loop[Ticket](scheduler: Scheduler, device: Device[Ticket], *, overlap: bool) -> EngineLoop[Ticket]:
    """The overlapped loop, or the plain one."""
    return EngineLoop(scheduler, device, depth=IN_FLIGHT_STEPS if overlap else 1)
