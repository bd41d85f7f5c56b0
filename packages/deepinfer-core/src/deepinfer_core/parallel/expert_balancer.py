"""`ExpertBalancer`: the expert load balancer of a running rank, told of every step.

    step      0 ............. | window: counts ... | 10,000: load ─► mover | ... swap layer 0, 1, .. as they come ...
    notice    layers staged here ─► all ranks swap what the slowest of them has staged, at the same step

Counts are of real rows, by logical expert. All that decides about a step (its number, what is swapped before it) is
agreed between the ranks, so idle ranks and ranks with different drafts stay together. docs/expert_balance.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepinfer_core.config.engine import ExpertBalanceConfig
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.expert_moves import ExpertMover, StagedLayer, WindowLoad, slot_bytes
from deepinfer_core.parallel.experts import SharedExperts
from deepinfer_core.parallel.placement_tables import placement_table
from deepinfer_core.scheduling.expert_balance import BalancePolicy
from deepinfer_core.scheduling.expert_load import window_step
from deepinfer_core.scheduling.expert_placement import Placement

__all__ = ["ExpertBalancer"]

_log = logging.getLogger(__name__)


class ExpertBalancer:
    """Observes `exchange` and changes its tables and the `weights` between steps: layer -> contiguous tensors
    [S_local, ...] whose first index is the local slot.

    moves: the ranks that share the experts, for the mover's thread. placement: in force at the start, of the layers
    (draft stages stay as they are).
    """

    def __init__(
        self,
        exchange: SharedExperts,
        moves: Communicator,
        placement: Placement,
        weights: Mapping[int, Sequence[Tensor]],
        settings: ExpertBalanceConfig,
        policy: BalancePolicy,
    ) -> None:
        self._exchange, self._settings = exchange, settings
        self._weights = {layer: tuple(map(slot_bytes, tensors)) for layer, tensors in weights.items()}
        self._placement = placement
        self._num_layers = len(placement.expert_of_slot)
        device = exchange.comm.device
        self._device = device
        self._counts = torch.zeros(self._num_layers, placement.num_experts, dtype=torch.int64, device=device)
        self._counting = False
        self._num_counted = 0
        self._watch = _Stopwatch(device)
        self._num_jobs = 0
        self._plans_late = 0
        self._first_step_of_job = 0
        self.mover = ExpertMover(moves, placement, self._weights, policy)
        exchange.observer = self

    # ---- the exchange tells ------------------------------------------------------------------------------------------

    def routed(self, layer: int, ids: Tensor) -> None:
        """Real rows of this rank were routed to experts [R, k] of `layer`."""
        if self._counting and layer < self._num_layers and ids.numel():
            self._counts[layer] += torch.bincount(ids.flatten(), minlength=self._counts.shape[1])

    def experts_begin(self, layer: int) -> None:
        """The experts here start on what came."""
        if self._counting and layer < self._num_layers:
            self._watch.start()

    def experts_end(self, layer: int) -> None:
        """They are done."""
        if self._counting and layer < self._num_layers:
            self._watch.stop()

    # ---- the runner tells --------------------------------------------------------------------------------------------

    @property
    def num_staged(self) -> int:
        """Layers that this rank has received since the start: what its notice says."""
        return self.mover.num_staged

    def begin_step(self, step: int, num_staged_everywhere: int) -> None:
        """Before step `step`, with the smallest `num_staged` of any rank. Raises ParallelError where weights are not
        what they should be, or the mover cannot go on.
        """
        if self.mover.failure is not None:
            raise self.mover.failure
        while self.mover.num_swapped < num_staged_everywhere:
            self._swap(self.mover.take())
        interval, window = self._settings.expert_rearrangement_interval, self._settings.expert_count_window
        if step and window_step(step - 1, interval, window).ends:
            self._end_window(step)
        place = window_step(step, interval, window)
        if place.starts:
            self._counts.zero_()
            self._num_counted = 0
            self._watch.clear()
        self._counting = place.counted
        self._num_counted += place.counted
        if step and step % self._settings.expert_stat_interval == 0:
            self._report(step)

    def statistics(self) -> dict[str, object]:
        """Counters since the start, by name with units."""
        stats = self.mover.stats
        return {
            "expert_windows": stats.windows,
            "expert_plans_with_moves": stats.plans_with_moves,
            "expert_plans_late": self._plans_late,
            "expert_plans_given_up": stats.plans_given_up,
            "expert_layers_changed": stats.layers_changed,
            "experts_moved_here": stats.experts_moved,
            "expert_records_damaged": stats.damaged_records,
            "expert_move_seconds": stats.move_seconds,
            "expert_busiest_over_mean": stats.busiest_over_mean,
            "expert_busiest_over_mean_planned": stats.busiest_over_mean_planned,
            "expert_lasting_share": stats.lasting_share,
        }

    def close(self) -> None:
        """End the mover."""
        self.mover.close()

    # ---- windows -----------------------------------------------------------------------------------------------------

    def _end_window(self, step: int) -> None:
        """Hand the counts over; a plan of the window before that is not done by now is given up, on all ranks alike."""
        if self.mover.num_swapped < self._num_jobs * self._num_layers:
            self._plans_late += 1
            self.mover.give_up()
            left = self._num_jobs * self._num_layers - self.mover.num_swapped
            _log.warning(
                "step %d: the rearrangement of experts that began at step %d is not done, %d of %d layers are left; "
                "it is given up, and this window is not planned for",
                step,
                self._first_step_of_job,
                left,
                self._num_layers,
            )
            return
        written = None
        if self._device.type != "cpu":
            written = torch.Event(device=self._device.type)
            written.record()
        self._num_jobs += 1
        self._first_step_of_job = step
        self.mover.begin(
            WindowLoad(self._counts.to("cpu", copy=True), self._watch.seconds(), self._num_counted, written)
        )

    def _swap(self, staged: StagedLayer) -> None:
        if len(staged.slots):
            for tensor, new in zip(self._weights[staged.layer], staged.weights, strict=True):
                tensor.index_copy_(0, staged.slots, new)
        if staged.split is not None:
            placement = Placement(staged.expert_of_slot[None], self._placement.slot_start, self._placement.num_experts)
            self._exchange.tables[staged.layer] = placement_table(placement, 0, staged.split, self._device)
        self.mover.swapped(staged)

    def _report(self, step: int) -> None:
        stats = self.mover.stats
        if self._exchange.comm.rank == 0 and stats.windows:
            _log.info(
                "step %d: busiest rank %.3f of the mean in the last window of experts, %d moved here in %d plans",
                step,
                stats.busiest_over_mean,
                stats.experts_moved,
                stats.plans_with_moves,
            )


class _Stopwatch:
    """Seconds of marked stretches on the device's own clock; reading waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._start_s = 0.0
        self._events: list[torch.Event] = []  # start, stop, start, stop ..

    def start(self) -> None:
        if self._device.type == "cpu":
            self._start_s = time.perf_counter()
        else:
            self._mark()

    def stop(self) -> None:
        if self._device.type == "cpu":
            self._seconds += time.perf_counter() - self._start_s
        else:
            self._mark()

    def clear(self) -> None:
        self._seconds = 0.0
        self._events.clear()

    def seconds(self) -> float:
        if self._events:
            self._events[-1].synchronize()
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            self._seconds = sum(start.elapsed_time(stop) for start, stop in pairs) / 1e3
        return self._seconds

    def _mark(self) -> None:
        event = torch.Event(device=self._device.type, enable_timing=True)
        event.record()
        self._events.append(event)
