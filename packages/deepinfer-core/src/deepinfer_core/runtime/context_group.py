"""`ContextGroup`: what ranks that share prompts tell each other in a step, besides the rows themselves.

    leader      plan ─►    admit    ready?    layers, rows exchanged on the way    sample, draft    held ─►    failed?
    follower    plan ◄─    admit    ready?    layers, rows exchanged on the way    sample, draft    held ◄─    failed?

A rank that fails before the layers or behind them says so, and the step counts on none of them. One that fails within
leaves the others waiting for cache records that will not come: that is the end of the group. All ranks draw and draft
alike; what the leader holds counts, should a device's arithmetic differ.
"""

from __future__ import annotations

from enum import Enum

import torch

from deepinfer_core.cache.state import ModelState
from deepinfer_core.errors import EngineError, ParallelError
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.runtime.plan_codec import decode_plan, encode_plan
from deepinfer_core.scheduling.plan import StepPlan

__all__ = ["ContextGroup"]

_MAX_REASON_CHARS = 500


class _Stage(Enum):
    """How far this rank is in the step."""

    BEFORE = "before the layers"
    WITHIN = "within the layers"
    BEHIND = "behind the layers"
    FAILED = "all know that the step fails"


class ContextGroup:
    """`rows`: the ranks, with tensors on the device; `plans`: the same on the host, where nothing waits for a device.

    A step: `share_plan`, `begin`, `enter` and `leave` around the layers, `fail` if this rank cannot go on, `conclude`.
    """

    def __init__(self, rows: Communicator, plans: Communicator) -> None:
        self.rows = rows
        self._plans = plans
        self._stage = _Stage.BEFORE

    @property
    def leads(self) -> bool:
        """Whether the plans that the group runs are this rank's."""
        return self._plans.rank == 0

    def share_plan(self, plan: StepPlan | None) -> StepPlan | None:
        """What the leader runs next; None = nothing, the ranks keep others company. Followers give None."""
        data = encode_plan(plan) if plan is not None and self.leads else b""
        data = self._plans.broadcast_bytes(data, 0, "plan of a step")
        return plan if self.leads else decode_plan(data) if data else None

    def begin(self) -> None:
        """A step with rows begins."""
        self._stage = _Stage.BEFORE

    def enter(self) -> None:
        """Before the layers. Raises EngineError where another rank cannot follow."""
        failure = self._settle(None)
        if failure is not None:
            self._stage = _Stage.FAILED
            raise failure
        self._stage = _Stage.WITHIN

    def leave(self) -> None:
        """After the layers."""
        self._stage = _Stage.BEHIND

    def fail(self, failure: Exception) -> Exception:
        """This rank's part has failed. Raises ParallelError where the others now wait for its rows."""
        if self._stage is _Stage.WITHIN:
            raise ParallelError(f"a step failed within the layers of a context group: {failure}") from failure
        if self._stage is _Stage.BEFORE:
            self._stage = _Stage.FAILED
            self._settle(failure)
        return failure

    def conclude(self, failure: Exception | None, state: ModelState) -> Exception | None:
        """At the end of a step, failed or not: its own failure, or another rank's.

        The anchors and drafts of all slots become those of the leader.
        """
        if self._stage is not _Stage.BEHIND:
            return failure
        own = torch.cat([state.held_position[:, None], state.held_tokens], 1)
        held = self.rows.all_gather(own, "held tokens")[0]
        state.held_position.copy_(held[:, 0])
        state.held_tokens.copy_(held[:, 1:])
        return self._settle(failure)

    def _settle(self, failure: Exception | None) -> Exception | None:
        """This rank's failure, or that of another one. None: nobody has failed."""
        own = torch.tensor([failure is not None], dtype=torch.uint8)
        if not self._plans.all_gather(own, "how a step stands").any():
            return None
        reason = "" if failure is None else f"{type(failure).__name__}: {failure}"[:_MAX_REASON_CHARS]
        reasons = self._plans.all_gather_bytes(reason.encode(errors="replace"), "why a step fails")
        if failure is not None:
            return failure
        rank, said = next((rank, said) for rank, said in zip(self._plans.ranks, reasons, strict=True) if said)
        return EngineError(f"rank {rank}, which computes a part of long prompts, failed: {said.decode()}")
