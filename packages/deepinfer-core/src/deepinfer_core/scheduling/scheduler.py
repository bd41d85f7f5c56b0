"""`Scheduler`: which rows run in the next step, and what became of those that ran. No torch, no threads.

    plan = scheduler.schedule()       segments for the device, None when there is nothing to do
    result = runner.run(plan)
    outputs = scheduler.commit(plan, result)

`schedule` may be called once more before the first plan is committed: decode rows then name tokens that are still on
the device, and positions are the largest possible. Plans are committed in the order in which they were made. Both
loops of `runtime/engine_loop.py` use exactly these calls, so there is one transition function. A step costs a few
dozen numpy calls on arrays over slots; Python objects are touched only for requests that come, go, cross into a new
block, or have a watcher.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_core.config.checks import check_integer, check_integers
from deepinfer_core.config.scheduler import BLOCK_TOKENS, IN_FLIGHT_STEPS, SchedulerConfig, SpeculationConfig
from deepinfer_core.errors import CapacityError, ConfigError, EngineError, RequestError
from deepinfer_core.scheduling.commit import Committer
from deepinfer_core.scheduling.cost import CostModel
from deepinfer_core.scheduling.endings import check_result
from deepinfer_core.scheduling.flight import Flight, land, launch
from deepinfer_core.scheduling.ledger import BlockLedger
from deepinfer_core.scheduling.lifecycle import Lifecycle
from deepinfer_core.scheduling.plan import Int64Array, RowKind, StepPlan, StepResult, UInt8Array
from deepinfer_core.scheduling.planner import Planner
from deepinfer_core.scheduling.prefix_index import PrefixHasher
from deepinfer_core.scheduling.replay import ReplayRules
from deepinfer_core.scheduling.request import Constraint, Request, RequestStatus, StepOutputs, TokenWatcher
from deepinfer_core.scheduling.rows import build_plan
from deepinfer_core.scheduling.slots import SlotTable
from deepinfer_core.scheduling.speculation import SpeculationPlanner
from deepinfer_core.scheduling.stats import SchedulerStats

if TYPE_CHECKING:
    from deepinfer_core.config.sampling import SamplingParams

__all__ = ["Scheduler", "check_order"]

_DECODE_SHARE = 8  # a step with fewer prompt rows than one in so many is one of decoding
_MAX_PRIORITY = 1_000
_MAX_TOKEN_ID = 2**31 - 1
_MAX_PROMPT = 2**26
_MAX_SALT_CHARS = 1_024
_NO_TOKENS = (np.zeros(0, np.int64), np.zeros((0, 1), np.int64), np.zeros(0, np.int32))  # of no request


class Scheduler:
    """Continuous batching of one engine.

    config, speculation: settings. num_blocks: size of the paged cache. max_model_len: most tokens of a request, cut
    to what the cache holds. rules: cut and replay. hasher: keys of the prefix index; None = no prefix caching. cost:
    step costs for the draft budget; None = verify every draft that fits.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        eos_token_id: int,
        rules: ReplayRules,
        speculation: SpeculationConfig,
        hasher: PrefixHasher | None = None,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_model_len = min(max_model_len, config.max_model_len or max_model_len, num_blocks * BLOCK_TOKENS)
        if self.max_model_len < 2:
            raise CapacityError(
                f"a request may have {self.max_model_len} tokens; it needs a prompt token and room for one"
            )
        if cost is not None:
            _check_reach(cost, config)
        self._config = config
        self._rules = rules
        self._hasher = hasher
        self._table = SlotTable(config.max_num_seqs, self.max_model_len, speculation.num_drafts)
        self._ledger = BlockLedger(self._table, num_blocks, hasher, rules)
        self._life = Lifecycle(self._table, self._ledger, config.max_num_waiting, eos_token_id, clock)
        self._speculation = SpeculationPlanner(speculation, cost)
        self._committer = Committer(self._life, self._speculation)
        self._planner = Planner(config, self._life, self._speculation)
        self._flights: deque[Flight] = deque()
        self._clock = clock
        self._next_number = 0
        self._step = 0

    # ---- requests ---------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int] | Int64Array,
        params: SamplingParams,
        *,
        seed: int,
        priority: int = 0,
        tenant_salt: str = "",
        content: UInt8Array | None = None,
        identity: UInt8Array | None = None,
        watcher: TokenWatcher | None = None,
        constraint: Constraint | None = None,
        external: bool = False,
    ) -> int:
        """Queue one sequence and return its arrival number (`params.n` is the caller's: one call a sample).

        priority: -1,000..1,000, lower goes first. tenant_salt: prompts share cached blocks only with the same salt.
        content, identity: see `Admission` and `PrefixHasher`. external: wait for `resume` before it can run. Raises
        RequestError for a prompt that cannot run, QueueFullError when too many wait.
        """
        self._life.queue.check_room()
        tokens = _prompt_array(prompt, self.max_model_len)
        check_order(priority, tenant_salt)
        check_integer("seed", seed, 0, 2**64 - 1, RequestError)
        for name, array in (("content", content), ("identity", identity)):
            if array is not None and array.shape != tokens.shape:
                raise RequestError(f"{name} has the shape {array.shape}; the prompt has {len(tokens)} tokens")
        room = self.max_model_len - len(tokens)
        number = self._next_number
        self._next_number += 1
        request = Request(
            number=number,
            params=params,
            seed=seed,
            prompt_tokens=len(tokens),
            limit=len(tokens) + (room if params.max_tokens is None else min(room, params.max_tokens)),
            decoder_from=self._rules.decoder_from(len(tokens), all_rows=params.prompt_logprobs is not None),
            urgency=number + priority * self._config.priority_head_start,
            arrival_s=self._clock(),
            root_key=self._hasher.root(tenant_salt) if self._hasher else b"",
            tokens=tokens,
            num_tokens=len(tokens),
            content=content,
            identity=identity,
            watcher=watcher,
            constraint=constraint,
        )
        self._ledger.prepare(request)
        self._life.requests[number] = request
        if external:
            request.status = RequestStatus.WAITING_EXTERNAL
        else:
            self._life.enqueue(request)
        return number

    def resume(self, number: int) -> None:
        """What an `external` request waited for is here, or will never come: let it run. RequestError: it did not."""
        request = self._life.requests.get(number)
        if request is None or request.status is not RequestStatus.WAITING_EXTERNAL:
            raise RequestError(f"request {number} does not wait for anything from outside")
        self._life.enqueue(request)

    def abort(self, number: int) -> bool:
        """End a request wherever it is; its `Finished` comes with the next outputs. False: unknown or already ended."""
        return self._life.abort(number)

    # ---- the step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step. None: nothing to run, or nothing that can be planned before a launched step is committed."""
        if len(self._flights) >= IN_FLIGHT_STEPS:
            raise EngineError(f"{len(self._flights)} plans are not committed; commit one before the next is made")
        quarantine = self._life.quarantine
        if self._flights and (quarantine.alone is not None or quarantine.next_suspect() is not None):
            return None
        segments = self._planner.next_segments()
        if segments.is_empty:
            return None
        releases, self._life.releases = tuple(self._life.releases), []
        plan = build_plan(
            self._step,
            self._table,
            segments.decode,
            segments.prefill,
            segments.admissions,
            releases,
            stores_draft_context=self._speculation.keeps_context,
        )
        self._flights.append(launch(self._table, plan, segments))
        self._step += 1
        self._count(plan.num_rows, sum(segment.num_rows for segment in segments.prefill))
        return plan

    def _count(self, rows: int, prefill_rows: int) -> None:
        stats = self._life.stats
        stats.steps += 1
        stats.rows += rows
        stats.prefill_rows += prefill_rows
        stats.peak_used_blocks = max(stats.peak_used_blocks, self._ledger.num_used)

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Take the result of the oldest plan: tokens, ends, freed slots.

        Raises EngineError, with nothing changed, if the result is out of step: then `abandon` the plan.
        """
        self._check_oldest(plan)
        if result.step != plan.step:
            raise EngineError(f"the result of step {result.step} came for step {plan.step}")
        slots = result.slot.astype(np.int64)  # as an index five times as fast as 32 bits
        columns = np.ascontiguousarray(result.tokens.T)  # [W, N]: numpy is fast along the long axis
        check_result(result, slots, columns, self._table)
        return self._committer.commit(self._land(plan), result, slots, columns)

    def abandon(self, plan: StepPlan, error: str, *, is_own: bool = True) -> None:
        """The oldest plan failed on the device: compute its requests again; one that fails alone ends with `error`,
        unless it failed on another rank (not `is_own`).

        A plan that was launched after it rests on its results and must be abandoned or committed too; what it
        computed for the same requests is dropped.
        """
        self._land(plan)
        self._life.stats.failed_steps += 1
        for slot, generation in zip(plan.segment_slot.tolist(), plan.segment_generation.tolist(), strict=True):
            if self._table.generation[slot] == generation:
                if is_own:
                    self._life.strike(slot, f"step {plan.step} failed: {error}")
                else:
                    self._life.lose_step(slot)

    def observe_seconds(self, plan: StepPlan, seconds: float) -> None:
        """How long the device took for `plan`: corrects the cost model, if there is one.

        Steps with many prompt rows say nothing of it: not all layers compute those.
        """
        if self._speculation.cost is None or seconds <= 0:
            return
        num_prompt_rows = int(np.count_nonzero(plan.row_kind <= RowKind.REPLAY))
        if num_prompt_rows * _DECODE_SHARE <= plan.num_rows:
            num_drafting = int(np.count_nonzero(plan.segment_num_drafts))
            self._speculation.cost.observe(plan.num_rows, num_drafting, seconds)

    def _check_oldest(self, plan: StepPlan) -> None:
        if not self._flights or self._flights[0].plan is not plan:
            raise EngineError(f"step {plan.step} is not the oldest plan that is not committed")

    def _land(self, plan: StepPlan) -> Flight:
        self._check_oldest(plan)
        flight = self._flights.popleft()
        land(self._table, flight)
        return flight

    def take_finished(self) -> StepOutputs:
        """Ends that no commit has reported yet (aborts, failed allocations), as outputs without tokens."""
        finished, self._life.finished = tuple(self._life.finished), []
        return StepOutputs(self._step, *_NO_TOKENS, finished)

    def hit_tokens(self, number: int) -> int:
        """Prompt tokens of an unfinished request that were found in the cache; 0 if it is not known."""
        request = self._life.requests.get(number)
        return 0 if request is None else request.hit_tokens or 0

    # ---- what it knows ----------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._life.requests) - self._table.num_running

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return self._table.num_running

    @property
    def num_unfinished(self) -> int:
        """Requests that are not done."""
        return len(self._life.requests)

    @property
    def has_ends(self) -> bool:
        """Whether requests have ended that no outputs have reported yet."""
        return bool(self._life.finished)

    @property
    def stats(self) -> SchedulerStats:
        """Counters since the start."""
        return self._life.stats

    @property
    def ledger(self) -> BlockLedger:
        """Blocks, pins and the prefix index."""
        return self._ledger

    @property
    def speculation(self) -> SpeculationPlanner:
        """Acceptance by position, the current policy and the cost model."""
        return self._speculation

    @property
    def drafter_has_collapsed(self) -> bool:
        """Whether hardly any draft is accepted."""
        return self._speculation.meter.has_collapsed

    def check_idle(self) -> None:
        """Raise EngineError if a block, a slot or a plan is left although no request is."""
        if self._life.requests or self._flights or self._table.num_running:
            raise EngineError(
                f"not idle: {len(self._life.requests)} requests, {self._table.num_running} slots and "
                f"{len(self._flights)} plans are left"
            )
        self._ledger.pool.check_idle()


def check_order(priority: int, tenant_salt: str) -> None:
    """Raise RequestError for a priority or a tenant salt that `Scheduler.add` does not take."""
    check_integer("priority", priority, -_MAX_PRIORITY, _MAX_PRIORITY, RequestError)
    if not isinstance(tenant_salt, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- comes from the user
        raise RequestError(f"the tenant salt is a {type(tenant_salt).__name__}; it must be a text")
    if len(tenant_salt) > _MAX_SALT_CHARS:
        raise RequestError(f"the tenant salt has {len(tenant_salt)} characters; at most {_MAX_SALT_CHARS} are allowed")


def _check_reach(cost: CostModel, config: SchedulerConfig) -> None:
    if cost.max_rows < config.max_num_batched_tokens or cost.max_requests < config.max_num_seqs:
        raise ConfigError(
            f"the cost model reaches to {cost.max_rows} rows and {cost.max_requests} requests; steps may have "
            f"{config.max_num_batched_tokens} and {config.max_num_seqs}: measure it that far"
        )


def _prompt_array(prompt: Sequence[int] | Int64Array, max_model_len: int) -> Int64Array:
    """The prompt as a fresh array. Raises RequestError for an empty one, a bad id, or no room for an answer."""
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise RequestError(
                f"the prompt has shape {prompt.shape} and type {prompt.dtype}; give integers in one dimension"
            )
        if len(prompt) and not 0 <= int(prompt.min()) <= int(prompt.max()) <= _MAX_TOKEN_ID:
            raise RequestError(
                f"the prompt has ids from {prompt.min()} to {prompt.max()}; ids go from 0 to {_MAX_TOKEN_ID}"
            )
        tokens = prompt.astype(np.int64)
    else:
        ids = check_integers("prompt", prompt, 0, _MAX_TOKEN_ID, _MAX_PROMPT, RequestError)
        tokens = np.array(ids, np.int64)
    if len(tokens) == 0:
        raise RequestError("the prompt is empty; give at least one token")
    if len(tokens) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens; with one for the answer the limit is {max_model_len}, the smaller "
            "of max_model_len and what the cache holds: shorten it or raise them"
        )
    return tokens
