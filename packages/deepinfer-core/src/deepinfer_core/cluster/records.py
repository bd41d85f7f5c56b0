"""What a run leaves: the requests that were measured, and how many were where, integrated over time.

    places    store ─► prefill queue ─► prefill ─► transfer ─► decode queue ─► decode        a request is in exactly one
    Little    integral of the number in the system = sum of the times that requests spent in it

The second line holds exactly on any run, so it checks that no request is lost, doubled or timed wrongly (a test).
"""

from __future__ import annotations

from typing import Literal, get_args

from deepinfer_core.cluster.prefill_pool import PrefillStep
from deepinfer_core.cluster.request import Request

__all__ = ["PLACES", "Place", "Records"]

type Place = Literal["store", "prefill queue", "prefill", "transfer", "decode queue", "decode"]
PLACES: tuple[Place, ...] = get_args(Place.__value__)


class Records:
    """Counts and samples of one run. Samples are of requests that arrived after the warm-up."""

    def __init__(self, warmup_s: float) -> None:
        self.begin_s = warmup_s
        self.end_s = warmup_s
        self.arrived = self.finished = 0  # since time 0
        self.too_long = 0  # sessions that ended since their next turn was beyond the longest request
        self.request_seconds = 0.0  # integral of the number in the system since time 0
        self.sojourn_s = 0.0  # of all requests since time 0, up to the end of the run
        self.measured: list[Request] = []  # arrived after the warm-up
        self.ended: list[Request] = []  # finished after the warm-up, whenever they arrived
        self.prefill_rows = 0
        self.prefill_busy_s = 0.0  # of all groups, after the warm-up
        self.place_seconds = dict.fromkeys(PLACES, 0.0)  # integral of the number in each, after the warm-up
        self._places = dict.fromkeys(PLACES, 0)
        self._now_s = 0.0
        self._unfinished_arrival_s = 0.0  # sum over requests in the system

    def places(self) -> dict[Place, int]:
        """Requests by where they are now."""
        return dict(self._places)

    def arrive(self, request: Request) -> None:
        """A request enters."""
        self._advance(request.arrived_s)
        self.arrived += 1
        self._places["store"] += 1
        self._unfinished_arrival_s += request.arrived_s
        if request.arrived_s >= self.begin_s:
            self.measured.append(request)

    def move(self, origin: Place, target: Place, now_s: float, count: int = 1) -> None:
        """`count` requests change their place."""
        self._advance(now_s)
        self._places[origin] -= count
        self._places[target] += count

    def finish(self, request: Request, place: Place) -> None:
        """A request leaves."""
        self._advance(request.finished_s)
        self.finished += 1
        self._places[place] -= 1
        self._unfinished_arrival_s -= request.arrived_s
        self.sojourn_s += request.finished_s - request.arrived_s
        if request.finished_s >= self.begin_s:
            self.ended.append(request)

    def prefill_step(self, step: PrefillStep, now_s: float) -> None:
        """A prefill step begins."""
        if now_s >= self.begin_s:
            self.prefill_rows += step.rows
            self.prefill_busy_s += step.seconds

    def end_warmup(self, now_s: float) -> None:
        """What follows is reported."""
        self._advance(now_s)
        self.place_seconds = dict.fromkeys(PLACES, 0.0)

    def close(self, now_s: float) -> None:
        """The run ends."""
        self._advance(now_s)
        self.end_s = now_s
        self.sojourn_s += sum(self._places.values()) * now_s - self._unfinished_arrival_s

    def _advance(self, now_s: float) -> None:
        elapsed_s, self._now_s = now_s - self._now_s, now_s
        if elapsed_s > 0:
            for place, count in self._places.items():
                self.place_seconds[place] += elapsed_s * count
                self.request_seconds += elapsed_s * count
