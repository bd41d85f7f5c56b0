"""Calls that run when their result is asked for: their order, their thread, and what happens to an interrupted one."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from deepinfer_core.errors import EngineError
from deepinfer_core.runtime import lazy_executor
from deepinfer_core.runtime.lazy_executor import LazyExecutor


def test_calls_run_in_the_order_of_submission_whichever_result_is_asked_for_first() -> None:
    made: list[int] = []
    executor = LazyExecutor()
    first, second, third = (executor.submit(made.append, number) for number in range(3))
    assert made == []
    second.result()
    assert made == [0, 1]
    assert first.done()
    assert not third.done()
    first.result()
    assert made == [0, 1]


def test_a_call_runs_on_the_thread_that_asks() -> None:
    future = LazyExecutor().submit(threading.get_ident)
    assert future.result() == threading.get_ident()


def test_an_error_belongs_to_its_call_alone() -> None:
    executor = LazyExecutor()
    bad, good = executor.submit(int, "x"), executor.submit(int, "7")
    assert good.result() == 7
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal"):
            bad.result()


def test_an_interrupted_call_is_heard_at_once_and_never_made_again() -> None:
    calls: list[int] = []

    def interrupted() -> None:
        calls.append(1)
        raise KeyboardInterrupt

    future = LazyExecutor().submit(interrupted)
    with pytest.raises(KeyboardInterrupt):
        future.result()
    with pytest.raises(EngineError, match="interrupted"):
        future.result()
    assert calls == [1]


def test_an_interrupt_at_any_line_loses_no_call_and_makes_none_twice() -> None:
    """As a second Ctrl-C, which is heard at once wherever the executor is."""
    for line in itertools.count():
        made: list[int] = []
        executor = LazyExecutor()
        first, second = (executor.submit(made.append, number) for number in (1, 2))
        with interrupted_at(line) as has_come, suppress(KeyboardInterrupt):
            second.result()
        interrupted = [answer(first), answer(second)].count("interrupted")
        assert interrupted <= 1
        assert made == [number for number in (1, 2) if number in made]
        assert len(made) + interrupted >= 2
        assert executor.submit(int, "7").result() == 7
        if not has_come():
            assert line > 8  # each of two calls has some lines
            return


def answer(future: Future[None]) -> str:
    if not future.done():
        future.result()
    error = future.exception()
    return "made" if error is None else "interrupted" if "interrupted" in str(error) else str(error)


@contextmanager
def interrupted_at(line: int) -> Generator[Callable[[], bool]]:
    """KeyboardInterrupt at one of the lines that the executor runs inside the block."""
    left, before = line, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != lazy_executor.__file__:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield lambda: left < 0
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(("cancel", "made"), [(False, [1, 2]), (True, [])])
def test_shutdown_runs_what_is_queued_or_cancels_it(cancel: bool, made: list[int]) -> None:
    seen: list[int] = []
    executor = LazyExecutor()
    futures = [executor.submit(seen.append, number) for number in (1, 2)]
    executor.shutdown(cancel_futures=cancel)
    assert seen == made
    assert [future.cancelled() for future in futures] == [cancel] * 2
