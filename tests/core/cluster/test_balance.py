"""Drift between two rearrangements, with the engine's own planner."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_core.cluster.balance import PHASES, BalanceSettings, balance_by_phase


def phases(num_devices: int = 64, **settings: float) -> np.ndarray:
    return np.array(balance_by_phase(BalanceSettings(**settings), num_devices, 384))  # pyright: ignore[reportArgumentType] -- by name


def test_the_default_drift_gives_the_published_balance() -> None:
    assert phases().mean() == pytest.approx(1 / 1.09, abs=0.01)


def test_the_longer_since_the_last_rearrangement_the_less_level() -> None:
    found = phases()
    assert len(found) == PHASES
    assert found[0] > found[3] > found[-1]
    assert found[0] > 0.95


def test_a_load_that_stays_is_level() -> None:
    assert phases(drift=0.0).min() > 0.99


def test_experts_that_are_never_moved_are_not_level() -> None:
    found = phases(interval_steps=0)
    assert len(set(found)) == 1
    assert found[0] < phases()[-1]


def test_few_devices_are_more_level_than_many() -> None:
    assert phases(4, spare_slots=0).mean() > phases().mean()


def test_an_even_load_needs_no_plan() -> None:
    assert phases(zipf=0.0, drift=0.0, spare_slots=0) == pytest.approx([1.0] * PHASES)
