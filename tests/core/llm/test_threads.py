"""One `LLM` and several threads: their calls share the engine step by step, and none waits for another's stream."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.errors import EngineError
from deepinfer_core.scheduling.request import StepOutputs
from tests.core.harness import FIXTURES
from tests.core.inside import inside

MODEL = FIXTURES / "tiny-a"
SETTINGS: dict[str, Any] = {
    "quiet": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "draft_schedule": "fixed",
}
LIMIT_S = 60.0  # for what takes well under a second; a test that reaches it hangs


def sampled(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": 10, "ignore_eos": True} | changes)


def tokens(llm: LLM, seed: int) -> list[int]:
    return llm.generate("hello", sampled(seed), use_tqdm=False)[0].outputs[0].token_ids


def in_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "the call hangs"


def test_calls_of_several_threads_give_what_each_gives_alone(llm: LLM) -> None:
    alone = {seed: tokens(llm, seed) for seed in range(5)}
    together: dict[int, list[int]] = {}

    def call(seed: int) -> None:
        together[seed] = tokens(llm, seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert together == alone
    inside(llm).scheduler.check_idle()


def test_an_open_stream_does_not_block_other_threads_and_may_be_closed_by_one(llm: LLM) -> None:
    stream = llm.stream("hello", sampled(1, max_tokens=500))
    next(stream)
    in_thread(lambda: tokens(llm, 2))
    in_thread(stream.close)
    inside(llm).scheduler.check_idle()


def test_a_stream_may_be_read_by_a_thread_for_each_piece(llm: LLM) -> None:
    expected = tokens(llm, 3)
    stream = llm.stream("hello", sampled(3))
    read: list[int] = []
    kinds: list[str] = []

    def read_one() -> None:
        chunk = next(stream)
        kinds.append(chunk.kind)
        read.extend(chunk.token_ids)

    while not kinds or kinds[-1] != "finish":
        in_thread(read_one)
    assert read == expected


def test_generate_inside_a_stream_leaves_both_as_they_are_alone(llm: LLM) -> None:
    expected = tokens(llm, 4), tokens(llm, 5)
    streamed: list[int] = []
    for chunk in llm.stream("hello", sampled(4)):
        streamed += chunk.token_ids
        assert tokens(llm, 5) == expected[1]
    assert streamed == expected[0]
    inside(llm).scheduler.check_idle()


def test_a_stream_that_dies_in_the_middle_of_a_step_of_its_own_thread_is_aborted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(llm, 3)
    stream = llm.stream("hello", sampled(1, max_tokens=500))
    next(stream)
    loop = inside(llm).loop
    step, got = loop.step, list[list[int]]()

    def dying() -> StepOutputs:
        monkeypatch.undo()
        stream.close()  # as the garbage collector may, wherever memory is allocated
        return step()

    monkeypatch.setattr(loop, "step", dying)
    in_thread(lambda: got.append(tokens(llm, 3)))
    assert got == [expected]
    inside(llm).scheduler.check_idle()


def test_closing_ends_the_calls_of_other_threads_with_an_error() -> None:
    llm = LLM(MODEL, **SETTINGS)
    stream = llm.stream("hello", sampled(1, max_tokens=500))
    next(stream)
    in_thread(llm.close)
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    inside(llm).scheduler.check_idle()


def test_after_a_fork_the_reason_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(EngineError, match="fork"):
        tokens(llm, 1)


def test_an_interrupt_while_a_step_runs_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm, 6)

    def interrupt(_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(inside(llm).runner, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokens(llm, 6)
    inside(llm).scheduler.check_idle()
    assert tokens(llm, 6) == expected
