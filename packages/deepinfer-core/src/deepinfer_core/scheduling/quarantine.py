"""`Quarantine`: which request makes steps fail?

A failed step says nothing about the culprit. The requests in it are recomputed together once, for the failure may
have been passing. Those in a second failed step become suspects: each runs alone until it is past the point where it
failed. One that fails alone is the culprit; the others have lost time and no token.
"""

from __future__ import annotations

from typing import Final

from deepinfer_core.scheduling.request import Request, RequestStatus

__all__ = ["Quarantine"]

_STRIKES: Final = 2


class Quarantine:
    """Suspects, and the one that is running alone."""

    def __init__(self) -> None:
        self._suspects: list[Request] = []
        self.alone: Request | None = None

    def __len__(self) -> int:
        return len(self._suspects)

    def strike(self, request: Request) -> bool:
        """A step with `request` failed. True: it is a suspect now, and must not go back to the queue."""
        request.strikes += 1
        request.suspect_until = request.num_tokens + 1
        if request is self.alone:
            self.alone = None
        if request.strikes < _STRIKES:
            return False
        self._suspect(request)
        return True

    def _suspect(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self._suspects.append(request)
        self._suspects.sort(key=lambda suspect: suspect.urgency)

    def postpone(self, request: Request) -> bool:
        """`request` lost a step or its slot through no fault of any request. True: it ran alone, and will again."""
        if request is not self.alone:
            return False
        self.alone = None
        self._suspect(request)
        return True

    def convicts(self, request: Request) -> bool:
        """Whether a failure of a step with `request` alone proves that it is the cause."""
        return request is self.alone

    def next_suspect(self) -> Request | None:
        """The request to run alone next, if nothing is running alone now."""
        return self._suspects[0] if self.alone is None and self._suspects else None

    def isolate(self, request: Request) -> None:
        """`request`, the next suspect, has a slot and runs alone."""
        self._suspects.remove(request)
        self.alone = request

    def committed(self, length: int) -> None:
        """The request that runs alone has `length` tokens: let it go when it is past the point of its failure."""
        if self.alone is not None and length >= self.alone.suspect_until:
            self.alone.strikes = 0
            self.alone = None

    def discard(self, request: Request) -> bool:
        """Forget `request`. Whether it was waiting here."""
        if request is self.alone:
            self.alone = None
        if request in self._suspects:
            self._suspects.remove(request)
            return True
        return False
