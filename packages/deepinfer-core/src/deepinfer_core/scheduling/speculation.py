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
from dataclasses import dataclass
from enum import Enum

import numpy as np

from deepinfer_core.config.scheduler import SpeculationConfig
from deepinfer_core.scheduling.budget import choose_budget, fill_budget
from deepinfer_core.scheduling.cost import CostModel
from deepinfer_core.scheduling.plan import FloatArray, Int64Array

__all__ = ["AcceptanceMeter", "DraftPolicy", "SpeculationPlanner"]

_PROBE_STEPS = 64  # at least, between probes
_PROBE_DRAFTS = 16  # verified in a probe
_PROBE_SHARE = 0.01  # of the time
_DECAY = 0.98  # of the acceptance counts, a step
_PRIOR_ACCEPTANCE = 0.8  # of each draft, given the ones before it, until counts say otherwise
_PRIOR_WEIGHT = 4.0
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

    def realised_share(self) -> float:
        """Accepted drafts over the sum of their promised survivals."""
        return min(2.0, self._realised / self._promised)


@dataclass(slots=True)
class _Choice:
    lengths: Int64Array
    rate: float


class SpeculationPlanner:
    """Chooses lengths for the decode segments of a step. Without a cost model every draft that fits is verified."""

    def __init__(self, config: SpeculationConfig, cost: CostModel | None) -> None:
        self.num_drafts = config.num_drafts
        self.meter = AcceptanceMeter(config.num_drafts)
        self.policy = DraftPolicy.NONE if config.num_drafts == 0 else DraftPolicy.FIXED
        self.cost = cost
        self._scheduled = config.draft_schedule == "scheduled"
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

        survival, stale [D, R]: of the newest known proposals and of the ones before. other_rows: rows of the step
        beside decode rows. max_drafts: what the step has room for in all.
        """
        available = int(caps.sum())
        if available == 0:
            self._steps_without += 1
            return np.zeros(len(caps), np.int64)
        self._steps_without = 0
        if self.cost is None or not self._scheduled:
            return caps if available <= max_drafts else fill_budget(max_drafts, survival, caps)
        return self._guarded(self.cost, survival, stale, caps, other_rows, max_drafts)

    def _guarded(
        self, cost: CostModel, survival: FloatArray, stale: FloatArray, caps: Int64Array, other_rows: int, most: int
    ) -> Int64Array:
        requests = len(caps)
        rows = requests + other_rows
        drafting = cost.draft_seconds(requests)
        seconds = cost.verify_seconds(rows, min(most, int(caps.sum())) + 1) + drafting

        budget = choose_budget(stale, caps, seconds, requests)
        scheduled = fill_budget(budget, survival, caps)
        promised = promised_tokens(stale, scheduled) * self.meter.realised_share()
        fixed = caps if int(caps.sum()) < len(seconds) else fill_budget(len(seconds) - 1, survival, caps)
        measured = np.concatenate((np.zeros(1), np.cumsum(self.meter.survival(), dtype=np.float64)))

        choices = {
            DraftPolicy.NONE: _Choice(np.zeros(requests, np.int64), requests / (float(seconds[0]) - drafting)),
            DraftPolicy.FIXED: _Choice(
                fixed, (requests + float(measured[fixed].sum())) / float(seconds[int(fixed.sum())])
            ),
            DraftPolicy.SCHEDULED: _Choice(scheduled, (requests + promised) / float(seconds[int(scheduled.sum())])),
        }
        best = max(choices, key=lambda policy: choices[policy].rate)
        if choices[best].rate > _STAY * choices[self.policy].rate:
            self.policy = best
        elif self.policy is DraftPolicy.NONE:  # the drafts are there because this is a probe
            probe = np.minimum(caps, np.maximum(0, _PROBE_DRAFTS - (np.cumsum(caps) - caps)))
            extra = float(seconds[min(int(probe.sum()), len(seconds) - 1)] - seconds[0]) + drafting
            self._probe_after = max(_PROBE_STEPS, math.ceil(extra / (_PROBE_SHARE * (float(seconds[0]) - drafting))))
            return probe if int(probe.sum()) < len(seconds) else choices[DraftPolicy.NONE].lengths
        return choices[self.policy].lengths

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
