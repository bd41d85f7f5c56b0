"""One layer's experts on the devices of one node: how many replicas each expert has, and where they lie.

    share[e] = load[e] / replicas[e]                    what one replica of e carries
    busiest  = max over devices of the sum of its shares        made small

    anew   counts      every spare slot goes to the expert with the largest share
           packing     largest share first, into the lightest devices that have room and no copy yet
           descent     the busiest device swaps a replica with another one, or a slot somewhere changes its expert:
                       taken is what leaves the busiest of the touched devices lightest, while that is a gain
           exploring   (few slots) the same from counts with one replica handed on, and so on from the best of those
    from   relief      a slot passes from f to the e with the largest share while load[f] / (n[f] - 1) < 0.9 share[e]
           descent     until the balance is good enough or the moves are spent

A device with c slots for E experts holds each at least floor(c / E) times: those slots are fixed. Its c mod E free
slots hold different experts, so an expert lies twice on a device only where it can't be helped. Ties go to the lower
index.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["NodeLayout", "search_anew", "search_from"]

type FloatArray = NDArray[np.float64]
type IntArray = NDArray[np.int64]
type BoolArray = NDArray[np.bool_]
type Changes = list[tuple[int, int]]  # (slot, its new expert); no device twice

_LEAST_GAIN = 1e-9  # of the busiest load: smaller gains are rounding
_MOST_STEPS = 64  # of one descent: bounds the time of a layer, which rarely needs as many
_MOST_EXPLORED_SLOTS = 64  # exploring a larger node takes longer than it gains: its shares are small beside a device
_EXPLORED_SLOTS = 1_536  # packed in all trials of a node together: bounds the time
_EXPLORED_BALANCE = 0.999  # mean / busiest that is not worth a further trial
_RELIEF_SHARE = 0.9  # a replica is passed on only for a share that is clearly smaller: loads will have drifted
_RELIEF_MOVES = 0.6  # of all moves; the rest is for the descent


class NodeLayout:
    """Which expert (0..E-1) lies in which slot of which device (0..D-1) of a node, and all that the search looks up.

    load [E] float64; slot_start [D + 1]: device d owns slots slot_start[d] .. slot_start[d + 1] - 1, none is without.
    """

    def __init__(self, load: FloatArray, slot_start: IntArray, expert_of_slot: IntArray) -> None:
        num_devices, num_experts = len(slot_start) - 1, len(load)
        slots_of_device = np.diff(slot_start)
        self.load = load
        self.slot_start = slot_start
        self.expert_of_slot = expert_of_slot.copy()  # [S]
        self.device_of_slot = np.repeat(np.arange(num_devices), slots_of_device)  # [S]
        self.copies = np.zeros((num_devices, num_experts), np.int64)  # [D, E]
        np.add.at(self.copies, (self.device_of_slot, self.expert_of_slot), 1)
        self.full_sets = slots_of_device // num_experts  # [D]
        self.replicas = self.copies.sum(axis=0)  # [E]
        self.is_free = self.free_slots()  # [S]
        self._first_copies = self.copies.copy()
        self.num_moves = 0  # slots whose expert must be fetched, against the layout at the start
        self._weigh()

    def free_slots(self) -> BoolArray:
        """All but the first floor(c / E) copies of every expert on each device."""
        free = np.ones(len(self.expert_of_slot), np.bool_)
        for device in np.flatnonzero(self.full_sets):
            first = self.slot_start[device]
            seen = np.zeros(len(self.load), np.int64)
            for slot in range(first, self.slot_start[device + 1]):
                expert = self.expert_of_slot[slot]
                free[slot] = seen[expert] >= self.full_sets[device]
                seen[expert] += 1
        return free

    def _weigh(self) -> None:
        self.share = self.load / self.replicas  # [E]
        self.slot_share = self.share[self.expert_of_slot]  # [S]
        self.device_load = np.add.reduceat(self.slot_share, self.slot_start[:-1])  # [D]

    @property
    def busiest(self) -> float:
        """Load of the busiest device."""
        return float(self.device_load.max())

    @property
    def balance(self) -> float:
        """Mean load of a device / load of the busiest one; 1 where there is no load."""
        return float(self.device_load.mean()) / self.busiest if self.busiest > 0 else 1.0

    def has_no_room(self) -> BoolArray:
        """[D, E]: another copy of the expert may not be put on the device."""
        return self.copies > self.full_sets[:, None]

    def moves_of(self, changes: Changes) -> int:
        """What `num_moves` would grow by."""
        grown = 0
        for slot, expert in changes:
            device, old = self.device_of_slot[slot], self.expert_of_slot[slot]
            grown += int(self.copies[device, expert] >= self._first_copies[device, expert])
            grown -= int(self.copies[device, old] > self._first_copies[device, old])
        return grown

    def change(self, changes: Changes) -> None:
        """Give slots new experts."""
        self.num_moves += self.moves_of(changes)
        for slot, expert in changes:
            device, old = self.device_of_slot[slot], self.expert_of_slot[slot]
            self.copies[device, old] -= 1
            self.copies[device, expert] += 1
            self.replicas[old] -= 1
            self.replicas[expert] += 1
            self.expert_of_slot[slot] = expert
        self._weigh()

    # ---- steps of the descent: (busiest touched device's load afterwards, changes) -----------------------------------

    def best_swap(self, busiest: int) -> tuple[float, Changes]:
        """The busiest device gives one replica away for a smaller one."""
        own = self._own_slots(busiest)
        if not len(own):
            return np.inf, []
        experts = self.expert_of_slot[own]  # [K]
        no_room = self.has_no_room()
        allowed = self.is_free & ~no_room[busiest, self.expert_of_slot]  # [S]
        other = np.flatnonzero(allowed & (self.device_of_slot != busiest))  # [T]
        if not len(other):
            return np.inf, []
        device = self.device_of_slot[other]
        given = self.slot_share[own][:, None] - self.slot_share[other]  # [K, T]
        after = np.maximum(self.device_load[busiest] - given, self.device_load[device] + given)
        after[no_room.T[experts][:, device]] = np.inf
        k, t = divmod(int(after.argmin()), len(other))
        changes = [(int(own[k]), int(self.expert_of_slot[other[t]])), (int(other[t]), int(experts[k]))]
        return float(after[k, t]), changes

    def best_handover(self, busiest: int) -> tuple[float, Changes]:
        """A slot passes from an expert with several replicas to another one, so that the busiest device has less."""
        fewer = self.load / np.maximum(self.replicas - 1, 1)  # share without one; of no meaning for a single replica
        more = self.load / (self.replicas + 1)  # share with one more
        first, second, holder = self._busiest_holders()
        return min(
            self._best_relief(busiest, fewer, more, np.where(holder == busiest, second, first)),
            self._best_help(busiest, fewer, more, first, second, holder),
        )

    def _own_slots(self, device: int) -> IntArray:
        slots: IntArray = np.arange(self.slot_start[device], self.slot_start[device + 1], dtype=np.int64)
        return slots[self.is_free[slots]]

    def _busiest_holders(self) -> tuple[FloatArray, FloatArray, IntArray]:
        """Largest and second largest load of the devices that hold each expert [E], -inf: none; the busiest one [E]."""
        held = np.where(self.copies > 0, self.device_load[:, None], -np.inf)
        experts = np.arange(len(self.load))
        holder = held.argmax(axis=0)
        first = held[holder, experts]
        held[holder, experts] = -np.inf
        return first, held.max(axis=0), holder

    def _best_relief(
        self, busiest: int, fewer: FloatArray, more: FloatArray, others: FloatArray
    ) -> tuple[float, Changes]:
        """A slot of the busiest device gets an expert that the device does not hold yet."""
        own = self._own_slots(busiest)
        own = own[self.replicas[self.expert_of_slot[own]] > 1]
        if not len(own):
            return np.inf, []
        lost = self.expert_of_slot[own]  # [K]
        growth = self.copies[busiest, lost] - 1  # further copies of it that stay and grow
        stays = self.device_load[busiest] - self.share[lost] + growth * (fewer - self.share)[lost]
        gained = np.where(self.has_no_room()[busiest], np.inf, more)  # [E]
        after = np.maximum(stays[:, None] + gained, (others + fewer - self.share)[lost][:, None])  # [K, E]
        k, expert = divmod(int(after.argmin()), len(self.load))
        return float(after[k, expert]), [(int(own[k]), expert)]

    def _best_help(
        self,
        busiest: int,
        fewer: FloatArray,
        more: FloatArray,
        first: FloatArray,
        second: FloatArray,
        holder: IntArray,
    ) -> tuple[float, Changes]:
        """A slot of another device gets an expert of the busiest one, which so carries less of it."""
        experts = np.flatnonzero(self.copies[busiest])  # [K]
        lost = self.expert_of_slot
        can_lose = (self.replicas > 1) & (self.copies[busiest] == 0)  # [E]
        other = np.flatnonzero(self.is_free & (self.device_of_slot != busiest) & can_lose[lost])  # [T]
        if not len(other):
            return np.inf, []
        lost, device = lost[other], self.device_of_slot[other]
        relief = self.copies[busiest, experts] * (self.share - more)[experts]
        elsewhere = np.where(holder[lost] == device, second[lost], first[lost]) + (fewer - self.share)[lost]  # [T]
        lighter = self.device_load[device] - self.share[lost]
        after = np.maximum(lighter + more[experts][:, None], elsewhere)  # [K, T]
        after = np.maximum(after, (self.device_load[busiest] - relief)[:, None])
        after[self.has_no_room().T[experts][:, device]] = np.inf
        k, t = divmod(int(after.argmin()), len(other))
        return float(after[k, t]), [(int(other[t]), int(experts[k]))]


# ---- counts and packing ----------------------------------------------------------------------------------------------


def spread_replicas(load: FloatArray, base: int, num_free: int, most: int) -> IntArray:
    """Replicas of each expert [E]: `base` and one of `num_free` more at a time to the largest share, up to `most`."""
    replicas = np.full(len(load), base, np.int64)
    if base == 0:
        replicas += 1
        num_free -= len(load)
    heap = [(-float(load[e] / replicas[e]), int(replicas[e]), e) for e in range(len(load)) if replicas[e] < most]
    heapq.heapify(heap)
    for _ in range(num_free):
        _, count, expert = heap[0]
        replicas[expert] = count + 1
        if count + 1 < most:
            heapq.heapreplace(heap, (-float(load[expert] / (count + 1)), count + 1, expert))
        else:
            heapq.heappop(heap)
    return replicas


def pack(load: FloatArray, slot_start: IntArray, replicas: IntArray) -> IntArray:
    """Experts of all slots [S] for given replica counts [E]: largest share first, to the lightest devices with room."""
    num_experts = len(load)
    full_sets, room = np.divmod(np.diff(slot_start), num_experts)  # [D]
    share = load / replicas
    first_free = slot_start[:-1] + full_sets * num_experts
    expert_of_slot = np.empty(slot_start[-1], np.int64)
    for device in np.flatnonzero(full_sets):
        sets = np.tile(np.arange(num_experts), full_sets[device])
        expert_of_slot[slot_start[device] : first_free[device]] = sets
    fill, end = first_free.tolist(), slot_start[1:].tolist()  # next slot of each device, and where it has no more
    open_load = np.where(room > 0, full_sets * share.sum(), np.inf)  # load of a device; inf: no room
    num_open = int(np.count_nonzero(room))
    spare = (replicas - full_sets.sum()).tolist()
    for expert in np.argsort(-share, kind="stable").tolist():
        wanted = spare[expert]
        lightest = [int(open_load.argmin())] if wanted == 1 else np.argsort(open_load, kind="stable")[:wanted].tolist()
        reachable = lightest[:num_open]
        for device in reachable:
            expert_of_slot[fill[device]] = expert
            fill[device] += 1
            open_load[device] += share[expert]
            if fill[device] == end[device]:
                open_load[device] = np.inf
                num_open -= 1
        for _ in range(wanted - len(reachable)):
            device = int(open_load.argmin())
            _make_room(expert, device, expert_of_slot, first_free, fill)
            if fill[device] == end[device]:
                open_load[device] = np.inf
                num_open -= 1
    return expert_of_slot


def _make_room(expert: int, device: int, expert_of_slot: IntArray, first: IntArray, fill: list[int]) -> None:
    """All devices with room hold `expert` already: a full one passes another expert on to `device` and takes it."""
    held = expert_of_slot[first[device] : fill[device]]
    for other in range(len(fill)):
        theirs = expert_of_slot[first[other] : fill[other]]
        movable = np.flatnonzero(~np.isin(theirs, held))
        if expert not in theirs and len(movable):
            expert_of_slot[fill[device]] = theirs[movable[0]]
            theirs[movable[0]] = expert
            fill[device] += 1
            return
    raise ValueError("free slots of two devices differ by more than one: slots must be spread evenly")


# ---- the search ------------------------------------------------------------------------------------------------------


def search_anew(load: FloatArray, slot_start: IntArray) -> IntArray:
    """Experts of all slots [S] with nothing to keep. load [E] >= 0; at least one slot a device and E slots in all."""
    full_sets, room = np.divmod(np.diff(slot_start), len(load))
    base = int(full_sets.sum())
    most = base + int(np.count_nonzero(room))
    best = _built(load, slot_start, spread_replicas(load, base, int(room.sum()), most))
    if len(best.expert_of_slot) <= _MOST_EXPLORED_SLOTS:
        best = _explore(best, max(base, 1), most)
    return best.expert_of_slot


def search_from(
    load: FloatArray, slot_start: IntArray, previous: IntArray, max_moves: int, good_enough: float
) -> IntArray:
    """Experts of all slots [S], at most `max_moves` of them fetched from elsewhere, and no busier than `previous` [S].

    Nothing is moved where mean / busiest is at least `good_enough`. Copies that lie twice on a device without need are
    first replaced, whatever moves that takes; the promises hold from there on.
    """
    kept = _kept(load, slot_start, previous)
    if kept.balance >= good_enough:
        return kept.expert_of_slot
    for relieve in (True, False):
        layout = _kept(load, slot_start, previous)
        if relieve:
            _relieve_large_shares(layout, int(_RELIEF_MOVES * max_moves))
        _descend(layout, max_moves, good_enough)
        if layout.busiest < kept.busiest * (1 - _LEAST_GAIN):
            return layout.expert_of_slot
    return kept.expert_of_slot


def _built(load: FloatArray, slot_start: IntArray, replicas: IntArray) -> NodeLayout:
    layout = NodeLayout(load, slot_start, pack(load, slot_start, replicas))
    _descend(layout)
    return layout


def _descend(layout: NodeLayout, max_moves: int | None = None, good_enough: float = 1.0) -> None:
    """Steps that each leave the devices they touch less busy than the busiest was."""
    for _ in range(_MOST_STEPS):
        if layout.balance >= good_enough:
            return
        busiest = int(layout.device_load.argmax())
        goal = layout.device_load[busiest] * (1 - _LEAST_GAIN)
        for best_step in (layout.best_swap, layout.best_handover):
            after, changes = best_step(busiest)
            is_affordable = max_moves is None or layout.num_moves + layout.moves_of(changes) <= max_moves
            if after < goal and is_affordable:
                layout.change(changes)
                break
        else:
            return


def _explore(start: NodeLayout, least: int, most: int) -> NodeLayout:
    """The best layout of a walk from counts to their best unseen neighbour, up or down, until the trials are spent."""
    best = current = start
    num_trials = _EXPLORED_SLOTS // len(start.expert_of_slot)
    seen = {start.replicas.tobytes()}
    while num_trials > 0 and best.balance < _EXPLORED_BALANCE:
        trials: list[NodeLayout] = []
        for replicas in _neighbours(start.load, current.replicas, least, most):
            if num_trials > 0 and replicas.tobytes() not in seen:
                seen.add(replicas.tobytes())
                trials.append(_built(start.load, start.slot_start, replicas))
                num_trials -= 1
        if not trials:
            break
        current = min(trials, key=lambda layout: (layout.busiest, float((layout.device_load**2).sum())))
        if current.busiest < best.busiest * (1 - _LEAST_GAIN):
            best = current
    return best


def _neighbours(load: FloatArray, replicas: IntArray, least: int, most: int) -> Iterator[IntArray]:
    """Counts with one replica handed on; first to the largest shares, from those that stay small without it."""
    takers = np.flatnonzero(replicas < most)
    givers = np.flatnonzero(replicas > least)
    fewer = load[givers] / (replicas[givers] - 1)
    for taker in takers[np.argsort(-load[takers] / replicas[takers], kind="stable")]:
        for giver in givers[np.argsort(fewer, kind="stable")]:
            if giver != taker:
                changed = replicas.copy()
                changed[giver] -= 1
                changed[taker] += 1
                yield changed


def _relieve_large_shares(layout: NodeLayout, max_moves: int) -> None:
    """Slots of experts that can spare a replica go to the experts with the largest shares."""
    while True:
        fewer = np.where(layout.replicas > 1, layout.load / np.maximum(layout.replicas - 1, 1), np.inf)
        taker = int(layout.share.argmax())
        device, held = layout.device_of_slot, layout.expert_of_slot
        has_room = ~layout.has_no_room()[device, taker] & layout.is_free
        slots = np.flatnonzero(has_room & (fewer[held] < _RELIEF_SHARE * layout.share[taker]))
        if not len(slots):
            return
        weight = layout.device_load[device[slots]] - layout.slot_share[slots]
        change = [(int(slots[np.lexsort((weight, fewer[held[slots]]))[0]]), taker)]
        if layout.num_moves + layout.moves_of(change) > max_moves:
            return
        layout.change(change)


def _kept(load: FloatArray, slot_start: IntArray, previous: IntArray) -> NodeLayout:
    layout = NodeLayout(load, slot_start, previous)
    _separate_copies(layout)
    return layout


def _separate_copies(layout: NodeLayout) -> None:
    """Superfluous copies on a device make room for what it lacks, else for the largest share that it may hold."""
    too_many = layout.copies.max(axis=1) > layout.full_sets + 1
    for device in np.flatnonzero(too_many | (layout.copies.min(axis=1) < layout.full_sets)):
        sets, copies = layout.full_sets[device], layout.copies[device]  # a view: follows the changes
        for slot in range(layout.slot_start[device], layout.slot_start[device + 1]):
            held = layout.expert_of_slot[slot]
            if copies[held] > sets + 1 or (copies[held] > sets and copies.min() < sets):
                gained = np.where(copies <= sets, layout.load / (layout.replicas + 1), -1.0)
                taker = copies.argmin() if copies.min() < sets else gained.argmax()
                layout.change([(slot, int(taker))])
    layout.is_free = layout.free_slots()
