"""`WaitingQueue`: who goes next.

    urgency = arrival number + priority x head start        the smallest goes first

A level of priority (lower is more urgent) is worth a head start of that many arrivals and no more: at most `head
start x difference` later requests can overtake one, so none waits for ever. The queue is a heap; a step looks at its
head only, whatever its length.
"""

from __future__ import annotations

import heapq

from deepinfer_core.errors import QueueFullError
from deepinfer_core.scheduling.request import Request, RequestStatus

__all__ = ["WaitingQueue"]

_SLACK = 64


class WaitingQueue:
    """A heap of waiting requests. One that left otherwise (aborted) is dropped when it comes to the head."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._heap: list[tuple[int, int, Request]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def check_room(self) -> None:
        """Raise QueueFullError unless one more request may wait."""
        if self._num_waiting >= self._max_waiting:
            raise QueueFullError(
                f"{self._num_waiting} requests are waiting, the limit max_num_waiting; try again later or raise it"
            )

    def push(self, request: Request) -> None:
        """Add a request. A preempted one comes back to where its arrival puts it, and is never refused."""
        request.status = RequestStatus.WAITING
        heapq.heappush(self._heap, (request.urgency, request.number, request))
        self._num_waiting += 1

    def head(self) -> Request | None:
        """The most urgent request, which stays in the queue."""
        while self._heap:
            request = self._heap[0][2]
            if request.status is RequestStatus.WAITING:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Take out what `head` returned."""
        heapq.heappop(self._heap)
        self._num_waiting -= 1

    def discard(self, request: Request) -> None:
        """Take out a request from wherever it is."""
        request.status = RequestStatus.FINISHED
        self._num_waiting -= 1
        if len(self._heap) > 2 * self._num_waiting + _SLACK:  # else requests that never come to the head would pile up
            self._heap = [entry for entry in self._heap if entry[2].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)
