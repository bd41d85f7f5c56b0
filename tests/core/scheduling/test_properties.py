"""Random traces: whatever happens around a request, its tokens are those it gets alone, and everybody is served."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.scheduling.cost import CostModel, CostTable
from deepinfer_core.scheduling.request import FinishReason
from tests.core.scheduling.harness import VOCAB, Engine, alone, expect_short_answers, make_engine, rules

SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FEW = settings(SETTINGS, max_examples=8)


@dataclass(frozen=True)
class Trace:
    """Settings of an engine, and for each request when it comes, what it is, and when it is aborted, if ever."""

    slots: int
    rows: int
    blocks: int
    drafts: int
    overlap: bool
    caching: bool
    decoder_prefill: str
    scheduled: bool
    optimistic: bool
    seed: int
    num_requests: int


traces = st.builds(
    Trace,
    slots=st.integers(1, 6),
    rows=st.sampled_from([6, 17, 64, 300]),
    blocks=st.sampled_from([6, 10, 40]),
    drafts=st.sampled_from([0, 1, 3, 5]),
    overlap=st.booleans(),
    caching=st.booleans(),
    decoder_prefill=st.sampled_from(["full", "exact", "compact"]),
    scheduled=st.booleans(),
    optimistic=st.booleans(),
    seed=st.integers(0, 10**6),
    num_requests=st.integers(1, 14),
)


def cost_model() -> CostModel:
    return CostModel(
        CostTable((1, 8, 32, 512), (1.0, 1.1, 2.0, 20.0), (1, 8, 32)),
        CostTable((1, 8), (0.1, 0.2)),
        max_rows=512,
        max_requests=8,
    )


def engine_of(trace: Trace) -> Engine:
    engine = make_engine(
        max_num_seqs=trace.slots,
        max_num_batched_tokens=trace.rows,
        num_blocks=trace.blocks,
        max_model_len=640,
        num_drafts=trace.drafts,
        overlap=trace.overlap,
        prefix_caching=trace.caching,
        replay=rules(trace.decoder_prefill),
        cost=cost_model() if trace.scheduled else None,
    )
    if trace.optimistic:
        expect_short_answers(engine)
    return engine


def play(trace: Trace, engine: Engine) -> tuple[dict[int, list[int]], set[int]]:
    """Submit and abort at random steps until all is done: (tokens of each request alone, who was aborted)."""
    rng = random.Random(trace.seed)
    shared = [rng.randrange(VOCAB) for _ in range(600)]
    expected: dict[int, list[int]] = {}
    aborted: set[int] = set()
    for _ in range(trace.num_requests):
        length = rng.choice([1, 3, 50, 127, 128, 129, 260, 400, 520])
        prompt = shared[:length] if rng.random() < 0.6 else [rng.randrange(VOCAB) for _ in range(length)]
        stops = [rng.randrange(VOCAB)] if rng.random() < 0.3 else None
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 5, 30, 150, None]),
            ignore_eos=rng.random() < 0.5,
            min_tokens=rng.choice([0, 0, 1]),
            stop_token_ids=stops,
        )
        seed = rng.choice([7, rng.randrange(2**64)])
        number = engine.scheduler.add(prompt, params, seed=seed, priority=rng.choice([0, 0, -1, 2]))
        expected[number] = alone(prompt, params, seed, engine.scheduler.max_model_len)
        for _ in range(rng.choice([0, 0, 1, 4, 20])):
            engine.step()
        if rng.random() < 0.2:
            victim = rng.choice(list(expected))
            if engine.scheduler.abort(victim):
                aborted.add(victim)
    engine.run(max_steps=50_000)
    return expected, aborted


@SETTINGS
@given(traces)
def test_tokens_are_those_of_the_request_alone_and_nothing_leaks(trace: Trace) -> None:
    engine = engine_of(trace)
    expected, aborted = play(trace, engine)
    for number, tokens in expected.items():
        got = engine.tokens.get(number, [])
        assert got == (tokens[: len(got)] if number in aborted else tokens)
        reason = engine.finished[number].reason
        assert (reason is FinishReason.ABORT) == (number in aborted)
        assert engine.finished[number].output_tokens == len(got)
    engine.scheduler.check_idle()


@pytest.mark.slow
@settings(max_examples=45, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traces)
def test_tokens_are_those_of_the_request_alone_in_many_traces(trace: Trace) -> None:
    test_tokens_are_those_of_the_request_alone_and_nothing_leaks.hypothesis.inner_test(trace)  # type: ignore[attr-defined]


@FEW
@given(st.integers(0, 10**6), st.sampled_from([8, 32]), st.booleans())
def test_no_request_starves_under_a_stream_of_more_urgent_ones(seed: int, rows: int, overlap: bool) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        max_num_seqs=2, max_num_batched_tokens=rows, num_blocks=16, overlap=overlap, priority_head_start=20
    )
    long = engine.scheduler.add(
        [rng.randrange(VOCAB) for _ in range(900)], SamplingParams(max_tokens=5), seed=1, priority=2
    )
    passed = 0
    for i in range(4_000):  # 64 requests of 200 tokens may pass it, eight rows a step
        if engine.scheduler.num_waiting < 4:  # there is always somebody more urgent
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([2, 60, 200]))]
            engine.scheduler.add(prompt, SamplingParams(max_tokens=rng.choice([1, 8])), seed=i, priority=-1)
        if any(end.number != long for end in engine.step().finished):
            passed += 1
        if long in engine.finished:
            break
    assert engine.finished[long].output_tokens >= 1
    assert passed <= 3 * 20 + 4  # three levels of head start, and those that were running


@FEW
@given(traces)
def test_every_step_commits_something_or_nothing_was_to_be_done(trace: Trace) -> None:
    """No livelock: between two steps that bring tokens or ends there are no more steps than prompt chunks."""
    engine = engine_of(trace)
    rng = random.Random(trace.seed)
    for i in range(trace.num_requests):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 100, 500]))]
        engine.scheduler.add(prompt, SamplingParams(max_tokens=rng.choice([3, None]), ignore_eos=True), seed=i)
    idle = 0
    while engine.loop.has_work:
        outputs = engine.step()
        idle = 0 if len(outputs.number) or outputs.finished else idle + 1
        assert idle <= 2 + trace.slots * -(-640 // (trace.rows // 4 + 1))
