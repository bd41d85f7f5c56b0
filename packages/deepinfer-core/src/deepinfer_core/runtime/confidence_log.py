"""`RecordingDevice`: a device that remembers how confident drafts were and what became of them.

    result of step N       confidences of the drafts that slot s proposed
    result of step N + 1   how many of them were verified, how many accepted        -> one record

What it collects is the input of `scheduling/calibration.py`. It wraps any device of the engine loop and changes
nothing. Confidences must be raw (all temperatures 1), and drafts the drafter's own: no request may have a grammar.
"""

from __future__ import annotations

import numpy as np

from deepinfer_core.runtime.engine_loop import Device
from deepinfer_core.scheduling.calibration import ConfidenceLog
from deepinfer_core.scheduling.plan import FloatArray, StepPlan, StepResult

__all__ = ["RecordingDevice"]


class RecordingDevice[Ticket]:
    """Passes every call on to `device`; keeps records of blocks of up to `num_drafts` drafts."""

    def __init__(self, device: Device[Ticket], num_drafts: int) -> None:
        self._device, self._num_drafts = device, num_drafts
        self._proposed: dict[int, tuple[int, FloatArray]] = {}  # slot -> generation, confidences [D]
        self._confidences: list[FloatArray] = []
        self._verified: list[int] = []
        self._accepted: list[int] = []

    def launch(self, plan: StepPlan) -> Ticket:
        """See `Device`."""
        return self._device.launch(plan)

    def wait(self, ticket: Ticket) -> StepResult:
        """See `Device`."""
        result = self._device.wait(ticket)
        for n, (slot, generation) in enumerate(zip(result.slot.tolist(), result.generation.tolist(), strict=True)):
            self._judge(slot, generation, int(result.num_verified[n]), int(result.num_tokens[n]) - 1)
            proposed = np.zeros(self._num_drafts, np.float32)
            proposed[: result.confidences.shape[1]] = result.confidences[n]
            self._proposed[slot] = generation, proposed
        return result

    def _judge(self, slot: int, generation: int, verified: int, accepted: int) -> None:
        known = self._proposed.get(slot)
        if verified and known is not None and known[0] == generation:
            self._confidences.append(known[1])
            self._verified.append(verified)
            self._accepted.append(accepted)

    def __len__(self) -> int:
        return len(self._verified)

    def log(self) -> ConfidenceLog:
        """Everything so far."""
        shape = (len(self), self._num_drafts)
        return ConfidenceLog(
            np.array(self._confidences, np.float32).reshape(shape),
            np.array(self._verified, np.int64),
            np.array(self._accepted, np.int64),
        )
