"""What a balancer learns from what its rearrangements brought."""

from __future__ import annotations

import numpy as np

from deepinfer_core.scheduling.expert_balance import BalancePolicy
from deepinfer_core.scheduling.expert_placement import ExpertTopology, Placement, plan

TOPOLOGY = ExpertTopology(num_devices=2)
EVEN = np.ones((1, 8))
STEEP = np.array([[8.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])  # experts 0 and 1 lie on one device
LAYER_S, STEPS_AHEAD = 1e-3, 1_000


def placed() -> Placement:
    return Placement(np.arange(8)[None], np.array([0, 4, 8]), 8)


def windows_until_moves(policy: BalancePolicy, load: np.ndarray, move_seconds: float, most: int) -> int | None:
    for window in range(most):
        if policy.decide(load, placed(), layer_seconds=LAYER_S, move_seconds=move_seconds).moves:
            return window
    return None


def test_a_balancer_that_was_misled_moves_again_when_the_load_has_calmed_down() -> None:
    planned = plan(STEEP, placed(), TOPOLOGY, 8)
    assert planned.previous_balancedness is not None
    gain_s = LAYER_S * STEPS_AHEAD * float((1 / planned.previous_balancedness - 1 / planned.balancedness)[0])
    costs_half = gain_s / len(planned.moves) / 2
    assert windows_until_moves(BalancePolicy(TOPOLOGY, STEPS_AHEAD), STEEP, costs_half, 1) == 0
    misled = BalancePolicy(TOPOLOGY, STEPS_AHEAD, lasting_share=0.01)
    window = windows_until_moves(misled, STEEP, costs_half, 20)
    assert window is not None
    assert window >= 5  # not at once: 1 - 0.99 * 0.9^n is above a half from the seventh window on
    assert windows_until_moves(BalancePolicy(TOPOLOGY, STEPS_AHEAD), EVEN, 0.0, 20) is None
