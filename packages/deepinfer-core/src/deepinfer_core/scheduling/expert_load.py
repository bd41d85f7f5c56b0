"""What goes into a placement of experts, and what is done with it: counts, token split, and whether a move pays.

    steps      0 ........................ | interval - window .... interval - 1 | rearranged, the next interval begins
    counted                                 xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx

    split      an expert's tokens are poured over the devices that hold it, to one level as far as they reach
               replica of (request, position): the i with bound[i-1] <= u < bound[i],
               u = (mix(request) + position · 2^32 / golden ratio) mod 2^32

    pays       layer time at perfect balance · (1/before - 1/after) · steps ahead  >  moves · time of a move

`u` walks through a request's positions in steps of the golden ratio, so that any run of n of them meets every share up
to O(log n) tokens, where a hash would be off by O(sqrt n). All functions are pure: every rank gets the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer_core.config.checks import check_integer, check_number
from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.expert_placement import Placement, PlacementPlan

__all__ = [
    "REPLICA_ONE",
    "REPLICA_STEP",
    "MoveCost",
    "TokenSplit",
    "WindowStep",
    "choose_slots",
    "count_experts",
    "loads_per_expert",
    "only_moves_that_pay",
    "replica_start",
    "split_tokens",
    "window_step",
]

type FloatArray = NDArray[np.float64]
type IntArray = NDArray[np.int64]

REPLICA_ONE: Final = 1 << 32  # the share 1 in the fixed point of the split
REPLICA_STEP: Final = 0x9E3779B9  # 2^32 / golden ratio, odd: visits all 2^32 values
_SWEEPS = 4  # over all experts with replicas; 12 more change the balance by less than 0.2 % (docs/expert_balance.md)


# ---- counts ----------------------------------------------------------------------------------------------------------


class WindowStep(NamedTuple):
    """What a step means for the counts."""

    starts: bool  # set the counts to 0 before it
    counted: bool  # add its counts
    ends: bool  # plan with the counts after it


def window_step(step: int, interval: int, window: int) -> WindowStep:
    """Whether step 0, 1, .. belongs to the window of `window` steps at the end of its interval of `interval` steps.

    A window longer than the interval is the whole interval; interval 0 = never rearrange, nothing is counted. `step`
    must be the number that all ranks agree on; steps without rows count as steps.
    """
    if interval == 0:
        return WindowStep(False, False, False)
    place, first = step % interval, max(0, interval - window)
    return WindowStep(place == first, place >= first, place == interval - 1)


def count_experts(expert_ids: NDArray[np.integer], num_rows: int, num_experts: int) -> IntArray:
    """Tokens of each expert [E] from the router's choice [P, k], of which only the first `num_rows` rows are real.

    Raises ConfigError for an id of a real row outside 0 to num_experts - 1.
    """
    num_rows = check_integer("num_rows", num_rows, 0, len(expert_ids), ConfigError)
    ids = expert_ids[:num_rows].ravel()
    if len(ids) and not 0 <= ids.min() <= ids.max() < num_experts:
        raise ConfigError(f"expert ids are from {ids.min()} to {ids.max()}; they must be from 0 to {num_experts - 1}")
    return np.bincount(ids, minlength=num_experts)


def loads_per_expert(counts_per_slot: NDArray[np.integer], placement: Placement) -> IntArray:
    """Tokens of each expert [L, E] from those of each slot [L, S], counted under this placement."""
    loads = np.zeros((len(counts_per_slot), placement.num_experts), np.int64)
    np.add.at(loads, (np.arange(len(loads))[:, None], placement.expert_of_slot), counts_per_slot)
    return loads


# ---- token split -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class TokenSplit:
    """Which replica takes which of an expert's tokens; what a device needs to choose by comparing integers."""

    slots: IntArray  # [L, E, R] as Placement.slots_of_expert: -1 beyond an expert's replicas
    bounds: IntArray  # [L, E, R] ascending, 2^32 from an expert's last replica on; replica i takes u < bounds[i]

    def shares(self) -> FloatArray:
        """Share of its expert's tokens that each replica takes [L, E, R]; those of an expert sum to 1."""
        return np.diff(self.bounds, axis=2, prepend=0) / REPLICA_ONE


def split_tokens(load: FloatArray, placement: Placement) -> TokenSplit:
    """Shares that level the devices under the last window's load [L, E]; without load, even shares.

    It costs no move, so it may follow every window, where a rearrangement waits for its interval.
    """
    slots = placement.slots_of_expert()
    bounds = np.full(slots.shape, REPLICA_ONE, np.int64)
    device_of_slot = placement.device_of_slot.tolist()
    replicas = placement.replicas()
    for layer in range(len(slots)):
        device_load = _even_loads(load[layer], placement, layer)
        holders = {
            expert: [device_of_slot[slot] for slot in slots[layer, expert, : replicas[layer, expert]].tolist()]
            for expert in np.flatnonzero(replicas[layer] > 1).tolist()
        }
        poured = {e: [load[layer, e] / len(devices)] * len(devices) for e, devices in holders.items()}
        for _ in range(_SWEEPS):
            for expert, devices in holders.items():
                poured[expert] = _pour(float(load[layer, expert]), devices, poured[expert], device_load)
        for expert, amounts in poured.items():
            total = sum(amounts)
            if total > 0:
                ends = np.rint(np.cumsum(amounts) / total * REPLICA_ONE)
            else:  # nothing was poured; if the expert is asked for next, its replicas share the work
                ends = np.arange(1, len(amounts) + 1) * REPLICA_ONE // len(amounts)
            bounds[layer, expert, : len(amounts) - 1] = np.minimum(ends, REPLICA_ONE)[:-1]
    return TokenSplit(slots, bounds)


def choose_slots(
    split: TokenSplit, layer: int, expert_ids: IntArray, request_keys: NDArray[np.uint64], positions: IntArray
) -> IntArray:
    """Slots [R, k] of the replicas that take rows with these experts [R, k], requests [R] and positions [R].

    request_keys: 64 bits that stay with a request wherever it runs (its seed), not its place in the batch.
    """
    step = positions.astype(np.uint64) * np.uint64(REPLICA_STEP)
    u = ((_mix(request_keys) + step) & np.uint64(REPLICA_ONE - 1)).astype(np.int64)  # [R]
    replica = (split.bounds[layer, expert_ids] <= u[:, None, None]).sum(axis=2)  # [R, k]
    return split.slots[layer, expert_ids, replica]


def replica_start(seed: int) -> int:
    """`u` of position 0 of the request with this seed; that of position p is p steps further, modulo 1."""
    return int(_mix(np.array([seed], np.uint64))[0]) & (REPLICA_ONE - 1)


def _mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer: neighbouring keys get unrelated values."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def _even_loads(load: FloatArray, placement: Placement, layer: int) -> list[float]:
    expert_of_slot = placement.expert_of_slot[layer]
    share = load / np.bincount(expert_of_slot, minlength=len(load))
    return np.add.reduceat(share[expert_of_slot], placement.slot_start[:-1]).tolist()


def _pour(amount: float, devices: list[int], poured: list[float], device_load: list[float]) -> list[float]:
    """Take what is `poured` into `devices` out of `device_load` and pour `amount` in anew, lowest first to one level.

    Copies on one device take equal parts of what the device gets.
    """
    for device, part in zip(devices, poured, strict=True):
        device_load[device] -= part
    lowest_first = sorted(set(devices), key=lambda device: device_load[device])
    below = 0.0
    level = 0.0
    for count, device in enumerate(lowest_first, start=1):
        below += device_load[device]
        level = (amount + below) / count
        if count == len(lowest_first) or level <= device_load[lowest_first[count]]:
            break
    parts = {device: max(0.0, level - device_load[device]) for device in lowest_first}
    for device, part in parts.items():
        device_load[device] += part
    return [parts[device] / devices.count(device) for device in devices]


# ---- whether it pays -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """What a rearrangement costs and for how long it helps. Times as measured on the running engine."""

    layer_seconds: float  # experts of one layer in one step at perfect balance: measured time · balancedness
    move_seconds: float  # one expert fetched: the time that it adds to the steps beside which it runs
    steps_ahead: int  # until the next rearrangement
    lasting_share: float = 1.0  # of a predicted gain that earlier rearrangements have turned out to bring

    def __post_init__(self) -> None:
        check_number("layer_seconds", self.layer_seconds, 0, 1e6, ConfigError)
        check_number("move_seconds", self.move_seconds, 0, 1e6, ConfigError)
        check_integer("steps_ahead", self.steps_ahead, 0, 2**31, ConfigError)
        check_number("lasting_share", self.lasting_share, 0, 1, ConfigError)


def only_moves_that_pay(plan: PlacementPlan, previous: Placement, cost: MoveCost) -> PlacementPlan:
    """`plan`, made with this `previous` placement, without the layers whose gain is not above their cost."""
    if plan.previous_balancedness is None:
        raise ConfigError("the plan was made without a previous placement: there is no gain to weigh")
    saved = cost.layer_seconds * (1 / plan.previous_balancedness - 1 / plan.balancedness)  # [L] a step
    pays = saved * cost.steps_ahead * cost.lasting_share > plan.num_moves() * cost.move_seconds
    expert_of_slot = np.where(pays[:, None], plan.placement.expert_of_slot, previous.expert_of_slot)
    return PlacementPlan(
        Placement(expert_of_slot, previous.slot_start, previous.num_experts),
        tuple(move for move in plan.moves if pays[move.layer]),
        np.where(pays, plan.balancedness, plan.previous_balancedness),
        plan.previous_balancedness,
    )
