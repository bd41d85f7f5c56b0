"""`DraftGuard`: whether to draft at all, and whether to verify everything that was drafted.

    none       R                          / verify(R)
    fixed      (R + all drafts' survivals) / (verify(R + all drafts) + draft(R))        expected tokens a second
    scheduled  (R + the K best)            / (verify(R + K) + draft(R))                 of R requests

Survivals are those of a pool of recent blocks, as `AcceptanceMeter` expects them; costs are measured. A pool fits any
load: P blocks stand for R requests, each with the weight R / P. While drafting, the pool follows the proposals and the
three are compared every few steps, and whenever the load changes.

    not drafting   standby .......... | rest ............. | warm up ......... | probe, probe .. -> rest, or drafting
                   its context is kept  a share of the time  context of the      a few requests draft; it goes on as
                   up: another load     is saved for a       newest positions    long as that promises to pay, until
                   may want drafts      probe                is built            it is sure

So in the long run a step without drafts pays nothing for the drafter, and probes cost a hundredth of the time. While
drafting, a step now and then goes without, paid for in the same way: it shows which part of a step's time is the
drafter's.

    beside prompts   drafting pays if   tokens gained > best rate of the three x seconds added

The time of their rows is spent in any case: a draft that shares it with them is not cheaper for it, and one that pushes
a row of theirs into another step delays it by that row. Where drafting does not pay beside them, a step drafts all the
same now and then, paid for as a probe is: there may be no step without prompts to learn from.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np

from deepinfer_core.scheduling.acceptance import AcceptanceMeter
from deepinfer_core.scheduling.budget import MIN_SURVIVAL, Float64Array
from deepinfer_core.scheduling.cost import CostModel
from deepinfer_core.scheduling.plan import FloatArray, Int32Array

__all__ = ["DraftGuard", "DraftPolicy", "PromptRows"]

_POOL_BLOCKS = 48
_ENOUGH_BLOCKS = 24  # to change the policy on
_FEW_BLOCKS = 4  # enough where the difference is large
_LARGE_DIFFERENCE = 1.25
_REVIEW_STEPS = 8
_STAY = 1.01  # another policy must promise so many times the rate of the current one
_PROBE_SHARE = 0.0075  # of the time
_SAVING_STEPS = 8
_REST_SHARE = 0.005  # of the time, for steps without drafting
_REST_STEPS = 8  # at least, between them
_SKIPPED_STEPS = 2  # at a time: the first still verifies drafts, the second is what a step would be without any
_PROBE_REQUESTS = 4
_LONGEST_PROBE_STEPS = 64
_WARM_UP_STEPS = 16  # rows of context with which a drafter is nearly as good as with a window of them
_STANDBY_STEPS = 128  # without drafts that the drafter's context is kept up: costs what a warm-up too many would
_CONTEXT_SHARE = 0.02  # of a step's time that keeping up the context takes, about
_OTHER_LOAD = 1.2  # a load so many times larger or smaller is judged anew
_BACKLOG_PRICE = 2.0  # of a second while more prompts wait than fit


class PromptRows(NamedTuple):
    """Rows of a step beside those of decoding requests, and whether more of them wait than fit."""

    num_rows: int = 0
    more_wait: bool = False

    def price(self, rate: float) -> float:
        """Tokens that a second of the step must bring, if steps without prompts bring `rate`.

        A token that comes early saves a later step its average share of seconds if another request takes the place that
        it makes, and only its row if not, as while prompts that all fit into the slots wait for rows. Between the two.
        """
        return rate * _BACKLOG_PRICE if self.more_wait else rate


class DraftPolicy(Enum):
    """What the guard chose."""

    NONE = "none"
    FIXED = "fixed"
    SCHEDULED = "scheduled"


class _Stage(Enum):
    """Of an engine that does not draft."""

    STANDBY = 0
    REST = 1
    WARM_UP = 2
    PROBE = 3


class DraftGuard:
    """Sets `policy`. `cost` and `meter` are read, never written."""

    def __init__(self, num_drafts: int, cost: CostModel, meter: AcceptanceMeter) -> None:
        self.policy = DraftPolicy.FIXED
        self._num_drafts, self._cost, self._meter = num_drafts, cost, meter
        self._pool = np.zeros((num_drafts, 0), np.float32)  # survivals as the drafter promised them, newest last
        self._stage = _Stage.STANDBY
        self._steps = 0  # since the last review, or in the stage
        self._standby_steps = 0  # that are left
        self._saved_s = 0.0  # for the next probe, or the next step without drafting
        self._worth = 0.0  # of drafting a step, in steps without
        self._skips = 0  # so many steps, with this one, go without
        self._since_skip = 0
        self._judged_load = 0
        self._rate = 0.0  # the best of the last comparison, tokens a second
        self._comparisons = 0
        self._pays_beside = True  # drafting, beside the prompts of the step
        self._was_worth_it = True  # the same, when it was looked at last: with what is in `_seen_beside`
        self._seen_beside: tuple[int, bool, int, int] | None = None
        self._saved_beside_s = 0.0  # for the next step that drafts beside prompts though it does not pay
        self._turn = 0  # whose turn it is to be probed

    # ---- what a step does -----------------------------------------------------------------------------------------

    def begin_step(self, num_requests: int, prompts: PromptRows) -> None:
        """A step with `num_requests` > 0 decoding requests is planned: set policy and stage."""
        self._steps += 1
        self._skips = max(0, self._skips - 1)
        if self.policy is DraftPolicy.NONE:
            self._skips = 0
        elif self._skips == 0 and self._may_skip(num_requests, prompts.num_rows):
            self._skips = _SKIPPED_STEPS
        self._standby_steps = max(0, self._standby_steps - 1)
        if self.policy is not DraftPolicy.NONE:
            self._standby_steps = _STANDBY_STEPS
        elif self._stage is _Stage.STANDBY and not self._standby_steps:
            self._stage = _Stage.REST
        is_other_load = not 1 / _OTHER_LOAD <= num_requests / max(1, self._judged_load) <= _OTHER_LOAD
        if self._stage in (_Stage.WARM_UP, _Stage.PROBE):
            self._go_on(num_requests)
        elif self.policy is DraftPolicy.NONE:
            # A load that is another one every other step, as of requests with grammars, saves for probes, too.
            if not (is_other_load and self._wakes(num_requests)):
                self._save(num_requests, prompts.num_rows)
        elif is_other_load or self._steps >= _REVIEW_STEPS:
            self._review(num_requests)
        self._pays_beside = not prompts.num_rows or self._drafting_pays_beside(num_requests, prompts)

    def price_beside(self, num_requests: int, prompts: PromptRows) -> float:
        """Tokens that a second of a step beside `prompts` must bring; the best rate is that of the last comparison."""
        plain = num_requests / float(self._cost.verify_seconds(num_requests, 1)[0])
        return prompts.price(max(self._rate, plain))

    @property
    def drafts_now(self) -> bool:
        """Whether all requests of the step propose drafts, newcomers too."""
        return self.policy is not DraftPolicy.NONE and not self._skips and self._pays_beside

    def may_trim(self, prompts: PromptRows) -> bool:
        """Whether drafts are weighed against their rows. While prompts wait for rows, they are whatever the policy."""
        return not self.is_probing and (self.policy is not DraftPolicy.FIXED or prompts.more_wait)

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
        if self.drafts_now:
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

    def _foresee(self, num_requests: int, other_rows: int) -> tuple[Float64Array, Float64Array]:
        """Tokens and seconds of the target's pass with the 0, 1, .. best drafts, judged by the pool."""
        num_blocks, rows = self._pool.shape[1], num_requests + other_rows
        weight = num_requests / num_blocks  # of a draft in the pool
        values = np.sort(self._meter.expected(self._pool), axis=None)[::-1]
        values = values[values >= MIN_SURVIVAL][: max(0, int((self._cost.max_rows - rows) / weight))]
        tokens = num_requests + weight * np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
        at: Float64Array = rows + weight * np.arange(len(values) + 1, dtype=np.float64)
        return tokens, self._cost.verify_seconds_at(at)

    def _rates(self, num_requests: int) -> dict[DraftPolicy, float]:
        """Compare the policies: expected tokens a second of each, in steps without prompts."""
        tokens, seconds = self._foresee(num_requests, 0)
        rate = tokens / (seconds + self._cost.draft_seconds(num_requests))
        rates = {
            DraftPolicy.NONE: num_requests / (float(seconds[0]) * (1.0 - self._context_share)),
            DraftPolicy.FIXED: float(rate[-1]),
            DraftPolicy.SCHEDULED: float(rate.max()),
        }
        self._rate = max(rates.values())
        self._comparisons += 1
        return rates

    def _drafting_pays_beside(self, num_requests: int, prompts: PromptRows) -> bool:
        """Whether drafts for the next step bring more beside these prompts than their time is worth.

        Looked at anew when the policies were compared, or the prompts changed a lot: with many requests each step
        runs some rows of prompts.
        """
        if self.policy is DraftPolicy.NONE or self._pool.shape[1] < _ENOUGH_BLOCKS:
            return True
        seen = self._comparisons, prompts.more_wait, prompts.num_rows.bit_length(), num_requests.bit_length()
        if seen != self._seen_beside:
            self._seen_beside = seen
            price = self.price_beside(num_requests, prompts)
            tokens, seconds = self._foresee(num_requests, prompts.num_rows)
            worth = tokens - price * seconds
            self._was_worth_it = float(worth.max() - worth[0]) > price * self._cost.draft_seconds(num_requests)
        return self._was_worth_it or self._may_draft_beside(num_requests, prompts.num_rows)

    def _may_draft_beside(self, num_requests: int, other_rows: int) -> bool:
        """Whether a step drafts beside prompts though that does not pay: enough has been saved to learn from it."""
        self._saved_beside_s += _PROBE_SHARE * float(self._cost.verify_seconds(num_requests + other_rows, 1)[0])
        if self._saved_beside_s < self._cost.draft_seconds(num_requests):
            return False
        self._saved_beside_s = 0.0
        return True

    def _best(self, num_requests: int) -> DraftPolicy:
        """The policy with the best rate; the current one, unless that is clearly worse."""
        rates = self._rates(num_requests)
        best = max(rates, key=lambda policy: rates[policy])
        self._worth = max(0.0, rates[best] / rates[DraftPolicy.NONE] - 1.0)
        return best if rates[best] > _STAY * rates[self.policy] else self.policy

    def _review(self, num_requests: int) -> None:
        num_blocks, policy = self._pool.shape[1], self.policy
        self._steps = 0
        if num_blocks >= _ENOUGH_BLOCKS:
            self._judged_load = num_requests
            policy = self._best(num_requests)
        elif num_blocks >= _FEW_BLOCKS:
            rates = self._rates(num_requests)
            if rates[DraftPolicy.NONE] > _LARGE_DIFFERENCE * max(rates[p] for p in rates if p is not DraftPolicy.NONE):
                policy, self._judged_load = DraftPolicy.NONE, num_requests
        self.policy = policy

    def _wakes(self, num_requests: int) -> bool:
        """Whether drafting promises to pay at this load. It begins, or first the building of the drafter's context."""
        self._judged_load = num_requests
        best = self._best(num_requests) if self._pool.shape[1] else DraftPolicy.NONE
        if best is DraftPolicy.NONE:
            return False
        if self._stage is _Stage.STANDBY:
            self.policy, self._steps = best, 0
        else:
            self._look(has_context=False)
        return True

    # ---- probes -----------------------------------------------------------------------------------------------------

    def _save(self, num_requests: int, other_rows: int) -> None:
        """Put a share of the newest steps' time aside; begin when two steps of a probe are paid for."""
        if self._steps % _SAVING_STEPS:
            return  # a step of one request is short
        cost, rows = self._cost, num_requests + other_rows
        probed = min(num_requests, _PROBE_REQUESTS)
        step_s, probe_s = cost.verify_seconds_at(
            np.array([rows, rows + probed * self._num_drafts], np.float64)
        ).tolist()
        self._saved_s += _SAVING_STEPS * _PROBE_SHARE * step_s
        price_s = 2 * (probe_s - step_s + cost.draft_seconds(probed))
        if self._stage is _Stage.REST:
            price_s += _WARM_UP_STEPS * _CONTEXT_SHARE * step_s
        if self._saved_s >= price_s:
            self._look(has_context=self._stage is _Stage.STANDBY)

    def _look(self, has_context: bool) -> None:
        """Begin a probe, or what must come before it."""
        self._steps = 0
        if not has_context:
            self._stage = _Stage.WARM_UP
            return
        self._stage = _Stage.PROBE
        self._pool = self._pool[:, :0]
        self._turn += _PROBE_REQUESTS

    def _go_on(self, num_requests: int) -> None:
        if self._stage is _Stage.WARM_UP:
            if self._steps >= _WARM_UP_STEPS:
                self._look(has_context=True)
            return
        num_blocks = self._pool.shape[1]
        if num_blocks == 0 and self._steps < _LONGEST_PROBE_STEPS:
            return  # its first result is not there yet
        self._judged_load = num_requests
        best = self._best(num_requests) if num_blocks else DraftPolicy.NONE
        if best is DraftPolicy.NONE or num_blocks >= _ENOUGH_BLOCKS or self._steps >= _LONGEST_PROBE_STEPS:
            self.policy, self._steps, self._saved_s = best, 0, 0.0
            is_standby = self._standby_steps or best is not DraftPolicy.NONE  # what it goes to after drafting
            self._stage = _Stage.STANDBY if is_standby else _Stage.REST
