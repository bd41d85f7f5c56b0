"""`SpeculationPlanner`: drafts to verify in this step and to propose for the next, and the guard over both.

    none       samplers                         / verify(rows)
    fixed      (samplers + sum of acceptances)  / (verify(rows + all drafts) + draft)
    scheduled  (samplers + realised survivals)  / (verify(rows + K) + draft)

The guard compares the three in expected tokens a second, with acceptances that were measured rather than promised by
the confidence head, and takes the best: so speculation costs at most the error of the cost model. Where it stopped
drafting it probes now and then, on a few requests, so rarely that probes cost a hundredth of the time. A policy decides
how fast tokens come, never which.
"""

from __future__ import annotations

import math
from enum import Enum

import numpy as np

from deepinfer_core.config.scheduler import SpeculationConfig
from deepinfer_core.scheduling.budget import Float64Array, choose_budget, fill_budget
from deepinfer_core.scheduling.cost import CostModel
from deepinfer_core.scheduling.plan import FloatArray, Int64Array

__all__ = ["AcceptanceMeter", "DraftPolicy", "SpeculationPlanner"]

_PROBE_STEPS = 64  # at least, between probes
_PROBE_DRAFTS = 16  # verified in a probe
_PROBE_SHARE = 0.01  # of the time
_DECAY = 0.98  # of the acceptance counts, a step
_PRIOR_ACCEPTANCE = 0.8  # of each draft, given the ones before it, until counts say otherwise
_PRIOR_WEIGHT = 4.0
_COLLAPSED_BELOW = 0.1  # of first drafts; a drafter that fits its target gets most of them right
_ENOUGH_DRAFTS = 1_000
_STAY = 1.01  # another policy must promise so many times the rate of the current one


class DraftPolicy(Enum):
    """What the guard chose."""

    NONE = "none"
    FIXED = "fixed"
    SCHEDULED = "scheduled"


class AcceptanceMeter:
    """Acceptance by position, decayed for decisions and in total for statistics; realised over promised survival."""

    def __init__(self, num_drafts: int) -> None:
        self.verified = np.zeros(num_drafts, np.int64)  # drafts verified at each position
        self.accepted = np.zeros(num_drafts, np.int64)
        self._tried = np.full(num_drafts, _PRIOR_WEIGHT)  # decayed: reached and verified
        self._taken = np.full(num_drafts, _PRIOR_WEIGHT * _PRIOR_ACCEPTANCE)
        self._promised = 1.0
        self._realised = 1.0

    def observe(self, num_verified: Int64Array, num_accepted: Int64Array, promised_tokens: float) -> None:
        """Count a step. `promised_tokens` = the survivals of its verified drafts, summed."""
        verified = _at_least(num_verified, len(self.verified))
        taken = _at_least(np.minimum(num_accepted, num_verified), len(self.verified))
        # The draft at j was reached if it was verified and all before it were accepted.
        reached = _at_least(np.minimum(num_accepted + 1, num_verified), len(self.verified))
        self.verified += verified
        self.accepted += taken
        self._tried = _DECAY * self._tried + reached
        self._taken = _DECAY * self._taken + taken
        if promised_tokens > 0:
            self._promised = _DECAY * self._promised + promised_tokens
            self._realised = _DECAY * self._realised + float(taken.sum())

    def survival(self) -> FloatArray:
        """Measured probability that drafts 1..j are all accepted [D]."""
        rate = (self._taken + _PRIOR_ACCEPTANCE) / (self._tried + 1.0)
        return np.cumprod(np.minimum(rate, 1.0)).astype(np.float32)

    @property
    def has_collapsed(self) -> bool:
        """Whether hardly any draft is accepted, as when the drafter belongs to other weights: worth a warning."""
        return bool(self.verified.sum() >= _ENOUGH_DRAFTS and self.survival()[0] < _COLLAPSED_BELOW)

    def expected_tokens(self, lengths: Int64Array) -> float:
        """Drafts that will be accepted of `lengths` [R] verified ones, by what was measured."""
        return float((_at_least(lengths, len(self._tried)) * self.survival()).sum())

    def realised_share(self) -> float:
        """Accepted drafts over the sum of their promised survivals."""
        return min(2.0, self._realised / self._promised)


class SpeculationPlanner:
    """Chooses lengths for the decode segments of a step. Without a cost model every draft that fits is verified."""

    def __init__(self, config: SpeculationConfig, cost: CostModel | None) -> None:
        self.num_drafts = config.num_drafts
        self.meter = AcceptanceMeter(config.num_drafts)
        self.policy = DraftPolicy.NONE if config.num_drafts == 0 else DraftPolicy.FIXED
        self.cost = cost
        self._scheduled = config.draft_schedule == "scheduled"
        self.needs_stale = config.verification == "ratio"  # coupled drafts may vote on themselves: nothing is biased
        self._steps_without = 0
        self._probe_after = _PROBE_STEPS

    @property
    def proposals(self) -> int:
        """Drafts that each request should propose after this step."""
        if self.policy is not DraftPolicy.NONE:
            return self.num_drafts
        return self.num_drafts if self._steps_without >= self._probe_after else 0

    def lengths(
        self, survival: FloatArray, stale: FloatArray, caps: Int64Array, other_rows: int, max_drafts: int
    ) -> Int64Array:
        """Drafts to verify [R] of requests that can verify caps[R] at most.

        survival, stale [D, R]: of the newest known proposals and of the ones before, which are looked at only where
        `needs_stale`. other_rows: rows of the step beside decode rows. max_drafts: what the step has room for in all.
        """
        available = int(caps.sum())
        if available == 0:
            self._steps_without += 1
            return np.zeros(len(caps), np.int64)
        self._steps_without = 0
        budget = min(max_drafts, available)
        if self.cost is not None and self._scheduled:
            drafting = self.cost.draft_seconds(len(caps))
            seconds = self.cost.verify_seconds(len(caps) + other_rows, budget + 1)
            was_off = self.policy is DraftPolicy.NONE
            budget = self._choose(stale if self.needs_stale else survival, caps, seconds, drafting)
            if was_off and self.policy is DraftPolicy.NONE:  # the drafts are there because this is a probe
                return self._probe(caps, seconds, drafting)
        return caps if budget == available else fill_budget(budget, survival, caps)

    def _choose(self, survival: FloatArray, caps: Int64Array, seconds: Float64Array, drafting: float) -> int:
        """Let the guard set the policy, and return its budget.

        seconds [<= K + 1] = the target's pass with k drafts; drafting = the drafter's.
        """
        requests, most = len(caps), len(seconds) - 1
        budget, promised = choose_budget(survival, caps, seconds + drafting, requests)
        promised *= self.meter.realised_share()
        measured = self.meter.expected_tokens(caps if most == int(caps.sum()) else fill_budget(most, survival, caps))
        rates = {
            DraftPolicy.NONE: requests / float(seconds[0]),
            DraftPolicy.FIXED: (requests + measured) / (float(seconds[most]) + drafting),
            DraftPolicy.SCHEDULED: (requests + promised) / (float(seconds[budget]) + drafting),
        }
        best = max(rates, key=lambda policy: rates[policy])
        if rates[best] > _STAY * rates[self.policy]:
            self.policy = best
        return {DraftPolicy.NONE: 0, DraftPolicy.FIXED: most, DraftPolicy.SCHEDULED: budget}[self.policy]

    def _probe(self, caps: Int64Array, seconds: Float64Array, drafting: float) -> Int64Array:
        """Verify the drafts of the first few requests, and put the next probe off until this one is paid for."""
        before = np.cumsum(caps) - caps
        lengths = np.minimum(caps, np.maximum(0, min(_PROBE_DRAFTS, len(seconds) - 1) - before))
        extra = float(seconds[int(lengths.sum())] - seconds[0]) + drafting
        self._probe_after = max(_PROBE_STEPS, math.ceil(extra / (_PROBE_SHARE * float(seconds[0]))))
        return lengths

    def observe(self, num_verified: Int64Array, num_accepted: Int64Array, promised_tokens: float) -> None:
        """Learn from a committed step."""
        if self.num_drafts:
            self.meter.observe(num_verified, num_accepted, promised_tokens)


def promised_tokens(survival: FloatArray, lengths: Int64Array) -> float:
    """Sum of the survivals [D, R] of the first lengths[r] drafts of each request."""
    verified = np.arange(len(survival), dtype=np.int64)[:, None] < lengths
    return float(survival.sum(where=verified, dtype=np.float64))


def _at_least(lengths: Int64Array, depth: int) -> Int64Array:
    """How many of `lengths` reach 1, 2, .. depth [depth]."""
    counts = np.bincount(lengths, minlength=depth + 1)
    return np.cumsum(counts[::-1])[::-1][1 : depth + 1]
