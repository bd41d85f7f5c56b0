"""Placements of experts: golden results, what holds for any load, few moves, node limits, and input that is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.expert_placement import (
    ExpertTopology,
    Placement,
    PlacementPlan,
    balancedness,
    device_loads,
    moves_between,
    plan,
)

SETTINGS = settings(max_examples=60, deadline=None)

# The example that deepseek-ai/EPLB publishes: two layers, 12 experts, 16 replicas, 8 devices; its plan with 4 groups on
# 2 nodes, and the loads of its busiest devices globally and with node limits.
PUBLISHED_LOAD = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]], float
)
PUBLISHED_PLAN = np.array(
    [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]
)
SKEWED_LOAD = np.array([[600, 560, 120, 120, 20, 10, 10, 10]], float)


def zipf(exponent: float, num_layers: int, num_experts: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([rng.permutation(np.arange(1, num_experts + 1) ** -exponent) for _ in range(num_layers)])


def experts_by_device(placement: Placement, layer: int = 0) -> list[Counter[int]]:
    row, start = placement.expert_of_slot[layer].tolist(), placement.slot_start.tolist()
    return [Counter(row[a:b]) for a, b in itertools.pairwise(start)]


def busiest_device(load: np.ndarray, placement: Placement, layer: int) -> float:
    """From the definition, with nothing of the implementation but the table."""
    devices = experts_by_device(placement, layer)
    replicas = sum(devices, Counter())
    return max(sum(load[layer, e] / replicas[e] * n for e, n in device.items()) for device in devices)


# ---- golden results -------------------------------------------------------------------------------------------------


def test_the_published_example_is_placed_at_least_as_well_as_published() -> None:
    result = plan(PUBLISHED_LOAD, None, ExpertTopology(num_devices=8), 16)
    assert busiest_device(PUBLISHED_LOAD, result.placement, 0) <= 138.5
    assert busiest_device(PUBLISHED_LOAD, result.placement, 1) <= 172.0
    assert (result.balancedness >= [0.932, 0.840]).all()


def test_the_published_example_with_node_limits_is_no_worse_than_its_own_plan() -> None:
    topology = ExpertTopology(num_devices=8, num_nodes=2, num_expert_groups=4)
    published = Placement(PUBLISHED_PLAN, topology.slot_start(16), 12)
    assert device_loads(PUBLISHED_LOAD, published)[0].tolist() == [121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152]
    assert device_loads(PUBLISHED_LOAD, published)[1].tolist() == [173, 179.5, 120.5, 172, 123, 152, 118.5, 117.5]
    result = plan(PUBLISHED_LOAD, None, topology, 16)
    assert (device_loads(PUBLISHED_LOAD, result.placement).max(axis=1) <= [156.0, 179.5]).all()


def test_counts_and_packing_are_optimised_together() -> None:
    result = plan(SKEWED_LOAD, None, ExpertTopology(num_devices=8), 16)
    assert busiest_device(SKEWED_LOAD, result.placement, 0) <= 196.7


def cheapest_by_trying_all(load: np.ndarray, num_devices: int, num_slots: int) -> float:
    """The least load of the busiest device over all placements without two copies on a device."""
    num_experts, best = len(load), np.inf
    sizes = np.diff(ExpertTopology(num_devices=num_devices).slot_start(num_slots))
    choices = [list(itertools.combinations(range(num_experts), size)) for size in sizes]
    for held in itertools.product(*choices):
        replicas = np.bincount(np.concatenate(held), minlength=num_experts)
        if replicas.min() > 0:
            best = min(best, max((load / replicas)[list(experts)].sum() for experts in held))
    return float(best)


@pytest.mark.parametrize(("num_experts", "num_devices", "num_slots"), [(4, 3, 6), (5, 3, 7), (4, 3, 8), (5, 2, 7)])
def test_small_nodes_are_placed_as_well_as_by_trying_all(num_experts: int, num_devices: int, num_slots: int) -> None:
    rng = np.random.default_rng((num_experts, num_slots))
    load = np.exp(rng.normal(0, 1, (6, num_experts)))
    result = plan(load, None, ExpertTopology(num_devices=num_devices), num_slots)
    best = [cheapest_by_trying_all(layer, num_devices, num_slots) for layer in load]
    np.testing.assert_allclose(device_loads(load, result.placement).max(axis=1), best, rtol=1e-3)


@pytest.mark.parametrize(("num_spare", "exponent", "least"), [(64, 0.5, 0.998), (64, 1.1, 0.987), (32, 0.8, 0.987)])
def test_a_layer_of_the_release_is_level_on_64_devices(num_spare: int, exponent: float, least: float) -> None:
    result = plan(zipf(exponent, 2, 384), None, ExpertTopology(num_devices=64), 384 + num_spare)
    assert result.balancedness.min() >= least


# ---- what holds for any load ----------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, ExpertTopology, int]:
    num_experts, num_devices = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    least = max(num_experts, num_devices)
    slots = draw(st.integers(least, least + 2 * num_experts + 3))
    values = st.sampled_from([0.0, 0.0, 1.0, 3.0, 3.0, 10.0, 47.5, 400.0])
    load = draw(st.lists(values, min_size=num_experts, max_size=num_experts))
    return np.array([load]), ExpertTopology(num_devices=num_devices), slots


def check_placement(load: np.ndarray, result: PlacementPlan, num_slots: int) -> None:
    num_experts = load.shape[1]
    devices = experts_by_device(result.placement)
    assert sum(device.total() for device in devices) == num_slots
    assert max(device.total() for device in devices) - min(device.total() for device in devices) <= 1
    assert set(sum(devices, Counter())) == set(range(num_experts))
    for device in devices:  # no copy beside another one while the device lacks an expert
        counts = [device[expert] for expert in range(num_experts)]
        assert max(counts) - min(counts) <= 1
    mean, busiest = load.sum() / len(devices), busiest_device(load, result.placement, 0)
    assert result.balancedness[0] == pytest.approx(mean / busiest if busiest else 1.0)
    assert result.placement.replicas().sum() == num_slots


@SETTINGS
@given(cases())
def test_every_expert_has_a_replica_and_none_lies_twice_on_a_device(
    case: tuple[np.ndarray, ExpertTopology, int],
) -> None:
    load, topology, slots = case
    result = plan(load, None, topology, slots)
    check_placement(load, result, slots)
    assert result.moves == ()
    again = plan(load, None, topology, slots)
    assert np.array_equal(result.placement.expert_of_slot, again.placement.expert_of_slot)


@SETTINGS
@given(cases(), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.25, 1.0]))
def test_a_placement_that_follows_the_load_keeps_its_promises(
    case: tuple[np.ndarray, ExpertTopology, int], seed: int, max_moved_share: float
) -> None:
    load, topology, slots = case
    before = plan(load, None, topology, slots).placement
    drifted = load * np.exp(np.random.default_rng(seed).normal(0, 1, load.shape))
    after = plan(drifted, before, topology, slots, max_moved_share=max_moved_share)
    check_placement(drifted, after, slots)
    assert len(after.moves) <= max_moved_share * slots
    assert after.previous_balancedness is not None
    assert after.balancedness[0] >= after.previous_balancedness[0] * (1 - 1e-9)
    assert after.previous_balancedness[0] == pytest.approx(balancedness(drifted, before)[0])
    check_moves(before, after)


def check_moves(before: Placement, after: PlacementPlan) -> None:
    """The moves turn one table into the other, each from a slot with the expert, for a device that needs one more."""
    table = before.expert_of_slot.copy()
    device = before.device_of_slot
    for layer, slot, expert, source in after.moves:
        assert before.expert_of_slot[layer, source] == expert
        on_device = device == device[slot]
        copies = [np.count_nonzero(p.expert_of_slot[layer, on_device] == expert) for p in (before, after.placement)]
        assert copies[0] < copies[1]
        table[layer, slot] = expert
    assert np.array_equal(table, after.placement.expert_of_slot)
    assert after.num_moves().sum() == len(after.moves) == np.count_nonzero(table != before.expert_of_slot)


@SETTINGS
@given(cases(), st.randoms(use_true_random=False))
def test_needless_copies_of_a_previous_placement_are_cleared_away(
    case: tuple[np.ndarray, ExpertTopology, int], random: Random
) -> None:
    load, topology, slots = case
    num_experts = load.shape[1]
    table = [*range(num_experts), *([num_experts - 1] * (slots - num_experts))]
    random.shuffle(table)
    before = Placement(np.array([table]), topology.slot_start(slots), num_experts)
    after = plan(load, before, topology, slots, max_moved_share=0.0)
    check_placement(load, after, slots)


def test_slots_of_experts_are_listed_in_order_and_filled_up() -> None:
    placement = Placement(np.array([[2, 0, 1, 2], [1, 0, 2, 0]]), np.array([0, 2, 4]), 3)
    assert placement.slots_of_expert().tolist() == [[[1, -1], [2, -1], [0, 3]], [[1, 3], [0, -1], [2, -1]]]


# ---- few moves ------------------------------------------------------------------------------------------------------


def test_a_load_that_stays_moves_nothing() -> None:
    topology = ExpertTopology(num_devices=8)
    for load, slots in ((SKEWED_LOAD, 16), (PUBLISHED_LOAD, 17), (zipf(1.1, 2, 96), 104)):
        first = plan(load, None, topology, slots)
        assert plan(load, first.placement, topology, slots).moves == ()


def test_a_load_that_is_level_enough_moves_nothing() -> None:
    topology = ExpertTopology(num_devices=8)
    load = zipf(0.8, 1, 96)
    first = plan(load, None, topology, 104).placement
    drifted = load * np.exp(np.random.default_rng(1).normal(0, 0.3, load.shape))
    reached = balancedness(drifted, first)[0]
    assert plan(drifted, first, topology, 104, good_enough=reached - 0.01).moves == ()
    assert plan(drifted, first, topology, 104, good_enough=reached + 0.01).moves != ()


def test_a_drifting_load_is_levelled_by_moving_a_quarter_of_the_slots() -> None:
    topology = ExpertTopology(num_devices=64)
    load = zipf(0.8, 2, 384)
    first = plan(load, None, topology, 448)
    drifted = load * np.exp(np.random.default_rng(1).normal(0, 0.3, load.shape))
    after = plan(drifted, first.placement, topology, 448)
    assert after.previous_balancedness is not None
    assert after.previous_balancedness.max() < 0.85
    assert after.balancedness.min() >= 0.99
    assert (after.num_moves() <= 112).all()


def test_a_single_move_is_found_where_a_swap_is_one_too_many() -> None:
    topology = ExpertTopology(num_devices=3)
    before = Placement(np.array([[0, 1, 0, 1, 2, 3, 4]]), topology.slot_start(7), 5)
    after = plan(np.ones((1, 5)), before, topology, 7)
    assert len(after.moves) == 1
    assert device_loads(np.ones((1, 5)), after.placement).max() == 2.5  # it was 3


def test_copies_come_from_the_same_node_and_senders_take_turns() -> None:
    topology = ExpertTopology(num_devices=4, num_nodes=2)
    start = topology.slot_start(8)
    before = Placement(np.array([[0, 1, 0, 2, 0, 3, 1, 2]]), start, 4)
    after = Placement(np.array([[3, 1, 0, 2, 0, 3, 1, 0]]), start, 4)
    # Expert 3 lies on the other node only; expert 0 has a copy on the receiver's node (slot 4), which is preferred.
    assert moves_between(before, after, topology) == ((0, 0, 3, 5), (0, 7, 0, 4))
    flat = ExpertTopology(num_devices=4)
    before = Placement(np.array([[0, 1, 0, 2, 3, 1, 3, 2]]), start, 4)
    after = Placement(np.array([[0, 1, 0, 2, 0, 1, 0, 2]]), start, 4)
    assert [move.source_slot for move in moves_between(before, after, flat)] == [0, 2]


# ---- node limits ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.integers(0, 9), st.integers(0, 2**32)
)
def test_replicas_of_a_group_lie_on_one_node(
    num_nodes: int, devices_per_node: int, more_groups: int, group_size: int, spare: int, seed: int
) -> None:
    groups = num_nodes + more_groups
    topology = ExpertTopology(num_devices=num_nodes * devices_per_node, num_nodes=num_nodes, num_expert_groups=groups)
    slots = max(topology.num_devices, num_nodes * -(-groups // num_nodes) * group_size) + spare
    rng = np.random.default_rng(seed)
    load = np.exp(rng.normal(0, 1.5, (1, groups * group_size)))
    first = plan(load, None, topology, slots)
    later = plan(load * np.exp(rng.normal(0, 1, load.shape)), first.placement, topology, slots)
    for placement in (first.placement, later.placement):
        devices = experts_by_device(placement)
        nodes_of_group: dict[int, set[int]] = {}
        for device, held in enumerate(devices):
            for expert in held:
                nodes_of_group.setdefault(expert // group_size, set()).add(device // devices_per_node)
        assert sorted(nodes_of_group) == list(range(groups))
        assert {len(nodes) for nodes in nodes_of_group.values()} == {1}
        groups_on = Counter(next(iter(nodes)) for nodes in nodes_of_group.values())
        assert max(groups_on.values()) - min(groups_on[node] for node in range(num_nodes)) <= 1


# ---- refused input --------------------------------------------------------------------------------------------------

EIGHT = ExpertTopology(num_devices=8)
PLACED = plan(SKEWED_LOAD, None, EIGHT, 16).placement


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_devices": 0}, "num_devices is 0; it must be an integer from 1"),
        ({"num_devices": 8, "num_nodes": 3}, "num_devices is 8; it must be a multiple of the number of nodes, 3"),
        ({"num_devices": 2, "num_nodes": 4}, "num_nodes is 4; it must be an integer from 1 to 2"),
        ({"num_devices": 8, "num_nodes": 4, "num_expert_groups": 3}, "leaves some of 4 nodes without experts"),
        ({"num_devices": True}, "num_devices is True"),
    ],
)
def test_topologies_that_cannot_be_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertTopology(**arguments)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("load", "topology", "slots", "message"),
    [
        (SKEWED_LOAD, EIGHT, 7, "slots is 7; it must be an integer from 8 to"),
        (SKEWED_LOAD, ExpertTopology(num_devices=9), 8, "slots is 8; it must be an integer from 9 to"),
        (SKEWED_LOAD, EIGHT, 16.0, "slots is 16.0"),
        (SKEWED_LOAD[0], EIGHT, 16, r"load has shape \(8,\)"),
        (np.zeros((0, 8)), EIGHT, 16, r"load has shape \(0, 8\)"),
        ([["many"]], EIGHT, 16, "it must be an array"),
        ([[1.0, -1.0]], EIGHT, 16, "load of layer 0, expert 1 is -1.0"),
        ([[1.0, np.nan]], EIGHT, 16, "load of layer 0, expert 1 is nan"),
        ([[1.0, np.inf]], EIGHT, 16, "expert 1 is inf; it must be from 0 to 1e"),
        (
            SKEWED_LOAD,
            ExpertTopology(num_devices=8, num_expert_groups=3),
            16,
            "num_expert_groups is 3; it must divide the number of experts, 8",
        ),
        (
            np.ones((1, 12)),
            ExpertTopology(num_devices=2, num_nodes=2, num_expert_groups=3),
            12,
            "a node has 6 slots and up to 2 groups, 8 experts; give at least 16 slots",
        ),
    ],
)
def test_loads_and_slots_that_do_not_fit_are_refused(
    load: object, topology: ExpertTopology, slots: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(load, None, topology, slots)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("previous", "topology", "slots", "message"),
    [
        (PLACED, EIGHT, 17, "give previous=None to place all experts anew"),
        (PLACED, ExpertTopology(num_devices=4), 16, "8 devices with other slots than the 4 of the topology"),
        (Placement(PLACED.expert_of_slot * 0, PLACED.slot_start, 8), EIGHT, 16, "no replica of expert 1 in layer 0"),
        (Placement(PLACED.expert_of_slot + 1, PLACED.slot_start, 8), EIGHT, 16, "names an expert outside 0 to 7"),
        (
            Placement(np.array([[*range(8), *range(8)]]), PLACED.slot_start, 8),
            ExpertTopology(num_devices=8, num_nodes=2, num_expert_groups=2),
            16,
            "has group 0 of layer 0 on nodes 0 and 1",
        ),
    ],
)
def test_previous_placements_that_do_not_fit_are_refused(
    previous: Placement, topology: ExpertTopology, slots: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(SKEWED_LOAD, previous, topology, slots)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["max_moved_share", "good_enough"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_limits_are_shares(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        plan(SKEWED_LOAD, PLACED, EIGHT, 16, **{name: value})
