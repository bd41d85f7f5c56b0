"""`DraftGuard`: whether to draft at all, and whether to verify everything that was drafted.

    none       R                          / verify(R)
    fixed      (R + all drafts' survivals) / (verify(R + all drafts) + draft(R))        expected tokens a second
    scheduled  (R + the K best)            / (verify(R + K) + draft(R))                 of R requests

Survivals are those of a pool of recent blocks, as `AcceptanceMeter` expects them; costs are measured. A pool fits any
load: P blocks stand for R requests, each with the weight R / P. While drafting, the pool follows the proposals and the
three are compared every few steps.

    not drafting   rest ............... | warm up | probe, probe ..          -> rest, or drafting
                   a share of the time    the drafter's context of the        a few requests draft; it goes on as long
                   is saved for a probe   newest positions is built           as that promises to pay, until it is sure

So without drafts a step pays nothing for the drafter, and probes cost a hundredth of the time. While drafting, a step
now and then goes without, paid for in the same way: it shows which part of a step's time is the drafter's.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from deepinfer_core.scheduling.acceptance import AcceptanceMeter
from deepinfer_core.scheduling.budget import MIN_SURVIVAL, Float64Array
from deepinfer_core.scheduling.cost import CostModel
from deepinfer_core.scheduling.plan import FloatArray, Int32Array

__all__ = ["DraftGuard", "DraftPolicy"]

_POOL_BLOCKS = 48
_ENOUGH_BLOCKS = 24  # to change the policy on
_FEW_BLOCKS = 4  # enough where the difference is large
_LARGE_DIFFERENCE = 1.25
_REVIEW_STEPS = 8
_STAY = 1.01  # another policy must promise so many times the rate of the current one
_PROBE_SHARE = 0.0075  # of the time
_REST_SHARE = 0.005  # of the time, for steps without drafting
_REST_STEPS = 8  # at least, between them
_SKIPPED_STEPS = 2  # at a time: the first still verifies drafts, the second is what a step would be without any
_PROBE_REQUESTS = 4
_LONGEST_PROBE_STEPS = 64
_WARM_UP_STEPS = 16  # rows of context with which a drafter is nearly as good as with a window of them
_CONTEXT_SHARE = 0.02  # of a step's time that keeping up the context takes, about
_OTHER_LOAD = 1.5  # a load so many times larger or smaller is judged anew


class DraftPolicy(Enum):
    """What the guard chose."""

    NONE = "none"
    FIXED = "fixed"
    SCHEDULED = "scheduled"


class _Stage(Enum):
    REST = 0
    WARM_UP = 1
    PROBE = 2


class DraftGuard:
    """Sets `policy`. `cost` and `meter` are read, never written."""

    def __init__(self, num_drafts: int, cost: CostModel, meter: AcceptanceMeter) -> None:
        self.policy = DraftPolicy.FIXED
        self._num_drafts, self._cost, self._meter = num_drafts, cost, meter
        self._pool = np.zeros((num_drafts, 0), np.float32)  # survivals as the drafter promised them, newest last
        self._stage = _Stage.REST
        self._steps = 0  # since the last review, or in the stage
        self._saved_s = 0.0  # for the next probe, or the next step without drafting
        self._worth = 0.0  # of drafting a step, in steps without
        self._skips = 0  # so many steps, with this one, go without
        self._since_skip = 0
        self._judged_load = 0
        self._turn = 0  # whose turn it is to be probed

    # ---- what a step does -----------------------------------------------------------------------------------------

    def begin_step(self, num_requests: int, other_rows: int) -> None:
        """A step with `num_requests` > 0 decoding requests and `other_rows` rows is planned: set policy and stage."""
        self._steps += 1
        self._skips = max(0, self._skips - 1)
        if self.policy is DraftPolicy.NONE:
            self._skips = 0
        elif self._skips == 0 and self._may_skip(num_requests, other_rows):
            self._skips = _SKIPPED_STEPS
        is_other_load = not 1 / _OTHER_LOAD <= num_requests / max(1, self._judged_load) <= _OTHER_LOAD
        if self._stage is not _Stage.REST:
            self._go_on(num_requests, other_rows)
        elif is_other_load or (self.policy is not DraftPolicy.NONE and self._steps >= _REVIEW_STEPS):
            self._review(num_requests, other_rows)
        elif self.policy is DraftPolicy.NONE:
            self._save(num_requests, other_rows)

    @property
    def is_probing(self) -> bool:
        """Whether the drafts of the step are there to learn from them."""
        return self._stage is _Stage.PROBE

    @property
    def keeps_context(self) -> bool:
        """Whether drafts may be wanted soon enough to keep up the drafter's context."""
        return self.policy is not DraftPolicy.NONE or self._stage is not _Stage.REST

    def proposals(self, num_requests: int) -> Int32Array:
        """Drafts that each of the step's requests should propose."""
        if self.policy is not DraftPolicy.NONE and not self._skips:
            return np.full(num_requests, self._num_drafts, np.int32)
        wanted = np.zeros(num_requests, np.int32)
        if self._stage is _Stage.PROBE:
            chosen = (self._turn + np.arange(min(num_requests, _PROBE_REQUESTS))) % num_requests
            wanted[chosen] = self._num_drafts
        return wanted

    def learn(self, survival: FloatArray) -> None:
        """Take the survivals [D, R] that new proposals promise into the pool."""
        if self.policy is DraftPolicy.NONE and self._stage is not _Stage.PROBE:
            return  # proposals of before the change
        every = -(-survival.shape[1] // _POOL_BLOCKS)
        self._pool = np.concatenate((self._pool, survival[:, ::every]), axis=1)[:, -_POOL_BLOCKS:]

    def _may_skip(self, num_requests: int, other_rows: int) -> bool:
        """Whether a step without drafting is paid for: it loses what drafting is worth."""
        self._since_skip += 1
        if self._since_skip < _REST_STEPS or self._pool.shape[1] < _ENOUGH_BLOCKS:
            return False
        step_s = float(self._cost.verify_seconds(num_requests + other_rows, 1)[0])
        self._saved_s += _REST_SHARE * step_s
        if self._saved_s < _SKIPPED_STEPS * step_s * self._worth:
            return False
        self._saved_s, self._since_skip = 0.0, 0
        return True

    @property
    def _context_share(self) -> float:
        """Of the known seconds of a step, what it would save without drafting."""
        return 0.0 if self.policy is DraftPolicy.NONE else _CONTEXT_SHARE

    # ---- judgement --------------------------------------------------------------------------------------------------

    def rates(self, num_requests: int, other_rows: int) -> dict[DraftPolicy, float]:
        """Expected tokens a second by policy, judged by the pool."""
        cost, num_blocks = self._cost, self._pool.shape[1]
        rows = num_requests + other_rows
        weight = num_requests / num_blocks  # of a draft in the pool
        values = np.sort(self._meter.expected(self._pool), axis=None)[::-1]
        values = values[values >= MIN_SURVIVAL][: max(0, int((cost.max_rows - rows) / weight))]
        count = np.arange(len(values) + 1, dtype=np.float64)
        tokens = num_requests + weight * np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
        at: Float64Array = rows + weight * count
        seconds = cost.verify_seconds_at(at)
        rate = tokens / (seconds + cost.draft_seconds(num_requests))
        return {
            DraftPolicy.NONE: num_requests / (float(seconds[0]) * (1.0 - self._context_share)),
            DraftPolicy.FIXED: float(rate[-1]),
            DraftPolicy.SCHEDULED: float(rate.max()),
        }

    def _best(self, num_requests: int, other_rows: int) -> DraftPolicy:
        """The policy with the best rate; the current one, unless that is clearly worse."""
        rates = self.rates(num_requests, other_rows)
        best = max(rates, key=lambda policy: rates[policy])
        self._worth = max(0.0, rates[best] / rates[DraftPolicy.NONE] - 1.0)
        return best if rates[best] > _STAY * rates[self.policy] else self.policy

    def _review(self, num_requests: int, other_rows: int) -> None:
        self._steps = 0
        num_blocks = self._pool.shape[1]
        if self.policy is DraftPolicy.NONE or num_blocks >= _ENOUGH_BLOCKS:
            self._judged_load = num_requests
            if num_blocks:
                self.policy = self._best(num_requests, other_rows)
        elif num_blocks >= _FEW_BLOCKS:
            rates = self.rates(num_requests, other_rows)
            if rates[DraftPolicy.NONE] > _LARGE_DIFFERENCE * max(rates[p] for p in rates if p is not DraftPolicy.NONE):
                self.policy, self._judged_load = DraftPolicy.NONE, num_requests

    # ---- probes -----------------------------------------------------------------------------------------------------

    def _save(self, num_requests: int, other_rows: int) -> None:
        """Put a share of this step's time aside; begin when two steps of a probe are paid for."""
        cost, rows = self._cost, num_requests + other_rows
        probed = min(num_requests, _PROBE_REQUESTS)
        step_s, probe_s = cost.verify_seconds_at(
            np.array([rows, rows + probed * self._num_drafts], np.float64)
        ).tolist()
        self._saved_s += _PROBE_SHARE * step_s
        price_s = 2 * (probe_s - step_s + cost.draft_seconds(probed)) + _WARM_UP_STEPS * _CONTEXT_SHARE * step_s
        if self._saved_s >= price_s:
            self._stage, self._steps = _Stage.WARM_UP, 0

    def _go_on(self, num_requests: int, other_rows: int) -> None:
        if self._stage is _Stage.WARM_UP:
            if self._steps >= _WARM_UP_STEPS:
                self._stage, self._steps = _Stage.PROBE, 0
                self._pool = self._pool[:, :0]
                self._turn += _PROBE_REQUESTS
            return
        num_blocks = self._pool.shape[1]
        if num_blocks == 0 and self._steps < _LONGEST_PROBE_STEPS:
            return  # its first result is not there yet
        self._judged_load = num_requests
        best = self._best(num_requests, other_rows) if num_blocks else DraftPolicy.NONE
        if best is DraftPolicy.NONE or num_blocks >= _ENOUGH_BLOCKS or self._steps >= _LONGEST_PROBE_STEPS:
            self.policy, self._stage, self._steps, self._saved_s = best, _Stage.REST, 0, 0.0
