"""Ctrl-C waits for the end of a step; a second one does not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator

import pytest

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.runtime.interrupts import DeferredInterrupt
from tests.core.inside import inside

PROMPTS = ["The sea is", "Once upon a time"]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=6)


@pytest.fixture(autouse=True)
def python_hears_ctrl_c() -> Generator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def run(*steps: Callable[[], object]) -> None:
    with DeferredInterrupt():
        for step in steps:
            step()


def test_an_interrupt_is_heard_at_the_end_of_the_block_and_only_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(press_ctrl_c, lambda: done.append("block"))
    assert done == ["block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_interrupt_is_heard_at_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(press_ctrl_c, press_ctrl_c, lambda: done.append("block"))
    assert done == []


def test_an_inner_block_leaves_it_to_the_outer_one() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(lambda: run(press_ctrl_c), lambda: done.append("outer"))
    assert done == ["outer"]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_process_that_ignores_or_dies_of_it_still_does(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with DeferredInterrupt():
        assert signal.getsignal(signal.SIGINT) == handler


def test_another_thread_has_nothing_to_defer() -> None:
    seen: list[object] = []

    thread = threading.Thread(target=run, args=(lambda: seen.append(signal.getsignal(signal.SIGINT)),))
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("part", "method"),
    [("scheduler", "schedule"), ("scheduler", "commit"), ("scheduler", "add"), ("runner", "_step")],
)
def test_an_interrupt_in_the_middle_of_a_step_costs_its_requests_alone(
    overlap: bool, part: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM("tiny", quiet=True, overlap=overlap, num_blocks=32, max_num_seqs=4, num_drafts=0) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
        owner = getattr(llm._engine, part)
        call = getattr(owner, method)

        def interrupted(*arguments: object, **named: object) -> object:
            result = call(*arguments, **named)
            monkeypatch.undo()
            press_ctrl_c()  # before the caller has what was made
            return result

        monkeypatch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS)
        inside(llm).scheduler.check_idle()
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
