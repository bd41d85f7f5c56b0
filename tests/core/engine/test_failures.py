"""The n-th call of anything fails: one request ends with the reason at most, the others' tokens stay, nothing leaks.

The same sweeps as on the simulated device (scheduling/test_failures.py), with real steps: a step that fails half way
has written caches, and the step that was launched behind it runs on what it left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deepinfer_core import LLM, Chunk, Engine, SamplingParams, StructuredOutput
from deepinfer_core.errors import CapacityError, DeepInferError, GrammarError
from deepinfer_core.outputs import RequestOutput
from deepinfer_core.requests import PreparedRequest
from tests.core.engine.test_engine import MODEL, SETTINGS, read
from tests.core.inside import inside

PROMPTS = [list(range(20, 20 + length)) for length in (3, 40, 150, 290)]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=14, ignore_eos=True)
REASON = "told to fail"


@pytest.fixture(scope="module", params=[True, False], ids=["overlapped", "plain"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(MODEL, **SETTINGS | {"max_num_batched_tokens": 96, "overlap": request.param}) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return tokens_of(ask(llm))


def ask(llm: LLM) -> list[RequestOutput]:
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS, use_tqdm=False)
    inside(llm).scheduler.check_idle()
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


class Failing:
    """Calls `function`, but its n-th call raises."""

    def __init__(self, function: Callable[..., Any], n: int, error: Exception) -> None:
        self.calls = 0
        self._function, self._n, self._error = function, n, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls - 1 == self._n:
            raise self._error
        return self._function(*args, **kwargs)


@pytest.mark.parametrize(
    ("part", "method"),
    [("backbone", "forward"), ("sampler", "sample"), ("drafter", "make_block"), ("sampler", "admit")],
)
def test_a_passing_failure_of_any_kernel_costs_no_token(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, part: str, method: str
) -> None:
    owner = getattr(inside(llm).runner, part)
    counting = Failing(getattr(owner, method), -1, RuntimeError(REASON))
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, counting)
        ask(llm)
    assert counting.calls
    for n in range(0, counting.calls, max(1, counting.calls // 5)):
        failed_before = inside(llm).scheduler.stats.failed_steps
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, Failing(getattr(owner, method), n, RuntimeError(REASON)))
            outputs = ask(llm)
        assert tokens_of(outputs) == expected, n
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 4
        assert inside(llm).scheduler.stats.failed_steps > failed_before


def test_a_request_that_breaks_every_step_ends_alone_with_the_reason(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = inside(llm).runner
    step = runner._step

    def poisoned(plan: Any) -> Any:
        present = set(plan.segment_slot.tolist())
        tenants = [one for one in (*runner._admitted.values(), *plan.admissions) if one.slot in present]
        if any(one.prompt_tokens == len(PROMPTS[1]) for one in tenants):
            raise MemoryError(REASON)
        return step(plan)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_step", poisoned)
        outputs = ask(llm)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert REASON in (outputs[1].outputs[0].error or "")
    assert [tokens for i, tokens in enumerate(tokens_of(outputs)) if i != 1] == [*expected[:1], *expected[2:]]
    assert tokens_of(ask(llm)) == expected  # and the engine is whole


def test_a_failure_of_any_block_allocation_costs_one_request(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = inside(llm).scheduler.ledger.pool
    counting = Failing(pool.allocate, -1, CapacityError(REASON))
    with monkeypatch.context() as patch:
        patch.setattr(pool, "allocate", counting)
        ask(llm)
    assert counting.calls >= len(PROMPTS)
    for n in range(counting.calls):
        with monkeypatch.context() as patch:
            patch.setattr(pool, "allocate", Failing(pool.allocate, n, CapacityError(REASON)))
            outputs = ask(llm)
        failed = [i for i, output in enumerate(outputs) if output.outputs[0].finish_reason == "error"]
        assert len(failed) == 1, n
        assert REASON in (outputs[failed[0]].outputs[0].error or "")
        for i, tokens in enumerate(tokens_of(outputs)):
            assert tokens == (expected[i] if i not in failed else expected[i][: len(tokens)])


@pytest.mark.bad_input
def test_a_grammar_that_cannot_be_compiled_is_raised_before_any_work(llm: LLM) -> None:
    steps = inside(llm).scheduler.stats.steps
    bad = SamplingParams(max_tokens=5, structured=StructuredOutput(json={"type": "array", "uniqueItems": True}))
    with pytest.raises(GrammarError, match="uniqueItems"):
        llm.generate(prompt_token_ids=PROMPTS[:2], sampling_params=[PARAMS, bad], use_tqdm=False)
    assert inside(llm).scheduler.stats.steps == steps
    inside(llm).scheduler.check_idle()


# ---- streams --------------------------------------------------------------------------------------------------------


async def outcome(stream: Any) -> list[int] | DeepInferError:
    """Tokens of a stream, or the error that it raised."""
    try:
        chunks: list[Chunk] = await read(stream)
    except DeepInferError as error:
        return error
    return [token for chunk in chunks for token in chunk.token_ids]


def test_a_grammar_that_fails_while_others_run_ends_its_own_stream_only(expected: list[list[int]]) -> None:
    async def main() -> None:
        async with Engine(MODEL, **SETTINGS) as engine:
            bad = SamplingParams(max_tokens=5, structured=StructuredOutput(json={"type": "array", "uniqueItems": True}))
            streams = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
            streams.insert(2, engine.add_request("x", bad))
            results = await asyncio.gather(*(outcome(stream) for stream in streams))
            error = results.pop(2)
            assert isinstance(error, GrammarError)
            assert results == expected
        inside(engine).scheduler.check_idle()

    asyncio.run(main())


def test_a_device_that_is_gone_ends_every_stream_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Engine(MODEL, **SETTINGS) as engine:
            monkeypatch.setattr(inside(engine).runner.backbone, "forward", lambda *_, **__: 1 / 0)
            streams = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
            await asyncio.wait_for(asyncio.gather(*(read(stream) for stream in streams)), 60)
            for stream in streams:
                assert stream.output.outputs[0].finish_reason == "error"
                assert "division by zero" in (stream.output.outputs[0].error or "")
        inside(engine).scheduler.check_idle()

    asyncio.run(main())


@pytest.mark.parametrize("n", [0, 3])
def test_an_output_that_cannot_be_handed_out_ends_its_request_alone(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Text and chunks are made behind the commit, where an error once ended the engine."""
    make = PreparedRequest.add
    victim: list[PreparedRequest] = []
    calls = [0]

    def add(self: PreparedRequest, *args: Any) -> None:
        if len(self.token_ids) == len(PROMPTS[1]):
            calls[0] += 1
            if calls[0] > n:
                victim.append(self)
                raise RuntimeError(REASON)
        make(self, *args)

    monkeypatch.setattr(PreparedRequest, "add", add)
    outputs = ask(llm)
    assert len(victim) == 1
    failed = outputs[1].outputs[0]
    assert failed.finish_reason == "error"
    assert REASON in str(failed.error)
    assert failed.token_ids == expected[1][: len(failed.token_ids)]
    assert [tokens for i, tokens in enumerate(tokens_of(outputs)) if i != 1] == expected[:1] + expected[2:]
    monkeypatch.undo()
    assert tokens_of(ask(llm)) == expected
