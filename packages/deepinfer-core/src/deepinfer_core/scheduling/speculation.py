"""`SpeculationPlanner`: drafts to verify in this step, and drafts to propose after it.

    known survivals ─► AcceptanceMeter.expected ─► choose_budget ─► fill_budget ─► lengths
                                 ▲                      ▲
    outcomes of verified drafts ─┘   CostModel, DraftGuard: none, fixed or scheduled

A policy decides how fast tokens come, never which.
"""

from __future__ import annotations

import numpy as np

from deepinfer_core.config.scheduler import SpeculationConfig
from deepinfer_core.scheduling.acceptance import AcceptanceMeter
from deepinfer_core.scheduling.budget import choose_budget, fill_budget
from deepinfer_core.scheduling.cost import CostModel
from deepinfer_core.scheduling.guard import DraftGuard, DraftPolicy, PromptRows
from deepinfer_core.scheduling.plan import FloatArray, Int32Array, Int64Array

__all__ = ["SpeculationPlanner"]

_EXPLORING_SHARE = (
    0.005  # of the time: steps that verify everything, to learn of drafts and sizes that are never chosen
)


class SpeculationPlanner:
    """Chooses lengths for the decode segments of a step. Without a cost model every draft that fits is verified."""

    def __init__(self, config: SpeculationConfig, cost: CostModel | None) -> None:
        self.num_drafts = config.num_drafts
        self.meter = AcceptanceMeter(config.num_drafts)
        self.cost = cost
        is_scheduled = config.num_drafts > 0 and config.draft_schedule == "scheduled" and cost is not None
        self._guard = DraftGuard(config.num_drafts, cost, self.meter) if is_scheduled and cost is not None else None
        self.needs_stale = config.verification == "ratio"  # coupled drafts may vote on themselves: nothing is biased
        self._saved_s = 0.0  # for the next step that verifies everything
        self._held_back = np.zeros((config.num_drafts, 0), np.float32)  # `needs_stale`: promises of the newest drafts

    @property
    def policy(self) -> DraftPolicy:
        """The current one."""
        if self._guard is not None:
            return self._guard.policy
        return DraftPolicy.FIXED if self.num_drafts else DraftPolicy.NONE

    @property
    def keeps_context(self) -> bool:
        """Whether the step must keep the drafter's context up to date."""
        return self._guard is None or self._guard.keeps_context

    @property
    def first_proposals(self) -> int:
        """Drafts that a request should propose when its prompt is done."""
        if self._guard is not None:
            return self.num_drafts if self._guard.drafts_now else 0
        return self.num_drafts

    def proposals(self, num_requests: int) -> Int32Array:
        """Drafts that each of so many decoding requests should propose after this step."""
        if self._guard is not None:
            return self._guard.proposals(num_requests)
        return np.full(num_requests, self.num_drafts, np.int32)

    def lengths(
        self, survival: FloatArray, stale: FloatArray, caps: Int64Array, prompts: PromptRows, max_drafts: int
    ) -> Int64Array:
        """Drafts to verify [R] of requests that can verify caps[R] at most.

        survival, stale [D, R]: of the newest known proposals and of the ones before, which are looked at only where
        `needs_stale`. max_drafts: what the step has room for in all.
        """
        if self._guard is not None and len(caps):
            self._guard.begin_step(len(caps), prompts)
        available = int(caps.sum())
        if available == 0:
            return np.zeros(len(caps), np.int64)
        budget, expected = min(max_drafts, available), None
        if self._guard is not None and self._guard.may_trim(prompts):
            expected = self.meter.expected(survival)
            judged = self.meter.expected(stale) if self.needs_stale else expected
            budget = self._choose(judged, caps, prompts, budget)
        if budget == available:
            return caps
        return fill_budget(budget, self.meter.expected(survival) if expected is None else expected, caps)

    def no_lengths(self, num_requests: int, prompts: PromptRows) -> Int64Array:
        """What `lengths` gives for requests that hold no drafts, in short."""
        if self._guard is not None and num_requests:
            self._guard.begin_step(num_requests, prompts)
        return np.zeros(num_requests, np.int64)

    def _choose(self, expected: FloatArray, caps: Int64Array, prompts: PromptRows, most: int) -> int:
        """The budget that pays best; now and then all of `most`, when that has been saved for."""
        if self.cost is None:
            return most
        num_requests, price = len(caps), None
        # Drafts of before a change of policy cost their rows only.
        draft_s = 0.0 if self.policy is DraftPolicy.NONE else self.cost.draft_seconds(num_requests)
        if prompts.num_rows and self._guard is not None:
            price = self._guard.price_beside(num_requests, prompts)
        seconds = self.cost.verify_seconds(num_requests + prompts.num_rows, most + 1) + draft_s
        budget = choose_budget(expected, caps, seconds, num_requests, price).num_drafts
        if self.policy is DraftPolicy.NONE or prompts.num_rows:
            return budget
        self._saved_s += _EXPLORING_SHARE * float(seconds[budget])
        if self._saved_s < float(seconds[-1] - seconds[budget]):
            return budget
        self._saved_s = 0.0
        return len(seconds) - 1

    def observe(self, survival: FloatArray, num_verified: Int64Array, num_accepted: Int64Array) -> None:
        """Learn what became of drafts [R] with planned survivals [D, R]."""
        self.meter.observe(survival, num_verified, num_accepted)

    def learn(self, survival: FloatArray) -> None:
        """Learn what new proposals [D, R] promise."""
        if self.needs_stale:  # they must not vote on the policy that decides on them
            survival, self._held_back = self._held_back, survival
        if self._guard is not None and survival.shape[1]:
            self._guard.learn(survival)
