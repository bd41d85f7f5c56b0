"""Recorded routing under the balancer: what it can gain, what it must not lose."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.expert_placement import ExpertTopology
from deepinfer_core.scheduling.expert_replay import ReplayCosts, replay_routing, skewed

FREE = ReplayCosts(layer_seconds=1.0, move_seconds=1e-9, steps_to_move=3)
FOUR = ExpertTopology(num_devices=4)


def constant_load(steps: int = 60) -> np.ndarray:
    """Expert 0 gets half of all tokens, in both layers."""
    return np.broadcast_to(np.array([70, 10, 10, 10, 10, 10, 10, 10]), (steps, 2, 8)).astype(np.int64)


def test_a_load_that_stays_is_balanced_after_the_first_interval() -> None:
    played = replay_routing(constant_load(), FOUR, 12, window=5, interval=20, costs=FREE)
    assert np.allclose(played.without, played.without[0])
    assert np.array_equal(played.with_balancer[:23], played.without[:23])  # window, plan, three steps of moving
    assert played.with_balancer[23:].max() < 1.05 < 1.4 < played.without[0]
    assert [one.step for one in played.rearrangements] == [23]  # what is balanced is left alone
    assert played.rearrangements[0].moves > 0


def test_moves_that_cost_more_than_they_bring_are_not_made() -> None:
    dear = ReplayCosts(layer_seconds=1e-6, move_seconds=1.0)
    played = replay_routing(constant_load(), FOUR, 12, window=5, interval=20, costs=dear)
    assert played.rearrangements == ()
    assert played.with_balancer[40:].max() <= played.without.max() + 1e-9


def test_steps_without_tokens_are_balanced() -> None:
    played = replay_routing(np.zeros((30, 2, 8), np.int64), FOUR, 8, window=5, interval=10, costs=FREE)
    assert (played.without == 1).all()
    assert (played.with_balancer == 1).all()


def test_a_skew_keeps_the_tokens_of_a_layer_and_makes_the_load_uneven() -> None:
    even = np.full((40, 3, 32), 100, np.int64)
    load = skewed(even, 1.0, drift_steps=10)
    assert np.abs(load.sum(2) - even.sum(2)).max() <= 32  # rounding
    assert load.max() > 3 * 100
    assert not np.array_equal(load[0], load[-1])  # it drifts
    assert np.array_equal(load, skewed(even, 1.0, drift_steps=10))
    assert np.array_equal(skewed(even, 0.0, drift_steps=10), even)


@pytest.mark.bad_input
@pytest.mark.parametrize("shape", [(3, 8), (0, 2, 8), (3, 2, 0)])
def test_counts_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="counts have shape"):
        replay_routing(np.zeros(shape, np.int64), FOUR, 8, window=5, interval=10, costs=FREE)
