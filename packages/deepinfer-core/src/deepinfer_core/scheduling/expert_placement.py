"""Expert placement: which device holds which experts, with copies of the busy ones, so that none is much busier.

    slots     | device 0        | device 1        | ...    device d owns slots floor(d S / D) .. floor((d+1) S / D) - 1
    layer 0   | 3   17  0   9   | 5   3   11  2   |        expert 3 has two replicas, each takes half of its tokens
    layer 1   | 8   1   6   4   | 0   7   8   12  |

    load of a device  = sum over its slots of load[expert] / replicas[expert]
    balancedness      = mean load of a device / load of the busiest one, per layer, in (0, 1]

An expert layer takes as long as its busiest device, so its time is the ideal one / balancedness. `plan` is a pure
function: no clock, no randomness, the same answer on every rank. The search is in `expert_search`; what goes in and
what is done with the result (counts, token split, whether a move pays) in `expert_load`. docs/expert_balance.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer_core.config.checks import check_integer, check_number, shown
from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.expert_search import search_anew, search_from

__all__ = [
    "ExpertMove",
    "ExpertTopology",
    "Placement",
    "PlacementPlan",
    "balancedness",
    "device_loads",
    "moves_between",
    "plan",
]

type FloatArray = NDArray[np.float64]
type IntArray = NDArray[np.int64]

_MAX_DEVICES = 65_536
_MAX_SLOTS = 1_048_576
_MAX_EXPERTS = 65_536
_MAX_LOAD = 1e15  # tokens an expert: sums over any number of devices and squares stay exact enough


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTopology:
    """Devices that share the experts of every layer; those of a node are neighbours.

    num_expert_groups 0: replicas lie on any node. Otherwise node-limited: experts fall into this many groups of
    neighbours, and all replicas of a group's experts lie on one node, which has as many groups as any other (or one
    less). Raises ConfigError where devices or groups can't be spread so.
    """

    num_devices: int
    num_nodes: int = 1
    num_expert_groups: int = 0

    def __post_init__(self) -> None:
        check_integer("num_devices", self.num_devices, 1, _MAX_DEVICES, ConfigError)
        check_integer("num_nodes", self.num_nodes, 1, self.num_devices, ConfigError)
        check_integer("num_expert_groups", self.num_expert_groups, 0, _MAX_EXPERTS, ConfigError)
        if self.num_devices % self.num_nodes:
            raise ConfigError(
                f"num_devices is {self.num_devices}; it must be a multiple of the number of nodes, {self.num_nodes}"
            )
        if 0 < self.num_expert_groups < self.num_nodes:
            raise ConfigError(
                f"num_expert_groups is {self.num_expert_groups}, which leaves some of {self.num_nodes} nodes without "
                "experts; make it at least the number of nodes, or 0 for replicas on any node"
            )

    @property
    def devices_per_node(self) -> int:
        """Devices of one node."""
        return self.num_devices // self.num_nodes

    def slot_start(self, num_slots: int) -> IntArray:
        """[D + 1]: device d owns slots slot_start[d] .. slot_start[d + 1] - 1; devices differ by one slot at most."""
        return np.arange(self.num_devices + 1, dtype=np.int64) * num_slots // self.num_devices


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Which expert lies in which slot. Arrays are not to be written to."""

    expert_of_slot: IntArray  # [L, S]
    slot_start: IntArray  # [D + 1]
    num_experts: int

    @property
    def device_of_slot(self) -> IntArray:
        """[S]"""
        return np.repeat(np.arange(len(self.slot_start) - 1), np.diff(self.slot_start))

    def replicas(self) -> IntArray:
        """Replicas of each expert [L, E]."""
        layer = np.arange(len(self.expert_of_slot))[:, None] * self.num_experts
        counted = np.bincount((self.expert_of_slot + layer).ravel(), minlength=layer.size * self.num_experts)
        return counted.reshape(-1, self.num_experts)

    def slots_of_expert(self) -> IntArray:
        """[L, E, R]: slots of each expert, ascending, filled up with -1; R = most replicas of any expert."""
        replicas = self.replicas()
        table = np.full((*replicas.shape, int(replicas.max(initial=0))), -1, np.int64)
        order = np.argsort(self.expert_of_slot, axis=1, kind="stable")  # [L, S]
        expert = np.take_along_axis(self.expert_of_slot, order, axis=1)
        first = np.cumsum(replicas, axis=1) - replicas
        rank: IntArray = np.arange(order.shape[1], dtype=np.int64) - np.take_along_axis(first, expert, axis=1)
        table[np.arange(len(order))[:, None], expert, rank] = order
        return table


class ExpertMove(NamedTuple):
    """`slot` takes a copy of `expert` from `source_slot`. All sources are slots of the previous placement: stage every
    copy of a layer before the first slot is overwritten.
    """

    layer: int
    slot: int
    expert: int
    source_slot: int


@dataclass(frozen=True, slots=True, eq=False)
class PlacementPlan:
    """A placement, how to get there, and what it is expected to bring if the load stays."""

    placement: Placement
    moves: tuple[ExpertMove, ...]  # by layer, then slot; () without a previous placement
    balancedness: FloatArray  # [L] of `placement` under the load that was given
    previous_balancedness: FloatArray | None  # [L] of the previous placement under the same load

    def num_moves(self) -> IntArray:
        """Moves of each layer [L]."""
        return np.bincount([move.layer for move in self.moves], minlength=len(self.balancedness))


def plan(
    load: ArrayLike,
    previous: Placement | None,
    topology: ExpertTopology,
    slots: int,
    *,
    max_moved_share: float = 0.25,
    good_enough: float = 0.995,
) -> PlacementPlan:
    """Place `slots` replicas of the experts on the devices, at least one of each, none twice on a device without need.

    load [L, E]: tokens (or any measure of work) of each expert in each layer, finite and not negative.
    previous: where the experts lie now. A layer then keeps its replicas but for at most `max_moved_share` of its slots,
    is left alone where its balancedness is `good_enough` already, and never gets worse; groups stay on their nodes.
    (Needless copies on one device are always cleared away, whatever that moves.) None: place everything anew.

    Raises ConfigError for loads, slots or a previous placement that do not fit each other.
    """
    loads = _checked_load(load)
    num_layers, num_experts = loads.shape
    slots = check_integer("slots", slots, max(num_experts, topology.num_devices), _MAX_SLOTS, ConfigError)
    max_moved_share = check_number("max_moved_share", max_moved_share, 0, 1, ConfigError)
    good_enough = check_number("good_enough", good_enough, 0, 1, ConfigError)
    slot_start = topology.slot_start(slots)
    node_limits = _NodeLimits.of(topology, num_experts, slot_start)
    if previous is not None:
        _check_previous(previous, num_layers, num_experts, slot_start)
    chosen = np.empty((num_layers, slots), np.int64)
    for layer in range(num_layers):
        kept = None if previous is None else previous.expert_of_slot[layer]
        node_of_expert = node_limits.assign(layer, loads[layer], kept)
        for node in range(node_limits.num_nodes):
            start = node_limits.slot_start(node)
            own = slice(int(start[0]), int(start[-1]))
            chosen[layer, own] = _place_on_node(
                loads[layer],
                np.flatnonzero(node_of_expert == node),
                start - start[0],
                None if kept is None else kept[own],
                max_moved_share,
                good_enough,
            )
    chosen.flags.writeable = slot_start.flags.writeable = False
    placement = Placement(chosen, slot_start, num_experts)
    return PlacementPlan(
        placement,
        () if previous is None else moves_between(previous, placement, topology),
        balancedness(loads, placement),
        None if previous is None else balancedness(loads, previous),
    )


def device_loads(load: FloatArray, placement: Placement) -> FloatArray:
    """Load of each device [L, D] under load [L, E], if each expert's tokens are split evenly between its replicas."""
    share = np.take_along_axis(load / placement.replicas(), placement.expert_of_slot, axis=1)
    return np.add.reduceat(share, placement.slot_start[:-1], axis=1)


def balancedness(load: FloatArray, placement: Placement) -> FloatArray:
    """Mean load of a device / load of the busiest one, per layer [L]; 1 for a layer without load."""
    loads = device_loads(load, placement)
    busiest = loads.max(axis=1)
    return np.divide(loads.mean(axis=1), busiest, out=np.ones(len(loads)), where=busiest > 0)


def moves_between(previous: Placement, placement: Placement, topology: ExpertTopology) -> tuple[ExpertMove, ...]:
    """What each slot that changes must fetch, and from where: the same device, else the same node, else the device of
    another node; among equals from the one that has sent least in this layer.
    """
    device_of_slot: list[int] = placement.device_of_slot.tolist()
    devices_per_node = topology.devices_per_node
    moves: list[ExpertMove] = []
    for layer, (before, after) in enumerate(zip(previous.expert_of_slot, placement.expert_of_slot, strict=True)):
        slots_with: list[list[int]] = [[] for _ in range(placement.num_experts)]
        held: list[int] = before.tolist()
        for slot, expert in enumerate(held):
            slots_with[expert].append(slot)
        num_sent = [0] * topology.num_devices
        for slot in np.flatnonzero(before != after).tolist():
            expert, device = int(after[slot]), device_of_slot[slot]
            ranked: list[tuple[bool, bool, int, int]] = []
            for source in slots_with[expert]:
                sender = device_of_slot[source]
                is_far = sender // devices_per_node != device // devices_per_node
                ranked.append((sender != device, is_far, num_sent[sender], source))
            source = min(ranked)[-1]
            num_sent[device_of_slot[source]] += 1
            moves.append(ExpertMove(layer, slot, expert, source))
    return tuple(moves)


def _place_on_node(
    load: FloatArray,
    experts: IntArray,
    slot_start: IntArray,
    kept: IntArray | None,
    max_moved_share: float,
    good_enough: float,
) -> IntArray:
    """Experts of the slots [S] of one node, which holds `experts` (ids, ascending) and no other; load [E] of all."""
    if kept is None:
        return experts[search_anew(load[experts], slot_start)]
    number = np.zeros(len(load), np.int64)  # of an expert among those of the node
    number[experts] = np.arange(len(experts))
    max_moves = int(max_moved_share * len(kept))
    found = search_from(load[experts], slot_start, number[kept], max_moves, good_enough)
    return _in_place(experts[found], kept, slot_start)


def _in_place(found: IntArray, previous: IntArray, slot_start: IntArray) -> IntArray:
    """`found` [S] with experts that stay on a device back in the slots where `previous` has them."""
    settled = found.copy()
    for first, end in zip(slot_start[:-1].tolist(), slot_start[1:].tolist(), strict=True):
        arriving = found[first:end].tolist()
        if arriving == previous[first:end].tolist():
            continue
        vacated: list[int] = []
        for slot in range(first, end):
            if (expert := int(previous[slot])) in arriving:
                arriving.remove(expert)
                settled[slot] = expert
            else:
                vacated.append(slot)
        settled[vacated] = arriving
    return settled


# ---- node limits -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _NodeLimits:
    """Experts and devices cut into parts that are planned on their own: one part, or one a node."""

    num_nodes: int
    group_of_expert: IntArray  # [E]
    most_groups: int  # on one node
    all_slot_start: IntArray  # [D + 1]

    @classmethod
    def of(cls, topology: ExpertTopology, num_experts: int, slot_start: IntArray) -> _NodeLimits:
        groups = topology.num_expert_groups
        if groups == 0:
            return cls(1, np.zeros(num_experts, np.int64), 1, slot_start)
        if num_experts % groups:
            raise ConfigError(f"num_expert_groups is {groups}; it must divide the number of experts, {num_experts}")
        most_groups = -(-groups // topology.num_nodes)
        least_slots = int(np.diff(slot_start[:: topology.devices_per_node]).min())
        needed = most_groups * (num_experts // groups)
        if least_slots < needed:
            raise ConfigError(
                f"a node has {least_slots} slots and up to {most_groups} groups, {needed} experts; give at least "
                f"{needed * topology.num_nodes} slots"
            )
        return cls(topology.num_nodes, np.arange(num_experts) // (num_experts // groups), most_groups, slot_start)

    def slot_start(self, node: int) -> IntArray:
        """[devices of the node + 1]"""
        devices_per_node = (len(self.all_slot_start) - 1) // self.num_nodes
        return self.all_slot_start[node * devices_per_node : (node + 1) * devices_per_node + 1]

    def assign(self, layer: int, load: FloatArray, kept: IntArray | None) -> IntArray:
        """Node of each expert [E]: where `kept` [S] has it, else the heaviest group to the lightest node with room."""
        if self.num_nodes == 1:
            return np.zeros(len(load), np.int64)
        if kept is not None:
            return self._node_where_kept(layer, kept)
        group_load = np.bincount(self.group_of_expert, weights=load)
        node_load, num_groups = np.zeros(self.num_nodes), np.zeros(self.num_nodes, np.int64)
        node_of_group = np.empty(len(group_load), np.int64)
        # With G groups on N nodes, G mod N nodes get one group more than the others, so that none is left without.
        num_larger = len(group_load) % self.num_nodes or self.num_nodes
        for group in np.argsort(-group_load, kind="stable"):
            is_full = num_groups == self.most_groups
            if np.count_nonzero(is_full) == num_larger:
                is_full |= num_groups == len(group_load) // self.num_nodes
            node = int(np.where(is_full, np.inf, node_load).argmin())
            node_of_group[group] = node
            node_load[node] += group_load[group]
            num_groups[node] += 1
        return node_of_group[self.group_of_expert]

    def _node_where_kept(self, layer: int, kept: IntArray) -> IntArray:
        nodes = np.full(int(self.group_of_expert[-1]) + 1, -1, np.int64)
        for node in range(self.num_nodes):
            start = self.slot_start(node)
            groups = np.unique(self.group_of_expert[kept[start[0] : start[-1]]])
            if (nodes[groups] >= 0).any():
                group = int(groups[nodes[groups] >= 0][0])
                raise ConfigError(
                    f"the previous placement has group {group} of layer {layer} on nodes {nodes[group]} and {node}; "
                    "with num_expert_groups > 0 it must be on one: give previous=None to place all experts anew"
                )
            nodes[groups] = node
        return nodes[self.group_of_expert]


# ---- checks ----------------------------------------------------------------------------------------------------------


def _checked_load(load: ArrayLike) -> FloatArray:
    try:
        loads = np.asarray(load, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"load is {shown(load)}; it must be an array [layers, experts] of numbers") from error
    if loads.ndim != 2 or not 0 < loads.shape[1] <= _MAX_EXPERTS or not len(loads):
        raise ConfigError(f"load has shape {loads.shape}; it must be [layers, experts], 1 to {_MAX_EXPERTS} experts")
    wrong = np.argwhere(~((loads >= 0) & (loads <= _MAX_LOAD)))
    if len(wrong):
        layer, expert = wrong[0].tolist()
        raise ConfigError(
            f"load of layer {layer}, expert {expert} is {loads[layer, expert]}; it must be from 0 to {_MAX_LOAD:g}"
        )
    return loads


def _check_previous(previous: Placement, num_layers: int, num_experts: int, slot_start: IntArray) -> None:
    shape = previous.expert_of_slot.shape
    if shape != (num_layers, slot_start[-1]) or previous.num_experts != num_experts:
        raise ConfigError(
            f"the previous placement is of {shape} (layers, slots) and {previous.num_experts} experts, wanted is "
            f"({num_layers}, {slot_start[-1]}) and {num_experts}; give previous=None to place all experts anew"
        )
    if not np.array_equal(previous.slot_start, slot_start):
        raise ConfigError(
            f"the previous placement has {len(previous.slot_start) - 1} devices with other slots than the "
            f"{len(slot_start) - 1} of the topology; give previous=None to place all experts anew"
        )
    if previous.expert_of_slot.min() < 0 or previous.expert_of_slot.max() >= num_experts:
        raise ConfigError(f"the previous placement names an expert outside 0 to {num_experts - 1}")
    missing = np.argwhere(previous.replicas() == 0)
    if len(missing):
        layer, expert = missing[0].tolist()
        raise ConfigError(f"the previous placement has no replica of expert {expert} in layer {layer}")
