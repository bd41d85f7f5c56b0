"""Calls that run when their result is asked for: their order, their thread, and what happens to an interrupted one."""

from __future__ import annotations

import threading

import pytest

from deepinfer_core.errors import EngineError
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


@pytest.mark.parametrize(("cancel", "made"), [(False, [1, 2]), (True, [])])
def test_shutdown_runs_what_is_queued_or_cancels_it(cancel: bool, made: list[int]) -> None:
    seen: list[int] = []
    executor = LazyExecutor()
    futures = [executor.submit(seen.append, number) for number in (1, 2)]
    executor.shutdown(cancel_futures=cancel)
    assert seen == made
    assert [future.cancelled() for future in futures] == [cancel] * 2
