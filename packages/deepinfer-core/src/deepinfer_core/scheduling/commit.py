"""`Committer`: the one place where results become facts: tokens, ends, usage, grammar, sealed blocks, acceptance.

    result -> drop entries of former tenants -> cut at the end of each answer -> watchers -> drafts -> tokens -> ends

Nothing that a device sends is believed before it has passed here, and nothing is changed twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.errors import EngineError
from deepinfer_core.scheduling.acceptance import UNKNOWN_SURVIVAL
from deepinfer_core.scheduling.budget import survivals
from deepinfer_core.scheduling.endings import Ending, find_endings
from deepinfer_core.scheduling.flight import Flight
from deepinfer_core.scheduling.lifecycle import Lifecycle
from deepinfer_core.scheduling.plan import (
    BoolArray,
    FloatArray,
    Int32Array,
    Int64Array,
    StepResult,
    TokenLogprobs,
)
from deepinfer_core.scheduling.request import FinishReason, StepOutputs
from deepinfer_core.scheduling.speculation import SpeculationPlanner

__all__ = ["Committer"]


class Committer:
    """Applies results to the state of `Lifecycle`."""

    def __init__(self, lifecycle: Lifecycle, speculation: SpeculationPlanner) -> None:
        self._life = lifecycle
        self._table = lifecycle.table
        self._speculation = speculation

    def commit(self, flight: Flight, result: StepResult, slots: Int64Array, columns: Int64Array) -> StepOutputs:
        """Commit the result of a landed flight; `check_result` has passed it. slots [N], columns [W, N]: its tokens."""
        prompt_logprobs = self._prompt_logprobs(flight, result)
        self._fail_reported(flight, result)
        self._seal_prompts(flight)
        of = _all_or_indices(self._table.generation[slots] == result.generation)
        slots = slots[of]
        self._fail_unanswered(flight, slots)
        tokens, columns = result.tokens[of], columns[:, of]
        ending = find_endings(self._table, slots, columns, result.num_tokens[of])
        failures = self._watch(slots, tokens, ending)
        numbers = self._table.number[slots]
        self._learn(slots, of, flight, result)
        self._take_tokens(slots, columns, ending)
        self._finish(slots, tokens, ending, failures)
        finished, self._life.finished = tuple(self._life.finished), []
        shown = _all_or_indices(ending.kept > 0)
        return StepOutputs(
            step=result.step,
            number=numbers[shown],
            tokens=tokens[shown],
            num_tokens=ending.kept[shown],
            finished=finished,
            logprobs=_cut_logprobs(result, of, shown, ending.kept) if result.logprobs else {},
            prompt_logprobs=prompt_logprobs,
        )

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _fail_reported(self, flight: Flight, result: StepResult) -> None:
        plan = flight.plan
        for segment, message in result.errors.items():
            slot = int(plan.segment_slot[segment])
            if self._table.generation[slot] == plan.segment_generation[segment]:
                self._life.finish(slot, FinishReason.ERROR, error=message)

    def _fail_unanswered(self, flight: Flight, answered: Int64Array) -> None:
        """A request that was to draw a token and got neither a token nor an error would wait for ever: end it."""
        if len(flight.slots) == len(answered):
            return
        due = flight.slots[self._table.generation[flight.slots] == flight.generation]
        for slot in np.setdiff1d(due, answered).tolist():
            error = f"step {flight.plan.step} returned no token for this request"
            self._life.finish(slot, FinishReason.ERROR, error=error)

    def _watch(self, slots: Int64Array, tokens: Int64Array, ending: Ending) -> dict[int, str]:
        """Show tokens to watchers, which may end requests; {entry: error} of those that raised: no tokens."""
        failures: dict[int, str] = {}
        if not self._table.num_watched:
            return failures
        for n in np.flatnonzero(self._table.watched[slots]).tolist():
            watcher = self._table.request(int(slots[n])).watcher
            if watcher is None:
                continue
            kept = int(ending.kept[n])
            try:
                stop = watcher.observe(tokens[n, :kept].tolist())
                if stop is not None and not 1 <= stop.num_tokens <= kept:
                    raise EngineError(f"it keeps {stop.num_tokens} of {kept} tokens")
            except Exception as error:
                failures[n] = f"the watcher of the output failed: {error}"
                ending.kept[n] = 0
                continue
            if stop is not None:
                ending.stop(n, stop.num_tokens, stop.stop_reason)
        return failures

    # ---- progress ---------------------------------------------------------------------------------------------------

    def _seal_prompts(self, flight: Flight) -> None:
        for slot, generation, computed in flight.computed:
            if self._table.generation[slot] != generation:
                continue
            first, end = int(self._table.sealed_blocks[slot]), computed // BLOCK_TOKENS
            if end > first:
                self._life.ledger.seal(slot, first, end)

    def _take_tokens(self, slots: Int64Array, columns: Int64Array, ending: Ending) -> None:
        table = self._table
        is_first = ending.length == table.prompt_tokens[slots]
        if is_first.any():
            now = self._life.clock()
            for slot in slots[is_first].tolist():
                table.request(slot).first_token_s = now
        table.append_tokens(slots, columns, ending.kept)
        # The newest token is not computed yet: all positions below it are.
        computed = ending.length + ending.kept
        computed -= 1
        full = computed >= (table.sealed_blocks[slots] + 1) * BLOCK_TOKENS
        if full.any():
            new = full.nonzero()[0]
            filled = (slots[new], table.sealed_blocks[slots[new]], computed[new] // BLOCK_TOKENS)
            for slot, first, end in zip(*(column.tolist() for column in filled), strict=True):
                self._life.ledger.seal(slot, first, end)
        self._life.stats.output_tokens += int(ending.kept.sum())
        if self._life.quarantine.alone is not None and len(slots):
            self._life.quarantine.committed(int(table.length[self._life.quarantine.alone.slot]))

    def _learn(self, slots: Int64Array, entries: Int64Array | slice, flight: Flight, result: StepResult) -> None:
        """Acceptance of the drafts that were verified, and survivals of the new ones, of `entries` of the result."""
        table = self._table
        if table.num_drafts == 0:
            return
        if result.draft_tokens.shape[1] == 0 and not result.num_verified.any():
            self._learn_nothing(slots)
            return
        verified = result.num_verified[entries].astype(np.int64)
        accepted = result.num_tokens[entries].astype(np.int64) - 1
        self._observe(slots, verified, accepted, flight)
        self._life.stats.verified_drafts += int(verified.sum())
        self._life.stats.accepted_drafts += int(accepted.sum())
        drafts = np.ascontiguousarray(result.draft_tokens[entries].T)  # [D', N]
        proposed = (drafts >= 0).sum(axis=0)
        at_rest = table.in_flight_max[slots] == 0  # else a plan counts on the drafts after these
        table.held_drafts[slots[at_rest]] = proposed[at_rest]
        if self._speculation.needs_stale:
            table.stale_survival[:, slots] = np.take(table.survival, slots, axis=1)
        survival = self._survival(result.confidences[entries].T, proposed)
        for known, new in zip(table.survival, survival, strict=True):  # row by row: much faster than [:, slots]
            known[slots] = new
        self._speculation.learn(survival if proposed.all() else np.compress(proposed > 0, survival, axis=1))
        if not table.num_constrained:
            return
        for n in np.flatnonzero(table.constrained[slots]).tolist():
            table.request(int(slots[n])).drafts = drafts[: proposed[n], n].tolist()

    def _learn_nothing(self, slots: Int64Array) -> None:
        """A step without drafts, before it and after it, as all are while drafting does not pay: the same, in short."""
        table = self._table
        table.held_drafts[slots[table.in_flight_max[slots] == 0]] = 0
        if self._speculation.needs_stale:
            table.stale_survival[:, slots] = np.take(table.survival, slots, axis=1)
            self._speculation.learn(table.survival[:, :0])
        table.survival[:, slots] = UNKNOWN_SURVIVAL
        if table.constrained.any():
            for slot in slots[table.constrained[slots]].tolist():
                table.request(slot).drafts = []

    def _observe(self, slots: Int64Array, verified: Int64Array, accepted: Int64Array, flight: Flight) -> None:
        num_decoding = len(flight.decode_slots)
        if num_decoding == 0 or not verified.any():
            return
        if np.array_equal(slots[:num_decoding], flight.decode_slots):  # as most results come: nothing to gather
            self._speculation.observe(flight.survival, verified[:num_decoding], accepted[:num_decoding])
        else:
            tried = verified.nonzero()[0]
            self._speculation.observe(flight.planned_survival(slots[tried]), verified[tried], accepted[tried])

    def _survival(self, confidences: FloatArray, proposed: Int64Array) -> FloatArray:
        depth = min(len(confidences), self._table.num_drafts)
        survival = survivals(np.ascontiguousarray(confidences[:depth]), proposed)
        if depth < self._table.num_drafts:
            survival = np.pad(survival, ((0, self._table.num_drafts - depth), (0, 0)))
        if not proposed.all():
            np.copyto(survival, UNKNOWN_SURVIVAL, where=proposed == 0)
        return survival

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _finish(self, slots: Int64Array, tokens: Int64Array, ending: Ending, failures: dict[int, str]) -> None:
        for n, error in failures.items():
            self._life.finish(int(slots[n]), FinishReason.ERROR, error=error)
        for n in ending.code.nonzero()[0].tolist():
            if n not in failures:
                reason, stop_reason = ending.reason(n, tokens)
                self._life.finish(int(slots[n]), reason, stop_reason=stop_reason)

    def _prompt_logprobs(self, flight: Flight, result: StepResult) -> dict[int, Sequence[TokenLogprobs]]:
        plan, table = flight.plan, self._table
        found: dict[int, Sequence[TokenLogprobs]] = {}
        for segment, entries in result.prompt_logprobs.items():
            slot = int(plan.segment_slot[segment])
            if table.generation[slot] == plan.segment_generation[segment]:
                request = table.request(slot)
                first = int(plan.row_position[plan.segment_start[segment]])
                new = entries[max(0, request.prompt_scored - first) :]  # a request that is computed again scores again
                request.prompt_scored = max(request.prompt_scored, first + len(entries))
                if new:
                    found[request.number] = new
        return found


def _all_or_indices(chosen: BoolArray) -> Int64Array | slice:
    """What `chosen` [N] picks; where that is everything a slice, which copies nothing."""
    return slice(None) if chosen.all() else chosen.nonzero()[0]


def _cut_logprobs(
    result: StepResult, of: Int64Array | slice, shown: Int64Array | slice, kept: Int32Array
) -> dict[int, Sequence[TokenLogprobs]]:
    """Log-probabilities of kept tokens, keyed by their index in the outputs: `shown` of `of` the result's entries."""
    entries = np.arange(len(result.slot), dtype=np.int64)[of][shown].tolist()
    pairs = enumerate(zip(entries, kept[shown].tolist(), strict=True))
    return {n: result.logprobs[entry][:count] for n, (entry, count) in pairs if entry in result.logprobs}
