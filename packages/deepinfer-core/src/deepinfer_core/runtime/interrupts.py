"""Ctrl-C between steps. Python raises KeyboardInterrupt between any two instructions of the main thread; inside a step
that would leave a plan that is neither run nor committed, and a scheduler that waits for it for ever.

    Ctrl-C      while planning, running or committing: heard when the step is committed
    once more   heard at once, for a step that hangs: the engine may be unusable afterwards
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

__all__ = ["DeferredInterrupt"]


class DeferredInterrupt:
    """A block that the first SIGINT does not interrupt: its handler is called at the end. Only the main thread hears
    signals, so elsewhere this does nothing; nor does it where SIGINT has no handler of Python's.
    """

    __slots__ = ("_frame", "_handler", "_is_due")

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None  # the one to call
        self._frame: FrameType | None = None  # where SIGINT came
        self._is_due = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._hear)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._is_due:
                self._handler(signal.SIGINT, self._frame)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._is_due and self._handler is not None:
            self._is_due = False
            self._handler(number, frame)
        else:
            self._is_due, self._frame = True, frame
