"""Counts of experts, the split of tokens between replicas, and rearrangements that don't pay."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.expert_load import (
    MoveCost,
    TokenSplit,
    choose_slots,
    count_experts,
    loads_per_expert,
    only_moves_that_pay,
    split_tokens,
    window_step,
)
from deepinfer_core.scheduling.expert_placement import ExpertTopology, Placement, balancedness, device_loads, plan

SETTINGS = settings(max_examples=40, deadline=None)


def split_loads(load: np.ndarray, placement: Placement, split: TokenSplit) -> np.ndarray:
    """Load of each device [L, D] when tokens are split so."""
    loads = np.zeros((len(load), len(placement.slot_start) - 1))
    layer, expert, replica = np.nonzero(split.slots >= 0)
    device = placement.device_of_slot[split.slots[layer, expert, replica]]
    np.add.at(loads, (layer, device), load[layer, expert] * split.shares()[layer, expert, replica])
    return loads


# ---- counts ---------------------------------------------------------------------------------------------------------


def test_the_last_steps_of_every_interval_are_counted() -> None:
    steps = [window_step(step, 5, 2) for step in range(10)]
    assert [step.starts for step in steps] == [False, False, False, True, False] * 2
    assert [step.counted for step in steps] == [False, False, False, True, True] * 2
    assert [step.ends for step in steps] == [False, False, False, False, True] * 2


def test_a_window_longer_than_the_interval_is_the_interval() -> None:
    steps = [window_step(step, 3, 100) for step in range(6)]
    assert all(step.counted for step in steps)
    assert [step.starts for step in steps] == [True, False, False] * 2
    assert [step.ends for step in steps] == [False, False, True] * 2


def test_nothing_is_counted_where_nothing_is_rearranged() -> None:
    assert {window_step(step, 0, 100) for step in range(5)} == {(False, False, False)}


def test_rows_of_padding_are_not_counted() -> None:
    ids = np.array([[0, 3], [3, 1], [9, 9]])
    assert count_experts(ids, 2, 5).tolist() == [1, 1, 0, 2, 0]
    assert count_experts(ids, 0, 5).tolist() == [0] * 5


def test_counts_of_slots_add_up_to_counts_of_experts() -> None:
    placement = Placement(np.array([[2, 0, 1, 2], [1, 0, 2, 0]]), np.array([0, 2, 4]), 3)
    counts = np.array([[5, 1, 2, 7], [1, 2, 3, 4]])
    assert loads_per_expert(counts, placement).tolist() == [[1, 2, 12], [6, 1, 3]]


@pytest.mark.bad_input
def test_ids_of_no_expert_are_refused() -> None:
    with pytest.raises(ConfigError, match="expert ids are from 0 to 9; they must be from 0 to 4"):
        count_experts(np.array([[0, 9]]), 1, 5)
    with pytest.raises(ConfigError, match="num_rows is 2; it must be an integer from 0 to 1"):
        count_experts(np.array([[0, 1]]), 2, 5)


# ---- token split ----------------------------------------------------------------------------------------------------


def test_tokens_are_poured_to_one_level() -> None:
    # Expert 0 lies on all devices, beside 60, 20 and 0 tokens of others; its 100 fill them up to 60.
    placement = Placement(np.array([[0, 1, 0, 2, 0, 3]]), np.array([0, 2, 4, 6]), 4)
    load = np.array([[100.0, 60.0, 20.0, 0.0]])
    split = split_tokens(load, placement)
    np.testing.assert_allclose(split.shares()[0, 0], [0.0, 0.4, 0.6], atol=1e-9)
    np.testing.assert_allclose(split_loads(load, placement, split)[0], [60, 60, 60], atol=1e-6)


def test_replicas_without_load_share_evenly() -> None:
    placement = Placement(np.array([[0, 1, 0, 2, 0, 3]]), np.array([0, 2, 4, 6]), 4)
    split = split_tokens(np.zeros((1, 4)), placement)
    np.testing.assert_allclose(split.shares()[0, 0], [1 / 3] * 3, atol=1e-9)


def test_copies_on_one_device_count_as_one_device() -> None:
    placement = Placement(np.array([[0, 0, 1, 0, 1]]), np.array([0, 3, 5]), 2)
    load = np.array([[90.0, 10.0]])
    loads = split_loads(load, placement, split_tokens(load, placement))[0]
    np.testing.assert_allclose(loads, [50, 50], atol=0.1)


@SETTINGS
@given(st.integers(2, 12), st.integers(2, 5), st.integers(0, 12), st.integers(0, 2**32))
def test_a_split_is_never_worse_than_an_even_one(num_experts: int, num_devices: int, spare: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = np.exp(rng.normal(0, 1.5, (2, num_experts)))
    slots = max(num_experts, num_devices) + spare
    placement = plan(load, None, ExpertTopology(num_devices=num_devices), slots).placement
    drifted = load * np.exp(rng.normal(0, 1, load.shape))
    split = split_tokens(drifted, placement)
    busiest = split_loads(drifted, placement, split).max(axis=1)
    assert (busiest <= device_loads(drifted, placement).max(axis=1) * (1 + 1e-6)).all()
    np.testing.assert_allclose(split.shares().sum(axis=2), 1.0, atol=1e-9)
    assert np.array_equal(split.slots, placement.slots_of_expert())


def test_a_split_levels_a_drifted_load_without_a_move() -> None:
    rng = np.random.default_rng(0)
    load = np.array([rng.permutation(np.arange(1, 385) ** -0.8) for _ in range(3)])
    placement = plan(load, None, ExpertTopology(num_devices=64), 448).placement
    drifted = load * np.exp(rng.normal(0, 0.3, load.shape))
    loads = split_loads(drifted, placement, split_tokens(drifted, placement))
    assert (loads.mean(axis=1) / loads.max(axis=1) > balancedness(drifted, placement) + 0.05).all()


def test_the_replica_depends_on_request_and_position_alone() -> None:
    placement = Placement(np.array([[0, 1, 0, 2, 0, 3]]), np.array([0, 2, 4, 6]), 4)
    split = split_tokens(np.array([[100.0, 60.0, 20.0, 5.0]]), placement)
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, 200, np.uint64)
    positions = rng.integers(0, 2**40, 200)
    ids = np.tile([0, 3], (200, 1))
    chosen = choose_slots(split, 0, ids, keys, positions)
    order = rng.permutation(200)
    assert np.array_equal(choose_slots(split, 0, ids[order], keys[order], positions[order]), chosen[order])
    assert (chosen[:, 1] == 5).all()
    assert (placement.expert_of_slot[0, chosen] == ids).all()


@pytest.mark.parametrize("run", [100, 1000])
def test_any_run_of_positions_meets_the_shares_within_a_few_tokens(run: int) -> None:
    placement = Placement(np.array([[0, 1, 0, 2, 0, 3]]), np.array([0, 2, 4, 6]), 4)
    load = np.array([[100.0, 40.0, 20.0, 5.0]])
    split = split_tokens(load, placement)
    for key, first in itertools.product([0, 1, 2**64 - 1], [0, 12_345]):
        positions = np.arange(first, first + run)
        slots = choose_slots(split, 0, np.zeros((run, 1), np.int64), np.full(run, key, np.uint64), positions)
        taken = [np.count_nonzero(slots == slot) for slot in (0, 2, 4)]
        assert np.abs(np.array(taken) - split.shares()[0, 0] * run).max() <= 6


def test_requests_at_one_position_meet_the_shares() -> None:
    placement = Placement(np.array([[0, 1, 0, 2]]), np.array([0, 2, 4]), 3)
    split = split_tokens(np.array([[60.0, 40.0, 20.0]]), placement)
    keys = np.arange(10_000, dtype=np.uint64)  # neighbouring seeds
    slots = choose_slots(split, 0, np.zeros((10_000, 1), np.int64), keys, np.full(10_000, 7))
    share = np.count_nonzero(slots == 0) / 10_000
    assert share == pytest.approx(split.shares()[0, 0, 0], abs=0.02)  # four standard deviations


# ---- whether it pays ------------------------------------------------------------------------------------------------


def drifted_plan() -> tuple[Placement, ExpertTopology, np.ndarray]:
    """Two layers, of which the first has drifted a little and the second much."""
    topology = ExpertTopology(num_devices=8)
    rng = np.random.default_rng(0)
    load = np.array([rng.permutation(np.arange(1, 97) ** -0.8) for _ in range(2)])
    placement = plan(load, None, topology, 104).placement
    load *= np.exp(rng.normal(0, [[0.02], [1.0]], load.shape))
    return placement, topology, load


def test_a_layer_moves_only_if_its_gain_is_above_its_cost() -> None:
    previous, topology, load = drifted_plan()
    full = plan(load, previous, topology, 104, good_enough=1.0)
    assert full.previous_balancedness is not None
    assert (full.num_moves() > 0).all()
    saved = 1e-3 * (1 / full.previous_balancedness - 1 / full.balancedness) * 1_000
    assert saved[1] > 2 * full.num_moves()[1] * 3e-3
    assert saved[0] < full.num_moves()[0] * 3e-3
    paid = only_moves_that_pay(full, previous, MoveCost(layer_seconds=1e-3, move_seconds=3e-3, steps_ahead=1_000))
    assert np.array_equal(paid.placement.expert_of_slot[0], previous.expert_of_slot[0])
    assert np.array_equal(paid.placement.expert_of_slot[1], full.placement.expert_of_slot[1])
    assert paid.moves == tuple(move for move in full.moves if move.layer == 1)
    np.testing.assert_allclose(paid.balancedness, balancedness(load, paid.placement))


def test_a_gain_that_does_not_last_is_worth_less() -> None:
    previous, topology, load = drifted_plan()
    full = plan(load, previous, topology, 104)
    assert full.previous_balancedness is not None
    saved = 1e-3 * (1 / full.previous_balancedness - 1 / full.balancedness)[1] * 1_000
    move_seconds = saved / full.num_moves()[1] / 2  # half of the gain pays for the moves
    for lasting_share, moves in ((0.51, True), (0.49, False)):
        cost = MoveCost(layer_seconds=1e-3, move_seconds=move_seconds, steps_ahead=1_000, lasting_share=lasting_share)
        assert bool(only_moves_that_pay(full, previous, cost).moves) is moves


@pytest.mark.bad_input
def test_a_first_plan_has_no_gain_to_weigh() -> None:
    previous, topology, load = drifted_plan()
    cost = MoveCost(layer_seconds=1e-3, move_seconds=1e-4, steps_ahead=1_000)
    with pytest.raises(ConfigError, match="without a previous placement"):
        only_moves_that_pay(plan(load, None, topology, 104), previous, cost)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "value"),
    [("layer_seconds", -1.0), ("move_seconds", float("nan")), ("steps_ahead", -1), ("lasting_share", 2)],
)
def test_costs_have_ranges(name: str, value: float) -> None:
    costs = {"layer_seconds": 1e-3, "move_seconds": 1e-4, "steps_ahead": 1_000} | {name: value}
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        MoveCost(**costs)
