"""The promise: a request's answer is a function of weights, prompt, parameters and seed, whatever happens around it.

Real steps of real models. Compared are whole answers: tokens, text, reasons, seeds, and log-probabilities to the bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.core.engine.random_traffic import SHARED, random_traffic
from tests.core.engine.traces import STYLES, Job, Oracle, Server, Traffic, engine_of
from tests.core.harness import FIXTURES

MODEL = FIXTURES / "tiny-a"
MAX_MODEL_LEN = 640
# The fixture's window has 8 tokens, so exact replay starts 28 rows before a hit of 256 and more.
# Failing traces are not shrunk: a trace takes a second, shrinking takes hundreds of them.
SETTINGS = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    made = Oracle(MODEL, MAX_MODEL_LEN)
    yield made
    made.close()


@dataclass(frozen=True)
class Setup:
    """Settings that must not matter; `decoder_prefill` is the one that may."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk_tokens: int | None
    num_blocks: int
    num_drafts: int
    draft_schedule: str
    overlap: bool
    prefix_replay: str
    decoder_prefill: str


setups = st.builds(
    Setup,
    max_num_seqs=st.sampled_from([1, 3, 8]),
    max_num_batched_tokens=st.sampled_from([9, 64, 400]),
    max_prefill_chunk_tokens=st.sampled_from([None, 7, 50]),
    num_blocks=st.sampled_from([5, 9, 40]),
    num_drafts=st.sampled_from([0, 3, 5]),
    draft_schedule=st.sampled_from(["fixed", "scheduled"]),
    overlap=st.booleans(),
    prefix_replay=st.sampled_from(["off", "exact", "exact"]),
    decoder_prefill=st.sampled_from(["compact", "exact", "full"]),
)
preempted_steps = st.frozensets(st.integers(0, 60), max_size=4)


def check(oracle: Oracle, server: Server, traffic: list[Traffic], decoder_prefill: str) -> None:
    """Every answer is the oracle's; of an aborted one its beginning."""
    for one, answers in zip(traffic, server.play(traffic), strict=True):
        for got, want in zip(answers, oracle.answers(one.job, decoder_prefill), strict=True):
            if got.finish_reason == "abort":
                assert one.aborted_after is not None
                assert got.token_ids == want.token_ids[: len(got.token_ids)]
            else:
                assert got == want


def play_anywhere(
    oracle: Oracle, model: object, setup: Setup, traffic: list[Traffic], preempts: frozenset[int]
) -> None:
    engine = engine_of(str(model), max_model_len=MAX_MODEL_LEN, **vars(setup))
    try:
        check(oracle, Server(engine, oracle, preempts), traffic, setup.decoder_prefill)
    finally:
        engine.runner.close()


@settings(SETTINGS, max_examples=8)
@given(setups, random_traffic(6), preempted_steps)
def test_answers_do_not_depend_on_load_settings_and_disturbances(
    oracle: Oracle, setup: Setup, traffic: list[Traffic], preempts: frozenset[int]
) -> None:
    play_anywhere(oracle, MODEL, setup, traffic, preempts)


@pytest.mark.slow
@settings(SETTINGS, max_examples=60)
@given(setups, random_traffic(6), preempted_steps)
def test_answers_do_not_depend_on_load_in_many_traces(
    oracle: Oracle, setup: Setup, traffic: list[Traffic], preempts: frozenset[int]
) -> None:
    play_anywhere(oracle, MODEL, setup, traffic, preempts)


def crowd(seed: int, count: int, styles: tuple[str, ...] = tuple(STYLES)) -> list[Traffic]:
    """Requests of every style with shared prefixes, coming one after the other."""
    rng = random.Random(seed)
    return [
        Traffic(
            Job(rng.randrange(2), rng.choice(SHARED), rng.randrange(1, 40), styles[i % len(styles)], i, 40),  # type: ignore[arg-type] # names of STYLES
            arrives=4 * i,
            priority=rng.choice([-1, 0, 1]),
        )
        for i in range(count)
    ]


def test_a_crowd_with_hits_preemptions_and_drafts_gets_the_answers_of_each_request_alone(oracle: Oracle) -> None:
    """The same property on a trace that is known to meet everything, so that the random ones can't miss it for ever."""
    engine = engine_of(
        MODEL,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=5,
        max_num_batched_tokens=100,
        num_blocks=16,
        num_drafts=5,
        draft_schedule="fixed",
    )
    check(oracle, Server(engine, oracle, frozenset({20, 33, 47})), crowd(1, 10), "compact")
    stats = engine.scheduler.stats
    engine.runner.close()
    assert stats.hit_tokens >= 3 * 256
    assert stats.replayed_tokens > 0
    assert stats.preemptions >= 3
    assert 0 < stats.accepted_drafts < stats.verified_drafts


@pytest.mark.parametrize("decoder_prefill", ["exact", "compact"])
def test_exact_replay_after_a_hit_equals_a_cold_run_to_the_bit(oracle: Oracle, decoder_prefill: str) -> None:
    engine = engine_of(
        MODEL,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=128,
        max_num_seqs=4,
        decoder_prefill=decoder_prefill,
        draft_schedule="fixed",
    )
    server = Server(engine, oracle)
    warm = Traffic(Job(0, 520, 3, "greedy", 1, 2))
    check(oracle, server, [warm], decoder_prefill)
    for shared in (256, 257, 300, 383, 384, 385, 511, 512, 520):
        before = engine.scheduler.stats.hit_tokens
        check(oracle, server, [Traffic(Job(0, shared, 1 + shared % 3, "greedy", 1, 8))], decoder_prefill)
        assert engine.scheduler.stats.hit_tokens - before == shared // 128 * 128
    engine.runner.close()


def test_a_second_start_and_a_saved_salt_change_nothing(oracle: Oracle) -> None:
    traffic = crowd(3, 3, ("sampled", "forked"))
    for salt in (None, "5a" * 32):
        engine = engine_of(
            MODEL,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=128,
            max_num_seqs=4,
            draft_schedule="fixed",
            prefix_salt=salt,
        )
        check(oracle, Server(engine, oracle), traffic, "compact")
        engine.runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_bundled_model_keeps_the_promise_too(seed: int) -> None:
    rng = random.Random(seed)
    oracle = Oracle("tiny", MAX_MODEL_LEN)
    setup = Setup(
        max_num_seqs=rng.choice([2, 5, 9]),
        max_num_batched_tokens=rng.choice([40, 300]),
        max_prefill_chunk_tokens=rng.choice([None, 33]),
        num_blocks=rng.choice([8, 16]),
        num_drafts=(5, 3, 0, 5)[seed],
        draft_schedule=("fixed", "scheduled")[seed % 2],
        overlap=seed != 1,
        prefix_replay="exact",
        decoder_prefill=("compact", "full", "compact", "exact")[seed],
    )
    play_anywhere(oracle, "tiny", setup, crowd(seed, 9), frozenset(rng.sample(range(60), 3)))
    oracle.close()
