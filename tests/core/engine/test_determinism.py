"""The promise: a request's answer is a function of weights, prompt, parameters and seed, whatever happens around it.

Real steps of real models. Compared are whole answers: tokens, text, reasons, seeds, and log-probabilities to the bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from tests.core.engine.random_traffic import SETTINGS, SHARED, Setup, preempted_steps, random_traffic, setups
from tests.core.engine.traces import STYLES, Job, Oracle, Server, Traffic, check, engine_of, play_anywhere
from tests.core.harness import FIXTURES

MODEL = FIXTURES / "tiny-a"
MAX_MODEL_LEN = 640  # the fixture's window has 8 tokens: exact replay starts 28 rows before a hit of 256 and more


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    made = Oracle(MODEL, MAX_MODEL_LEN)
    yield made
    made.close()


@settings(SETTINGS, max_examples=5)
@given(setups, random_traffic(6), preempted_steps)
def test_answers_do_not_depend_on_load_settings_and_disturbances(
    oracle: Oracle, setup: Setup, traffic: list[Traffic], preempts: frozenset[int]
) -> None:
    play_anywhere(oracle, setup, traffic, preempts)


@pytest.mark.slow
@settings(SETTINGS, max_examples=16)  # and five in every run, above
@given(setups, random_traffic(6), preempted_steps)
def test_answers_do_not_depend_on_load_in_many_traces(
    oracle: Oracle, setup: Setup, traffic: list[Traffic], preempts: frozenset[int]
) -> None:
    play_anywhere(oracle, setup, traffic, preempts)


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


def play_crowd(oracle: Oracle, **settings: Any) -> None:
    """Play a trace that is known to meet everything, so that the random ones can't miss it for ever."""
    engine = engine_of(
        oracle.model,
        max_model_len=oracle.max_model_len,
        max_num_seqs=5,
        max_num_batched_tokens=100,
        num_blocks=16,
        num_drafts=5,
        draft_schedule="fixed",
        **settings,
    )
    check(oracle, Server(engine, oracle, frozenset({20, 33, 47})), crowd(1, 10), "compact")
    stats = engine.scheduler.stats
    engine.runner.close()
    assert stats.hit_tokens >= 3 * 256
    assert stats.replayed_tokens > 0
    assert stats.preemptions >= 3
    assert 0 < stats.accepted_drafts < stats.verified_drafts


def test_a_crowd_with_hits_preemptions_and_drafts_gets_the_answers_of_each_request_alone(oracle: Oracle) -> None:
    play_crowd(oracle)


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


def test_a_bounded_replay_sees_nothing_of_who_had_the_slot_before(oracle: Oracle) -> None:
    warm, other, hit = (Traffic(Job(document, 520, 3, "greedy", 1, 8)) for document in (0, 1, 0))
    answers = []
    for before in ([warm], [warm, other]):
        engine = engine_of(
            MODEL,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=128,
            max_num_seqs=1,
            num_blocks=16,
            deterministic=False,
            prefix_replay="bounded",
            draft_schedule="fixed",
        )
        server = Server(engine, oracle)
        server.play(before)
        answers.append(server.play([hit]))
        assert engine.scheduler.stats.hit_tokens == 512
        engine.runner.close()
    assert answers[0] == answers[1]


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
    play_anywhere(oracle, setup, crowd(seed, 6), frozenset(rng.sample(range(60), 3)))
    oracle.close()
