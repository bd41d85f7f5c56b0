"""Arrivals and sessions: means, bursts, seeds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from deepinfer_core.cluster.traffic import KINDS, Session, TrafficSettings, arriving_sessions, running_sessions

SECONDS = 400.0


def drawn(traffic: TrafficSettings, load: float = 1.0, seed: int = 0) -> list[tuple[float, Session]]:
    arrivals = arriving_sessions(0, traffic, load, seed)
    return list(itertools.takewhile(lambda arrival: arrival[0] < SECONDS, arrivals))


def counts_a_second(arrivals: list[tuple[float, Session]]) -> np.ndarray:
    return np.bincount([int(time_s) for time_s, _ in arrivals], minlength=int(SECONDS))


def test_requests_arrive_at_the_rate_and_sizes_that_were_asked_for() -> None:
    traffic = TrafficSettings(requests_per_s=300.0, turns=6.0, spread=0.8)
    sessions = [session for _, session in drawn(traffic, load=0.5)]
    turns = [turn for session in sessions for turn in session.turns]
    assert len(turns) / SECONDS == pytest.approx(150, rel=0.05)
    assert np.mean([len(session.turns) for session in sessions]) == pytest.approx(6, rel=0.05)
    assert np.mean([session.turns[0].new_tokens for session in sessions]) == pytest.approx(600, rel=0.05)
    assert np.mean([turn.output_tokens for turn in turns]) == pytest.approx(700, rel=0.05)
    assert np.std(np.log([turn.output_tokens for turn in turns])) == pytest.approx(0.8, rel=0.05)
    later = [turn for session in sessions for turn in session.turns[1:]]
    assert np.mean([turn.think_s for turn in later]) == pytest.approx(40, rel=0.05)
    assert all(session.turns[0].think_s == 0 for session in sessions)


def test_poisson_counts_have_the_variance_of_their_mean_and_bursts_more() -> None:
    steady = counts_a_second(drawn(TrafficSettings(requests_per_s=60.0, turns=1.0)))
    bursts = counts_a_second(drawn(TrafficSettings(requests_per_s=60.0, turns=1.0, burst=5.0, burst_s=5.0)))
    assert steady.var() / steady.mean() == pytest.approx(1, abs=0.2)
    assert bursts.mean() == pytest.approx(60, rel=0.25)
    assert bursts.var() / bursts.mean() > 10


def test_the_same_seed_draws_the_same_sessions_and_another_does_not() -> None:
    def shape(seed: int) -> list[tuple[float, int]]:
        arrivals = drawn(TrafficSettings(requests_per_s=20.0), seed=seed)
        return [(time_s, len(session.turns)) for time_s, session in arrivals]

    assert shape(3) == shape(3)
    assert shape(3) != shape(4)


def test_running_sessions_are_as_many_as_in_the_long_run_and_in_their_middle() -> None:
    traffic = TrafficSettings(**KINDS["agent"])  # pyright: ignore[reportArgumentType] -- by name
    running = [session for _, session in running_sessions(0, traffic, 1.0, 0)]
    assert len(running) == round(1_200 * (4 + 400 / 200))
    done = np.array([session.next_turn for session in running])
    assert done.mean() == pytest.approx(19, rel=0.05)
    assert all(0 <= session.next_turn < len(session.turns) for session in running)
    assert all(session.context_tokens >= traffic.shared_tokens for session in running)
    grown = [session.context_tokens - traffic.shared_tokens for session in running if session.next_turn == 3]
    assert np.mean(grown) == pytest.approx(6_000 + 2 * 2_000 + 3 * 400, rel=0.15)


def test_a_class_without_requests_never_arrives() -> None:
    assert drawn(TrafficSettings(requests_per_s=0.0)) == []
    assert list(running_sessions(0, TrafficSettings(requests_per_s=0.0), 1.0, 0)) == []
    assert math.isclose(sum(1 for _ in drawn(TrafficSettings(requests_per_s=1.0, turns=1.0))), SECONDS, rel_tol=0.2)
