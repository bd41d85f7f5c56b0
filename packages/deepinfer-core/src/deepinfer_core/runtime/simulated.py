"""`SimulatedDevice`: a device without a model, for testing everything above it. Numpy only.

    state    u(p) = u(p - 1) + mix(token, p)            kept in the paged cache: a token depends on all blocks before it
    token    y(p + 1) = mix(u(p), seed, p + 1) mod V    with a mask: the first allowed id from there on, cyclically
    draft    y with the probability that it reports as confidence, else another token
    time     each step starts when the one before it is done and takes `step_seconds(plan)`

A wrong block, a lost or repeated row, a write to a shared block or a stale tenant changes u and with it every later
token, or breaks a rule of the plan and raises. A prefix replay that starts too late for exactness changes the tokens
too, as it would in the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.errors import EngineError
from deepinfer_core.scheduling.plan import (
    Admission,
    Int64Array,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenSource,
    UInt32Mask,
    Writes,
)

__all__ = ["Faults", "SimulatedDevice", "SimulatedError", "Ticket", "next_token"]

type UInt64Array = NDArray[np.uint64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_DRIFT: Final = 0x5DEECE66D  # added to the seed of a request whose replay was not exact
_DRAFT_STREAM: Final = 0xD1B54A32D192ED03
_COIN_STREAM: Final = 0xA0761D6478BD642F


class SimulatedError(EngineError):
    """A failure that the test asked for."""


@dataclass(slots=True)
class Faults:
    """Which calls fail: the n-th launch, the n-th wait (from 0), and every launch that holds one of these requests."""

    launches: Collection[int] = ()
    waits: Collection[int] = ()
    poisoned_requests: Collection[int] = ()
    failing_requests: Collection[int] = ()  # fail alone, with an entry in `errors`


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step: its result, and when it is ready on the device's clock."""

    result: StepResult
    ready_s: float


def mix(values: UInt64Array | int, position: UInt64Array | int) -> UInt64Array:
    """A hash of two 64-bit numbers (SplitMix64's finaliser), element by element."""
    with np.errstate(over="ignore"):
        x = np.asarray(values, np.uint64) * _GOLDEN + np.asarray(position, np.uint64) * _MIX_1 + _MIX_2
        x = (x ^ (x >> np.uint64(30))) * _MIX_1
        x = (x ^ (x >> np.uint64(27))) * _MIX_2
        return x ^ (x >> np.uint64(31))


def next_token(state: UInt64Array, seed: UInt64Array, position: Int64Array, vocab_size: int) -> Int64Array:
    """The token at `position` after the tokens that `state` sums up."""
    return (mix(state ^ seed, position.astype(np.uint64)) % np.uint64(vocab_size)).astype(np.int64)


@dataclass(slots=True)
class _Tenant:
    admission: Admission
    next_position: int  # of the next row
    first_global: int = -1  # position of its first row that wrote the global cache
    drifts: bool = False
    prompt_predicted: int = 0


@dataclass(eq=False)
class SimulatedDevice:
    """Implements `Device` of `runtime/engine_loop.py`.

    encoder_layers, window: for the rule of exact replay. acceptance: (low, high) of the drafts' confidences.
    optimism: added to the confidences that it reports. without_context: what is left of confidences when the drafter
    has no context of the newest `window` positions. step_seconds: None = no latency. clock, sleep: of the host.
    """

    num_blocks: int
    num_slots: int
    num_drafts: int
    vocab_size: int = 97
    window: int = 128
    encoder_layers: int = 20
    acceptance: tuple[float, float] = (0.5, 0.95)
    optimism: float = 0.0
    without_context: float = 1.0
    faults: Faults = field(default_factory=Faults)
    step_seconds: Callable[[StepPlan], float] | None = None
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    num_launches: int = 0
    num_waits: int = 0

    def __post_init__(self) -> None:
        self._cache = np.zeros(self.num_blocks * BLOCK_TOKENS, np.uint64)
        self._tenants: dict[int, _Tenant] = {}
        self._anchor = np.zeros(self.num_slots, np.int64)
        self._held = np.full((self.num_slots, 1 + self.num_drafts), -1, np.int64)
        self._seed = np.zeros(self.num_slots, np.uint64)
        self._busy_until_s = 0.0

    # ---- the device interface ---------------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        """Launch and wait."""
        return self.wait(self.launch(plan))

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step. Raises SimulatedError where `faults` says so, EngineError for a plan that breaks a rule."""
        n, self.num_launches = self.num_launches, self.num_launches + 1
        if n in self.faults.launches:
            raise SimulatedError(f"launch {n} was told to fail")
        self._change_tenants(plan)
        poisoned = self._numbers(plan) & set(self.faults.poisoned_requests)
        if poisoned:
            raise SimulatedError(f"launch {n} holds the poisoned request {min(poisoned)}")
        start_s = max(self.clock(), self._busy_until_s)
        self._busy_until_s = start_s + (self.step_seconds(plan) if self.step_seconds else 0.0)
        return Ticket(self._compute(plan), self._busy_until_s)

    def wait(self, ticket: Ticket) -> StepResult:
        """The result of a launched step, when it is ready."""
        n, self.num_waits = self.num_waits, self.num_waits + 1
        if self.step_seconds and ticket.ready_s > self.clock():
            self.sleep(ticket.ready_s - self.clock())
        if n in self.faults.waits:
            raise SimulatedError(f"wait {n} was told to fail")
        return ticket.result

    def block_contents(self, block: int) -> UInt64Array:
        """What lies in a block [BLOCK_TOKENS]."""
        return self._cache[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].copy()

    # ---- tenants ----------------------------------------------------------------------------------------------------

    def _change_tenants(self, plan: StepPlan) -> None:
        for release in plan.releases:
            tenant = self._tenants.get(release.slot)
            if tenant is not None and tenant.admission.generation == release.generation:
                del self._tenants[release.slot]
        for admission in plan.admissions:
            self._tenants[admission.slot] = _Tenant(admission, admission.first_position)
            self._seed[admission.slot] = admission.seed

    def _numbers(self, plan: StepPlan) -> set[int]:
        return {self._tenant(plan, i).admission.request_number for i in range(plan.num_segments)}

    def _tenant(self, plan: StepPlan, segment: int) -> _Tenant:
        slot = int(plan.segment_slot[segment])
        tenant = self._tenants.get(slot)
        if tenant is None or tenant.admission.generation != plan.segment_generation[segment]:
            raise EngineError(f"step {plan.step}: slot {slot} has another tenant than the plan says")
        return tenant

    # ---- a step -----------------------------------------------------------------------------------------------------

    def _compute(self, plan: StepPlan) -> StepResult:
        start = plan.segment_start.astype(np.int64)
        counts = np.diff(start)
        segment = np.repeat(np.arange(plan.num_segments, dtype=np.int64), counts)
        slots = plan.segment_slot.astype(np.int64)
        is_held = plan.row_source[start[:-1]] == TokenSource.HELD
        base = np.where(is_held, self._anchor[slots], plan.row_position[start[:-1]])
        position = base[segment] + np.arange(plan.num_rows, dtype=np.int64) - start[segment]
        held = plan.row_source == TokenSource.HELD
        token = plan.row_token.copy()
        token[held] = self._held[slots[segment[held]], plan.row_token[held]]
        self._check_rows(plan, base, position, token)

        state = self._states(plan, base, position, token, segment)
        for i in range(plan.num_segments):
            self._advance(plan, i, int(base[i]), int(counts[i]))
        drawn = self._draw(plan, state, position, segment)
        return self._answer(plan, base, counts, token, state, drawn)

    def _check_rows(self, plan: StepPlan, base: Int64Array, position: Int64Array, token: Int64Array) -> None:
        if (position > plan.row_position).any():
            raise EngineError(f"step {plan.step}: a row lies above the position that the plan reserved for it")
        if (token < 0).any():
            raise EngineError(f"step {plan.step}: a row names a token that the device does not hold")
        for i in range(plan.num_segments):
            expected = self._tenant(plan, i).next_position
            if base[i] != expected:
                raise EngineError(
                    f"step {plan.step}: slot {plan.segment_slot[i]} starts at position {base[i]}, expected {expected}"
                )

    def _address(self, plan: StepPlan, segment: Int64Array, position: Int64Array) -> Int64Array:
        block = plan.block_tables[segment, position // BLOCK_TOKENS].astype(np.int64)
        if (block < 0).any():
            raise EngineError(f"step {plan.step}: a row has no block")
        return block * BLOCK_TOKENS + position % BLOCK_TOKENS

    def _states(
        self, plan: StepPlan, base: Int64Array, position: Int64Array, token: Int64Array, segment: Int64Array
    ) -> UInt64Array:
        """u of every row [R], written to the cache where the row may and compared with it where not."""
        before = np.maximum(base - 1, 0)
        all_segments = np.arange(plan.num_segments, dtype=np.int64)
        first = np.where(base > 0, self._cache[self._address(plan, all_segments, before)], np.uint64(0))
        total = np.cumsum(mix(token.astype(np.uint64), position.astype(np.uint64)), dtype=np.uint64)
        start = plan.segment_start[:-1]
        offset = np.where(start > 0, total[start - 1], np.uint64(0))
        state = total + (first - offset)[segment]
        address = self._address(plan, segment, position)
        writes = (plan.row_writes & Writes.GLOBAL) != 0
        self._cache[address[writes]] = state[writes]
        if (self._cache[address[~writes]] != state[~writes]).any():
            raise EngineError(f"step {plan.step}: a shared block does not hold what its replayed rows compute")
        return state

    def _advance(self, plan: StepPlan, i: int, base: int, count: int) -> None:
        """Move the tenant's next row on, and notice a replay that is not exact."""
        tenant = self._tenant(plan, i)
        tenant.next_position = base + count
        rows = slice(int(plan.segment_start[i]), int(plan.segment_start[i + 1]))
        writes = np.flatnonzero(plan.row_writes[rows] & Writes.GLOBAL)
        if tenant.first_global < 0 and len(writes):
            tenant.first_global = base + int(writes[0])
            exact_from = int(plan.segment_window_from[i])
            exact_from += self.encoder_layers * (self.window - 1) if exact_from else 0
            decoder_from = max(int(plan.segment_decoder_from[i]), tenant.admission.first_position)
            tenant.drifts = min(tenant.first_global, decoder_from) < exact_from

    def _draw(self, plan: StepPlan, state: UInt64Array, position: Int64Array, segment: Int64Array) -> Int64Array:
        """The target's token after every row [R]."""
        drift = np.array([self._tenant(plan, i).drifts for i in range(plan.num_segments)], np.uint64)
        seed = self._seed[plan.segment_slot] + drift * np.uint64(_DRIFT)
        drawn = next_token(state, seed[segment], position + 1, self.vocab_size)
        for row, mask in plan.grammar_masks.items():
            drawn[row] = first_allowed(int(drawn[row]), mask, self.vocab_size)
        return drawn

    # ---- the answer -------------------------------------------------------------------------------------------------

    def _answer(
        self,
        plan: StepPlan,
        base: Int64Array,
        counts: Int64Array,
        token: Int64Array,
        state: UInt64Array,
        drawn: Int64Array,
    ) -> StepResult:
        start = plan.segment_start.astype(np.int64)
        errors = {
            i: "this request was told to fail"
            for i in range(plan.num_segments)
            if self._tenant(plan, i).admission.request_number in self.faults.failing_requests
        }
        known = np.array([len(self._tenant(plan, i).admission.token_ids) for i in range(plan.num_segments)])
        draws = base + counts >= known  # rows of the prompt before its last are sampled for prompt_logprobs only
        chosen = [i for i in np.flatnonzero(draws).tolist() if i not in errors]
        entries = np.array(chosen, np.int64)
        verified = np.where(plan.row_source[start[entries]] == TokenSource.HELD, counts[entries] - 1, 0)
        first_row = start[entries + 1] - 1 - verified
        width = 1 + self.num_drafts
        column = np.arange(width, dtype=np.int64)
        rows = np.minimum(first_row[:, None] + column, start[entries + 1][:, None] - 1)  # [N, W], clipped
        targets = drawn[rows]
        under_test = token[np.minimum(rows + 1, len(token) - 1)]
        agrees = (under_test == targets) & (column < verified[:, None])
        accepted = np.cumprod(agrees, axis=1, dtype=np.int64).sum(axis=1)
        tokens = np.where(column <= accepted[:, None], targets, -1)
        position = base[entries] + counts[entries] - verified

        slots = plan.segment_slot[entries].astype(np.int64)
        anchor_row = first_row + accepted
        self._anchor[slots] = position + accepted
        newest = tokens[np.arange(len(entries), dtype=np.int64), accepted]
        proposals = plan.segment_num_drafts[entries].astype(np.int64)
        known = self._known(plan, entries, slots)
        drafts, confidences = self._propose(slots, state[anchor_row], newest, proposals, known)
        self._held[slots, 0] = newest
        self._held[slots, 1:] = drafts
        for slot in slots.tolist():
            self._tenants[slot].next_position = int(self._anchor[slot])
        logprobs, prompt_logprobs = self._logprobs(plan, chosen, tokens, accepted, base, counts, drawn)
        return StepResult(
            step=plan.step,
            slot=plan.segment_slot[entries],
            generation=plan.segment_generation[entries],
            position=position,
            tokens=tokens,
            num_tokens=(accepted + 1).astype(np.int32),
            num_verified=verified.astype(np.int32),
            draft_tokens=drafts,
            confidences=confidences,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
        )

    def _known(self, plan: StepPlan, entries: Int64Array, slots: Int64Array) -> NDArray[np.float64]:
        """Share of the newest `window` positions that the drafter has context of [N]."""
        if plan.segment_draft_from is None:
            return np.ones(len(slots))
        context = self._anchor[slots] - plan.segment_draft_from[entries]
        return np.clip(context / np.clip(self._anchor[slots], 1, self.window), 0.0, 1.0)

    def _propose(
        self,
        slots: Int64Array,
        state: UInt64Array,
        newest: Int64Array,
        proposals: Int64Array,
        known: NDArray[np.float64],
    ) -> tuple[Int64Array, NDArray[np.float32]]:
        """Drafts and confidences [N, D]; `known` [N]: share of its context that the drafter has."""
        drafts = np.full((len(slots), self.num_drafts), -1, np.int64)
        confidences = np.zeros((len(slots), self.num_drafts), np.float32)
        low, high = self.acceptance
        sure = self.without_context + (1.0 - self.without_context) * known
        token, position = newest, self._anchor[slots]
        for j in range(self.num_drafts):
            with np.errstate(over="ignore"):
                state = state + mix(token.astype(np.uint64), position.astype(np.uint64))
            position = position + 1
            target = next_token(state, self._seed[slots], position, self.vocab_size)
            confidence = sure * (low + (high - low) * _uniform(state, _DRAFT_STREAM))
            token = np.where(_uniform(state, _COIN_STREAM) < confidence, target, (target + 1) % self.vocab_size)
            wanted = j < proposals
            drafts[wanted, j] = token[wanted]
            confidences[wanted, j] = np.minimum(confidence[wanted] + self.optimism, 1.0)
        return drafts, confidences

    def _logprobs(
        self,
        plan: StepPlan,
        chosen: list[int],
        tokens: Int64Array,
        accepted: Int64Array,
        base: Int64Array,
        counts: Int64Array,
        drawn: Int64Array,
    ) -> tuple[dict[int, list[TokenLogprobs]], dict[int, list[TokenLogprobs]]]:
        """Made-up values that depend on the token alone, for requests that want them."""
        wanted = {
            n: [_logprob(token) for token in tokens[n, : int(accepted[n]) + 1].tolist()]
            for n, i in enumerate(chosen)
            if self._tenant(plan, i).admission.params.logprobs is not None
        }
        prompt: dict[int, list[TokenLogprobs]] = {}
        for i in range(plan.num_segments):
            admission = self._tenant(plan, i).admission
            if admission.params.prompt_logprobs is not None and base[i] + 1 < admission.prompt_tokens:
                end = min(int(base[i] + counts[i]) + 1, admission.prompt_tokens)
                prompt[i] = [_logprob(token) for token in admission.token_ids[int(base[i]) + 1 : end].tolist()]
        return wanted, prompt


def first_allowed(token: int, mask: UInt32Mask, vocab_size: int) -> int:
    """The first id from `token` on, cyclically, whose bit in `mask` is set."""
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    order = np.roll(np.flatnonzero(allowed), -int(np.searchsorted(np.flatnonzero(allowed), token)))
    if len(order) == 0:
        raise EngineError("a grammar mask allows no token")
    return int(order[0])


def _uniform(state: UInt64Array, stream: int) -> NDArray[np.float64]:
    return cast("NDArray[np.float64]", (mix(state, stream) >> np.uint64(11)).astype(np.float64) / 2.0**53)


def _logprob(token: int) -> TokenLogprobs:
    value = -1.0 - token / 128
    return TokenLogprobs(token, value, 1, ((token, value),))
