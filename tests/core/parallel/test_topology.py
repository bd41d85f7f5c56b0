"""Topology: every rank has one place along every axis, and the groups of an axis cut the world into equal parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.config.parallel import ParallelConfig
from deepinfer_core.config.topology import AXES, Place, Topology
from deepinfer_core.errors import ConfigError


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    data, context = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    divisors = st.sampled_from([n for n in range(1, data * context + 1) if data * context % n == 0])
    return Topology(
        data_parallel_size=data,
        context_parallel_size=context,
        expert_parallel_size=draw(divisors),
        engram_parallel_size=draw(divisors),
        ranks_per_node=draw(divisors),
    )


def number_along(axis: str, place: Place) -> int:
    return {"data": place.data, "context": place.context, "expert": place.expert, "engram": place.engram}[axis]


@given(topologies())
def test_groups_of_every_axis_cut_the_world_into_equal_parts(topology: Topology) -> None:
    for axis in AXES:
        groups = topology.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
        assert len({len(group) for group in groups}) == 1
        for group in groups:
            assert list(group) == sorted(group)
            assert all(topology.group_of(axis, rank) == group for rank in group)


@given(topologies())
def test_members_of_a_group_hold_one_whole_set_between_them(topology: Topology) -> None:
    sizes = {
        "data": topology.data_parallel_size,
        "context": topology.context_parallel_size,
        "expert": topology.expert_parallel_size,
        "engram": topology.engram_parallel_size,
    }
    for axis, size in sizes.items():
        for group in topology.groups(axis):  # type: ignore[arg-type]  # the keys are the axes
            assert [number_along(axis, topology.place(rank)) for rank in group] == list(range(size))


@given(topologies())
def test_ranks_with_the_same_requests_differ_in_their_context_number_only(topology: Topology) -> None:
    places = [topology.place(rank) for rank in range(topology.world_size)]
    assert len({(place.data, place.context) for place in places}) == topology.world_size
    for group in topology.groups("context"):
        assert len({topology.place(rank).data for rank in group}) == 1


@given(topologies())
def test_nodes_are_filled_in_order(topology: Topology) -> None:
    places = [topology.place(rank) for rank in range(topology.world_size)]
    per_node = topology.world_size // topology.num_nodes
    assert [(p.node, p.local_rank) for p in places] == [divmod(rank, per_node) for rank in range(topology.world_size)]


def test_the_picture_of_the_module_is_true() -> None:
    topology = Topology(
        data_parallel_size=4,
        context_parallel_size=2,
        expert_parallel_size=4,
        engram_parallel_size=2,
        ranks_per_node=4,
    )
    places = [topology.place(rank) for rank in range(8)]
    assert [place.node for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.data for place in places] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [place.context for place in places] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [place.expert for place in places] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [place.engram for place in places] == [0, 1, 0, 1, 0, 1, 0, 1]


def test_data_parallel_size_left_open_is_what_the_shared_parts_need() -> None:
    assert ParallelConfig(expert_parallel_size=8).topology().data_parallel_size == 8
    assert ParallelConfig(expert_parallel_size=8, context_parallel_size=2).topology().data_parallel_size == 4
    assert ParallelConfig(expert_parallel_size=3, context_parallel_size=2).topology().data_parallel_size == 3
    assert ParallelConfig(expert_parallel_size=2, context_parallel_size=4).topology().world_size == 4
    assert ParallelConfig(expert_parallel_size=4, engram_parallel_size=6).topology().world_size == 12
    assert ParallelConfig(engram_parallel_size=2).topology().world_size == 2
    assert ParallelConfig(context_parallel_size=4).topology().world_size == 4
    assert ParallelConfig(data_parallel_size=4).topology().expert_parallel_size == 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size is 0"),
        ({"data_parallel_size": True}, "data_parallel_size is True"),
        ({"data_parallel_size": 6, "expert_parallel_size": 4}, "expert_parallel_size is 4; .* = 6: one of 1, 2, 3, 6"),
        ({"expert_parallel_size": 2}, "expert_parallel_size is 2; it must divide .* = 1"),
        ({"data_parallel_size": 4, "engram_parallel_size": 8}, "engram_parallel_size is 8"),
        ({"data_parallel_size": 6, "ranks_per_node": 4}, "ranks_per_node is 4; 6 ranks .* do not fill"),
        ({"data_parallel_size": 65_536, "context_parallel_size": 2}, "is 131072; .* 65536"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology(**sizes)


@pytest.mark.bad_input
def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank is 2; it must be an integer from 0 to 1"):
        Topology(data_parallel_size=2).place(2)


@pytest.mark.bad_input
def test_an_axis_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="axis is 'tensor'"):
        Topology().groups("tensor")  # type: ignore[arg-type]  # on purpose
