"""What goes wrong on one rank of a group: a failed step costs no token anywhere, and a rank that is lost ends all with
the reason.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import EngineError, ParallelError
from deepinfer_core.outputs import RequestOutput
from deepinfer_core.requests import AnswerBook, RequestFactory
from deepinfer_core.runtime.front_end import FrontEnd
from deepinfer_core.runtime.rank_runner import RankRunner
from tests.core.harness import FIXTURES
from tests.core.parallel.thread_ranks import ThreadRanks, front_end

MODEL = FIXTURES / "tiny-a"
SETTINGS: dict[str, Any] = {
    "data_parallel_size": 2,
    "expert_parallel_size": 2,
    "engram_parallel_size": 2,
    "max_model_len": 320,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "draft_schedule": "fixed",
}
PROMPTS = [list(range(20, 20 + length)) for length in (3, 40, 150, 290)]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=14, ignore_eos=True)
REASON = "told to fail"


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="overlapped"), pytest.param(False, id="plain", marks=pytest.mark.slow)],
)
def group(request: pytest.FixtureRequest) -> Iterator[tuple[FrontEnd, ThreadRanks]]:
    with front_end(MODEL, **SETTINGS, overlap=request.param) as made:
        yield made


@pytest.fixture(scope="module")
def expected(group: tuple[FrontEnd, ThreadRanks]) -> list[list[int]]:
    return tokens_of(ask(group[0]))


def ask(engine: FrontEnd, prompts: list[list[int]] = PROMPTS) -> list[RequestOutput]:
    factory, book = RequestFactory(engine, 0), AnswerBook(engine.scheduler, engine.fingerprint)
    requests = [factory.prepare(prompt, PARAMS) for prompt in prompts]
    for request in requests:
        factory.start(request)
        book.submit(request)
    deadline = time.monotonic() + 60
    while book.all_numbers():
        assert time.monotonic() < deadline, "the group hangs"
        book.distribute(engine.loop.step())
    factory.close()
    return [request.output for request in requests]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def runner_of(ranks: ThreadRanks, rank: int) -> RankRunner:
    runner = ranks.engines[rank].runner
    assert isinstance(runner, RankRunner)
    return runner


class Failing:
    """Calls `function`, but its n-th call raises."""

    def __init__(self, function: Callable[..., Any], n: int, error: Exception | None = None) -> None:
        self.calls = 0
        self._function, self._n, self._error = function, n, error or RuntimeError(REASON)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls - 1 == self._n:
            raise self._error
        return self._function(*args, **kwargs)


@pytest.mark.parametrize("part", ["backbone.forward", "sampler.sample", "sampler.admit", "drafter.make_block"])
def test_a_passing_failure_on_one_rank_costs_no_token_on_any(
    group: tuple[FrontEnd, ThreadRanks], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    engine, ranks = group
    owner, method = getattr(runner_of(ranks, 1), part.split(".")[0]), part.split(".")[1]
    for n in (0, 1):
        failed = [one.scheduler.stats.failed_steps for _, one in sorted(ranks.engines.items())]
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, Failing(getattr(owner, method), n))
            outputs = ask(engine)
        assert tokens_of(outputs) == expected
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 4
        after = [one.scheduler.stats.failed_steps for _, one in sorted(ranks.engines.items())]
        assert after[1] > failed[1]


@pytest.mark.parametrize("n", [0, 5, 21])
def test_a_rank_whose_experts_fail_in_the_middle_of_a_layer_costs_no_token_on_any(
    group: tuple[FrontEnd, ThreadRanks], expected: list[list[int]], n: int
) -> None:
    """Between dispatch and combine, where the others wait for outputs of their rows."""
    engine, ranks = group
    runner = runner_of(ranks, 0)
    kernels = runner.backbone.kernels
    failing = dataclasses.replace(kernels, run_experts=Failing(kernels.run_experts, n))
    runner.backbone.kernels = failing
    try:
        assert tokens_of(ask(engine)) == expected
    finally:
        runner.backbone.kernels = kernels
    assert failing.run_experts.calls > n


def test_a_request_that_breaks_every_step_ends_alone_and_nobody_else_is_suspected(
    group: tuple[FrontEnd, ThreadRanks], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ranks = group
    with monkeypatch.context() as patch:
        for rank in ranks.engines:
            runner = runner_of(ranks, rank)
            patch.setattr(runner.forward, "run", poisoned(runner, len(PROMPTS[1])))
        outputs = ask(engine)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert REASON in (outputs[1].outputs[0].error or "")
    assert [one for i, one in enumerate(tokens_of(outputs)) if i != 1] == [*expected[:1], *expected[2:]]
    assert tokens_of(ask(engine)) == expected  # and the group is whole
    for one in ranks.engines.values():
        one.scheduler.check_idle()


def poisoned(runner: RankRunner, prompt_tokens: int) -> Callable[..., Any]:
    run = runner.forward.run

    def failing(plan: Any, *args: Any, **named: Any) -> Any:
        present = set(plan.segment_slot.tolist())
        if any(one.prompt_tokens == prompt_tokens for slot, one in runner._admitted.items() if slot in present):
            raise MemoryError(REASON)
        return run(plan, *args, **named)

    return failing


def settled(ranks: ThreadRanks) -> list[int]:
    """Steps of each rank, once all pause."""
    runners = [runner_of(ranks, rank) for rank in sorted(ranks.engines)]
    deadline = time.monotonic() + 30
    while not all(runner.agreed is not None and runner.agreed.pauses for runner in runners):
        assert time.monotonic() < deadline, "the ranks do not pause"
        time.sleep(0.01)
    return [runner.lockstep.num_steps for runner in runners]


def test_requests_come_and_go_in_many_waves_without_losing_a_rank(group: tuple[FrontEnd, ThreadRanks]) -> None:
    """Between two waves all ranks pause, and none may miss that the next one begins."""
    engine, ranks = group
    for wave in range(8):
        outputs = ask(engine, PROMPTS[: 1 + wave % 2])
        assert [output.outputs[0].error for output in outputs] == [None] * len(outputs)
        if wave % 2:
            settled(ranks)
    assert len(set(settled(ranks))) == 1


def test_idle_ranks_do_not_step(group: tuple[FrontEnd, ThreadRanks]) -> None:
    engine, ranks = group
    ask(engine, PROMPTS[:1])
    before = settled(ranks)
    time.sleep(0.2)
    assert settled(ranks) == before


def test_steps_padded_to_the_fullest_rank_give_the_same_tokens(
    group: tuple[FrontEnd, ThreadRanks], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks on accelerators do it, whose steps are captured for fixed numbers of rows."""
    engine, ranks = group
    padded: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        for rank in ranks.engines:
            runner = runner_of(ranks, rank)
            patch.setattr(runner, "_pads", True)
            patch.setattr(runner.forward, "run", recording(runner, padded))
        assert tokens_of(ask(engine)) == expected
    assert all(rows <= wanted for rows, wanted in padded)
    assert any(rows < wanted for rows, wanted in padded)


def recording(runner: RankRunner, padded: list[tuple[int, int]]) -> Callable[..., Any]:
    run = runner.forward.run

    def recorded(plan: Any, *args: Any, **named: Any) -> Any:
        padded.append((plan.num_rows, plan.padded_rows))
        return run(plan, *args, **named)

    return recorded


def test_statistics_asked_for_by_another_thread_lose_no_output(
    group: tuple[FrontEnd, ThreadRanks], expected: list[list[int]]
) -> None:
    engine, _ = group
    asked: list[dict[str, object]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            asked.append(engine.statistics())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert tokens_of(ask(engine)) == expected
    finally:
        done.set()
        watcher.join()
    assert asked
    assert not engine.scheduler.has_work


def test_an_aborted_request_ends_on_its_rank_and_frees_its_blocks(
    group: tuple[FrontEnd, ThreadRanks], expected: list[list[int]]
) -> None:
    engine, ranks = group
    factory, book = RequestFactory(engine, 0), AnswerBook(engine.scheduler, engine.fingerprint)
    long = dataclasses.replace(PARAMS, max_tokens=200)
    requests = [factory.prepare(PROMPTS[1], long), factory.prepare(PROMPTS[1], PARAMS)]
    for request in requests:
        factory.start(request)
        book.submit(request)
    while not requests[0].output.outputs[0].token_ids:
        book.distribute(engine.loop.step())
    for number in book.open_numbers(requests[0]):
        assert engine.scheduler.abort(number)
    while book.all_numbers():
        book.distribute(engine.loop.step())
    factory.close()
    assert requests[0].output.outputs[0].finish_reason == "abort"
    assert len(requests[0].output.outputs[0].token_ids) < 200
    assert requests[1].output.outputs[0].token_ids == expected[1]
    assert not engine.scheduler.abort(10**6)
    engine.statistics()  # every rank has read the abort
    for one in ranks.engines.values():
        one.scheduler.check_idle()


def test_a_lost_rank_ends_every_request_with_the_reason_and_refuses_new_ones() -> None:
    with front_end(MODEL, **SETTINGS) as (engine, ranks):
        runner = runner_of(ranks, 1)
        runner.lockstep.agree = Failing(  # type: ignore[method-assign] # mischief
            runner.lockstep.agree, 6, ParallelError("rank 0 on host is stopped", (0,))
        )
        started = time.monotonic()
        outputs = ask(engine)
        assert time.monotonic() - started < 20
        for output in outputs:
            assert output.outputs[0].finish_reason == "error"
            assert "rank 0 on host is stopped" in (output.outputs[0].error or "")
        with pytest.raises(EngineError, match=r"the ranks have ended, make a new engine: .*rank 0 on host is stopped"):
            ask(engine)
        assert not engine.scheduler.has_work


@pytest.mark.bad_input
def test_a_rank_that_cannot_load_is_named_and_the_others_end() -> None:
    with (
        pytest.raises(ParallelError, match=r"expert_parallel_size is 9; .* at most 8 ranks can share them"),
        front_end(MODEL, **SETTINGS | {"data_parallel_size": 9, "expert_parallel_size": 9, "engram_parallel_size": 1}),
    ):
        pass
