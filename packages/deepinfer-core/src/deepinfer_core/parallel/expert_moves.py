"""`ExpertMover`: weights of experts travel between ranks beside the steps, in a thread and a group of their own.

    window ends ─► counts of all ranks ─► the first rank decides ─► all know the plan
    layer l     ─► records to their new ranks: | weights of one expert | digest |      all_to_all, host memory
                ─► digests compared, all ranks vote ─► staged on the device ─► the steps swap it in (all at one step)
                ─► what now lies in its slots is read back and compared again

At most two layers are staged at once. A vote that is not unanimous (a damaged record, or a plan that took so long that
it was given up) ends the plan on all ranks: layers that are swapped stay, the rest keep their old places.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.scheduling.expert_balance import BalanceDecision, BalancePolicy
from deepinfer_core.scheduling.expert_load import TokenSplit
from deepinfer_core.scheduling.expert_placement import ExpertMove, Placement

__all__ = ["ExpertMover", "MoverStats", "StagedLayer", "WindowLoad", "slot_bytes"]

_DIGEST_BYTES = 16
_MAX_STAGED = 2
_CLOSE_S = 10.0


@dataclass(frozen=True, eq=False)
class WindowLoad:
    """What this rank saw in a window."""

    counts: Tensor  # [L, E] int64 on the host: tokens of its own rows that went to each expert
    expert_seconds: float  # that its experts took
    num_steps: int
    written: torch.Event | None  # on a device: after the last swap


@dataclass(frozen=True, eq=False)
class StagedLayer:
    """What one layer changes to. No `slots`: weights stay, only the split of tokens is new. `split` None: nothing."""

    layer: int
    expert_of_slot: np.ndarray  # [S]
    split: TokenSplit | None  # of this layer alone: [1, E, R]
    slots: Tensor  # [n] local slots that get new weights
    weights: tuple[Tensor, ...]  # [n, B] bytes on the device, as in the layer's weights
    digests: tuple[bytes, ...]  # [n]


@dataclass
class MoverStats:
    """Counters since the start; `busiest_over_mean` of the newest window, as it ran and as planned for the next."""

    windows: int = 0
    plans_with_moves: int = 0
    plans_given_up: int = 0
    layers_changed: int = 0
    experts_moved: int = 0  # received by this rank
    damaged_records: int = 0
    move_seconds: float = 0.0  # that layers were under way
    busiest_over_mean: float = 1.0
    busiest_over_mean_planned: float = 1.0
    lasting_share: float = 1.0
    history: list[tuple[float, float]] = field(default_factory=list)  # the two, of the newest windows


class _Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decision as the first rank tells the others."""

    expert_of_slot: list[list[int]]
    slots: bytes  # of the split, int32 [L, E, R]
    bounds: bytes  # int64
    replicas: int  # R
    moves: list[tuple[int, int, int, int]]
    before: list[float]
    after: list[float]
    lasting_share: float


class ExpertMover:
    """Runs `policy` and its plans. `weights`: layer -> bytes of each local slot [S_local, B], a tensor or more.

    `moves`: the ranks that share the experts, on the host. Every window gives one staged layer for each layer, changed
    or not, so that all ranks count alike. `failure` is set where the engine must not go on.
    """

    def __init__(
        self,
        moves: Communicator,
        placement: Placement,
        weights: Mapping[int, Sequence[Tensor]],
        policy: BalancePolicy,
        history: int = 1000,
    ) -> None:
        self._moves, self._placement, self._weights, self._policy = moves, placement, weights, policy
        self._device = weights[0][0].device
        self._stream = None if self._device.type == "cpu" else torch.get_device_module(self._device).Stream()
        self._history = history
        self._jobs: deque[WindowLoad] = deque()
        self._staged: deque[StagedLayer] = deque()
        self._in_place: deque[StagedLayer] = deque()  # swapped, not yet read back
        self._changed = threading.Condition()
        self._closing = False
        self._give_up = False
        self._seconds_per_move = sum(tensor.shape[1] for tensor in weights[0]) / 1e9  # a guess, until one was timed
        self.num_staged = 0
        self.num_swapped = 0
        self.failure: ParallelError | None = None
        self.stats = MoverStats()
        self._thread = threading.Thread(target=self._run, name="deepinfer-experts", daemon=True)
        self._thread.start()

    # ---- for the thread that steps -----------------------------------------------------------------------------------

    def begin(self, load: WindowLoad) -> None:
        """A window has ended, on all ranks."""
        with self._changed:
            self._jobs.append(load)
            self._give_up = False
            self._changed.notify_all()

    def give_up(self) -> None:
        """Drop what is left of the plan; all ranks have agreed to, so all say so."""
        self._give_up = True

    def take(self) -> StagedLayer:
        """The next layer to swap in; `num_staged` says that there is one."""
        with self._changed:
            return self._staged.popleft()

    def swapped(self, layer: StagedLayer) -> None:
        """It is in force on this rank."""
        with self._changed:
            self.num_swapped += 1
            if layer.digests:
                self._in_place.append(layer)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; a plan under way is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)  # one that waits for a rank that has ended comes later, or never

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (load := self._next_job()) is not None:
                if self._stream is None:
                    self._rearrange(load)
                else:
                    with torch.get_device_module(self._device).stream(self._stream):
                        self._rearrange(load)
        except ParallelError as error:
            self.failure = error
        except Exception as error:
            self.failure = ParallelError(f"moving experts failed: {type(error).__name__}: {error}")

    def _next_job(self) -> WindowLoad | None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._in_place or self._closing)
            self._verify_in_place()
            with self._changed:
                if self._jobs:  # also when closing: the other ranks have the same, and a vote ends it
                    return self._jobs.popleft()
                if self._closing:
                    return None

    def _rearrange(self, load: WindowLoad) -> None:
        if load.written is not None and self._stream is not None:
            self._stream.wait_event(load.written)
        plan = self._agree_on_plan(load)
        split = _split_of(plan, len(self._placement.expert_of_slot), self._placement.num_experts)
        moves_of: dict[int, list[ExpertMove]] = {}
        for move in plan.moves:
            moves_of.setdefault(move[0], []).append(ExpertMove(*move))
        chosen = np.array(plan.expert_of_slot, np.int64)
        given_up = False
        for layer in range(len(chosen)):
            staged = None
            moves = moves_of.get(layer, [])
            if moves and not given_up:
                start_s = time.perf_counter()
                staged = self._fetch(layer, moves, chosen[layer], split)
                self._seconds_per_move = (time.perf_counter() - start_s) / len(moves)
                self.stats.move_seconds += time.perf_counter() - start_s
                given_up = staged is None
            if given_up or staged is None:
                chosen_split = None if given_up else TokenSplit(split.slots[layer, None], split.bounds[layer, None])
                if given_up and moves:
                    chosen[layer] = self._placement.expert_of_slot[layer]
                staged = StagedLayer(layer, chosen[layer], chosen_split, torch.zeros(0, dtype=torch.int64), (), ())
            self._stage(staged)
        self.stats.plans_given_up += given_up
        self._placement = Placement(chosen, self._placement.slot_start, self._placement.num_experts)
        self._wait_until_swapped(0)

    def _agree_on_plan(self, load: WindowLoad) -> _Plan:
        total = self._moves.all_reduce_sum(load.counts, "expert counts of a window")
        nanos = torch.tensor([int(load.expert_seconds * 1e9), int(self._seconds_per_move * 1e9)])
        times = self._moves.all_gather(nanos, "times of a window").double()  # [ranks, 2]
        data = None
        if self._moves.rank == 0:
            num_layers = len(self._placement.expert_of_slot)
            decision = self._policy.decide(
                total.numpy().astype(np.float64),
                self._placement,
                layer_seconds=float(times[:, 0].mean()) / 1e9 / num_layers / max(1, load.num_steps),
                move_seconds=float(times[:, 1].max()) / 1e9,
            )
            data = msgspec.msgpack.encode(_plan_of(decision, self._policy.lasting_share))
        plan = msgspec.msgpack.decode(self._moves.broadcast_bytes(data, 0, "plan of experts"), type=_Plan)
        stats = self.stats
        stats.windows += 1
        stats.plans_with_moves += bool(plan.moves)
        stats.busiest_over_mean = float(np.mean(1 / np.array(plan.before)))
        stats.busiest_over_mean_planned = float(np.mean(1 / np.array(plan.after)))
        stats.lasting_share = plan.lasting_share
        stats.history = [*stats.history, (stats.busiest_over_mean, stats.busiest_over_mean_planned)][-self._history :]
        return plan

    def _fetch(
        self, layer: int, moves: Sequence[ExpertMove], expert_of_slot: np.ndarray, split: TokenSplit
    ) -> StagedLayer | None:
        """Exchange the weights of one layer; None where the plan ends here, on all ranks."""
        me, size = self._moves.rank, self._moves.size
        owner = self._placement.device_of_slot
        start = int(self._placement.slot_start[me])
        by_receiver = sorted(moves, key=lambda move: (owner[move.slot], move.slot))
        by_sender = sorted(moves, key=lambda move: (owner[move.source_slot], owner[move.slot], move.slot))
        sent = [move for move in by_receiver if owner[move.source_slot] == me]
        came = [move for move in by_sender if owner[move.slot] == me]
        records = [self._record(layer, move.source_slot - start) for move in sent]
        num_bytes = sum(tensor.shape[1] for tensor in self._weights[layer]) + _DIGEST_BYTES
        received = self._moves.all_to_all_rows(
            torch.stack(records) if records else torch.zeros(0, num_bytes, dtype=torch.uint8),
            np.bincount([owner[move.slot] for move in sent], minlength=size).tolist(),
            np.bincount([owner[move.source_slot] for move in came], minlength=size).tolist(),
            f"experts of layer {layer}",
        )
        digests = tuple(row[-_DIGEST_BYTES:].numpy().tobytes() for row in received)
        damaged = sum(_digest(row[:-_DIGEST_BYTES]) != want for row, want in zip(received, digests, strict=True))
        self.stats.damaged_records += damaged
        vote = torch.tensor([bool(damaged) or self._give_up or self._closing], dtype=torch.int64)
        if int(self._moves.all_reduce_max(vote, f"vote on layer {layer}")):
            return None
        self.stats.experts_moved += len(came)
        self.stats.layers_changed += 1
        return StagedLayer(
            layer,
            expert_of_slot,
            TokenSplit(split.slots[layer, None], split.bounds[layer, None]),
            torch.tensor([move.slot - start for move in came], dtype=torch.int64, device=self._device),
            self._on_device(layer, received),
            digests,
        )

    def _record(self, layer: int, slot: int) -> Tensor:
        """[B + 16] bytes on the host."""
        data = torch.cat([tensor[slot].cpu() for tensor in self._weights[layer]])
        return torch.cat([data, torch.frombuffer(bytearray(_digest(data)), dtype=torch.uint8)])

    def _on_device(self, layer: int, received: Tensor) -> tuple[Tensor, ...]:
        widths = [tensor.shape[1] for tensor in self._weights[layer]]
        staged = [part.to(self._device, copy=True) for part in received[:, :-_DIGEST_BYTES].split(widths, 1)]
        if self._stream is not None:
            self._stream.synchronize()
        return tuple(staged)

    # ---- staging -----------------------------------------------------------------------------------------------------

    def _stage(self, layer: StagedLayer) -> None:
        with self._changed:
            self._staged.append(layer)
            self.num_staged += 1
        if layer.digests:
            self._wait_until_swapped(_MAX_STAGED - 1)

    def _wait_until_swapped(self, most_left: int) -> None:
        """Until at most `most_left` staged layers are not in force; what is in force is read back."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_staged - self.num_swapped <= most_left or self._closing)
        self._verify_in_place()

    def _verify_in_place(self) -> None:
        while True:
            with self._changed:
                if not self._in_place:
                    return
                layer = self._in_place.popleft()
            for slot, digest in zip(layer.slots.tolist(), layer.digests, strict=True):
                if self._record(layer.layer, slot)[-_DIGEST_BYTES:].numpy().tobytes() != digest:
                    rank = self._moves.ranks[self._moves.rank]
                    raise ParallelError(
                        f"layer {layer.layer}: local slot {slot} of rank {rank} holds other bytes than the expert that "
                        "was moved there; restart the engine",
                        (rank,),
                    )


def slot_bytes(weight: Tensor) -> Tensor:
    """weight [S, ...] contiguous -> the same memory as [S, B] uint8: experts travel as bytes, whatever their dtype."""
    return weight.view(len(weight), -1).view(torch.uint8)


def _digest(data: Tensor) -> bytes:
    return hashlib.blake2b(memoryview(data.numpy()), digest_size=_DIGEST_BYTES).digest()


def _plan_of(decision: BalanceDecision, lasting_share: float) -> _Plan:
    return _Plan(
        decision.placement.expert_of_slot.tolist(),
        decision.split.slots.astype("<i4").tobytes(),
        decision.split.bounds.astype("<i8").tobytes(),
        decision.split.slots.shape[2],
        [(move.layer, move.slot, move.expert, move.source_slot) for move in decision.moves],
        decision.before.tolist(),
        decision.after.tolist(),
        lasting_share,
    )


def _split_of(plan: _Plan, num_layers: int, num_experts: int) -> TokenSplit:
    shape = (num_layers, num_experts, plan.replicas)
    slots = np.frombuffer(plan.slots, "<i4").reshape(shape).astype(np.int64)
    return TokenSplit(slots, np.frombuffer(plan.bounds, "<i8").reshape(shape).astype(np.int64))
