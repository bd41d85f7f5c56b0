"""`LazyExecutor`: what is submitted runs on the thread that asks for a result, in the order of submission.

On a CPU a step is a Python program itself, with a thousand short calls of C and torch. On a thread of its own it would
need the interpreter's lock as often, and each time that another thread plans or hands out tokens meanwhile it would
lose it, sleep, and be woken late: measured, two threads take longer than one (docs/performance.md, Threads).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from deepinfer_core.errors import EngineError

__all__ = ["LazyExecutor"]


class LazyExecutor(Executor):
    """Stands in for a `ThreadPoolExecutor` of one thread. For one thread that asks for results."""

    def __init__(self) -> None:
        self._queued: deque[_LazyFuture[Any]] = deque()

    def submit[**Arguments, Result](
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Queue a call. Only `result` of its future runs it, after all calls before it."""
        future = _LazyFuture(partial(fn, *args, **kwargs), self._run_next)
        self._queued.append(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Run what is queued, or cancel it."""
        while self._queued:
            if cancel_futures:
                self._queued.popleft().cancel()
            else:
                self._run_next()

    def _run_next(self) -> None:
        """Make the oldest call. It is queued until it is made, so an interrupt before or after it loses nothing."""
        oldest = self._queued[0]
        if not oldest.done():
            oldest.run()
        self._queued.popleft()


class _LazyFuture[Result](Future[Result]):
    def __init__(self, call: Callable[[], Result], run_next: Callable[[], None]) -> None:
        super().__init__()
        self._call, self._run_next = call, run_next

    def result(self, timeout: float | None = None) -> Result:
        while not self.done():
            self._run_next()
        return super().result(timeout)

    def run(self) -> None:
        """Make the call. Whoever interrupts it (Ctrl-C) is heard at once, and the call has failed for good."""
        try:
            self.set_result(self._call())
        except Exception as error:
            self.set_exception(error)
        except BaseException:
            if not self.done():  # else the interrupt came behind the call
                self.set_exception(EngineError("the step was interrupted"))
            raise
