"""`Sampler`: from the logits of a step's sample rows to tokens, for requests with different parameters at once.

    rows          | slot 3 | slot 0: anchor, draft, draft | slot 7 |          N sample rows, M segments
    position        383      90      91     92              128               of the row's own token
    token           given    a       x1     x2              given             the row's own token
    draws           384      91      92     93              129               row k draws the token at position + 1
    -> tokens     [[t, -1, -1], [y1, y2, -1], [t, -1, -1]]   num_tokens [1, 2, 1]

How the runner uses it:

    sampler = Sampler(vocab_size, num_slots, device, mask_from=.., eos_token_id=.., mode="coupled", logprobs_mode="raw")
    for release in plan.releases: sampler.release(release)
    for admission in plan.admissions: sampler.admit(admission)
    batch = sampler.sample(SampleRows(logits, position, token, segment_start, segment_slot, grammar_masks))
    noise = sampler.draft_noise(segment_slot, first_position, num_steps)     # the drafter's block, left to right:
    draft_k = noise.choose(k, logits_k)                                      # k = 0 .. num_steps - 1

Which requests are in a step is known on the host (`segment_start`, `segment_slot`: numpy); positions and token ids may
be held on the device (tensors), and nothing here waits for it, except `SampledBatch.logprobs_on_host`. Parameters are
kept by slot on the host, token counts for penalties on the device; both are replaced on `admit`.

A row's result depends on the row alone, bit for bit: not on the other rows, their number or order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.config.sampling import LogprobsMode
from deepinfer_core.config.scheduler import Verification
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.adjust import Entries, LogitChanges, Masks, Penalties
from deepinfer_core.sampling.draft_noise import DraftNoise
from deepinfer_core.sampling.draw import argmax_token
from deepinfer_core.sampling.filters import RowFilters, apply_temperature, rows_of, to_device
from deepinfer_core.sampling.history import TokenHistory
from deepinfer_core.sampling.logprobs import LogprobRows, token_logprobs
from deepinfer_core.sampling.slot_table import SlotTable
from deepinfer_core.sampling.streams import Stream
from deepinfer_core.sampling.verify import ratio_draw
from deepinfer_core.scheduling.plan import Admission, Release, TokenLogprobs

__all__ = ["SampleRows", "SampledBatch", "Sampler"]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The N sample rows of a step in M segments; rows of a segment are contiguous and ascend by one position."""

    logits: Tensor  # [N, V] float32; not modified
    position: Tensor  # [N] int64, of the row's own token
    token: Tensor  # [N] int64, the row's own token: a draft under verification on every row of a segment but the first
    segment_start: NDArray[np.int32]  # [M + 1], first sample row of each segment, then N
    segment_slot: NDArray[np.int32]  # [M]
    grammar_masks: Mapping[int, NDArray[np.uint32]] = field(default_factory=dict[int, NDArray[np.uint32]])
    # sample row -> [ceil(V / 32)] allowed ids, as in StepPlan but keyed by 0 .. N - 1
    draft_logits: Tensor | None = None
    # [N, V], mode "ratio" only: row k holds the drafter's logits that row k + 1's token was drawn from


@dataclass(frozen=True, slots=True)
class ReportedRows:
    """Log-probabilities of L rows, in the order of the rows."""

    values: LogprobRows
    segment: NDArray[np.int64]  # [L]
    num_top: NDArray[np.int64]  # [L] entries that the row's request asked for


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """What was drawn, on the device."""

    tokens: Tensor  # [M, 1 + D] int64: accepted drafts, then the token drawn by the target; -1 beyond num_tokens
    num_tokens: Tensor  # [M] int64
    failed: Tensor  # [M] bool: no token could be drawn, since no logit was finite (NaN, or everything masked)
    num_verified: NDArray[np.int32]  # [M] drafts that were under verification
    logprobs: tuple[ReportedRows, ...] = ()

    def logprobs_on_host(self) -> dict[int, list[TokenLogprobs]]:
        """segment -> one entry for each of its emitted tokens, for requests that asked. Waits for the device."""
        if not self.logprobs:
            return {}
        found: dict[int, list[TokenLogprobs]] = {}
        num_tokens = self.num_tokens.tolist()
        for rows in self.logprobs:
            for segment, entry in zip(rows.segment.tolist(), rows.values.on_host(rows.num_top.tolist()), strict=True):
                entries = found.setdefault(segment, [])
                if len(entries) < num_tokens[segment]:
                    entries.append(entry)
        return found


@dataclass(frozen=True, slots=True)
class _Step:
    """The N rows of one call on their way."""

    records: NDArray[np.void]  # [N] of the slot table
    segment: NDArray[np.int64]  # [N]
    adjusted: Tensor  # [N, ids] logits after masks, bias and penalties
    random: NDArray[np.int64]  # [n] rows that are not greedy
    filtered: Tensor  # [n, ids] theirs after temperature, top-k, top-p and min-p

    def final_logits(self) -> Tensor:
        """[N, ids] what tokens were drawn from."""
        if not self.random.size:
            return self.adjusted
        return self.adjusted.index_copy(0, to_device(self.random, self.adjusted.device), self.filtered)


class Sampler:
    """Draws and verifies tokens for up to `num_slots` requests at once (module docstring).

    vocab_size: width of the logits. mask_from: ids from here on have no token (`len(tokenizer)`) and are never drawn.
    mode: how drafts are verified. logprobs_mode: for requests that don't choose. kernels: the device's.
    """

    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        device: torch.device | str,
        *,
        mask_from: int,
        eos_token_id: int,
        mode: Verification = "coupled",
        logprobs_mode: LogprobsMode = "raw",
        kernels: Kernels = REFERENCE,
    ) -> None:
        self._kernels = kernels
        self._num_ids = min(mask_from, vocab_size)
        self._device = torch.device(device)
        self._mode = mode
        self._table = SlotTable(num_slots, eos_token_id, logprobs_mode)
        self._history = TokenHistory(self._num_ids, self._device)

    # ---- requests come and go ------------------------------------------------------------------------------------

    def admit(self, admission: Admission) -> None:
        """A request takes a slot; whatever the slot held before is forgotten."""
        self._table.admit(admission)
        self._history.end(admission.slot)
        if admission.params.has_penalties:
            ids, num_prompt = admission.token_ids, admission.prompt_tokens
            self._history.start(admission.slot, ids[:num_prompt], ids[num_prompt:])

    def release(self, release: Release) -> None:
        """A request left its slot. A release of an earlier generation than the one there is ignored."""
        if self._table.release(release):
            self._history.end(release.slot)

    # ---- drawing -------------------------------------------------------------------------------------------------

    def sample(self, rows: SampleRows) -> SampledBatch:
        """Draw a token at every row, and keep in each segment the drafts that stand."""
        step = self._prepare(rows)
        drawn, failed = self._draw(step, rows.position)
        emitted, stands = drawn, drawn == rows.token.roll(-1)  # row k's draw against row k + 1's own token
        if self._mode == "ratio":
            emitted, stands = self._draw_by_ratio(step, rows, emitted, stands)
        tokens, num_tokens, any_failed = self._kernels.accept_drafts(emitted, stands, failed, rows.segment_start)
        self._commit(rows, tokens)
        return SampledBatch(
            tokens,
            num_tokens,
            any_failed,
            (np.diff(rows.segment_start) - 1).astype(np.int32),
            self._report(step, rows.logits, emitted),
        )

    def draft_noise(self, segment_slot: NDArray[np.int32], first_position: Tensor, num_steps: int) -> DraftNoise:
        """The draws of a block of drafts, with the noise that will verify them (mode "coupled").

        segment_slot [S] on the host; first_position [S] int64: position of each segment's first draft.
        """
        records = self._table.records(segment_slot)
        return DraftNoise(
            self._to_device(records["seed"]),
            first_position,
            None if records["greedy"].all() else RowFilters.of(records),
            self._to_device(records["greedy"]),
            self._num_ids,
            num_steps,
            Stream.TOKEN if self._mode == "coupled" else Stream.DRAFT,
            self._kernels,
        )

    # ---- steps of sample() ----------------------------------------------------------------------------------------

    def _prepare(self, rows: SampleRows) -> _Step:
        lengths = np.diff(rows.segment_start)
        segment = np.repeat(np.arange(len(lengths)), lengths)
        records = self._table.records(rows.segment_slot[segment])
        adjusted = self._adjusted(rows, records)
        random = np.flatnonzero(~records["greedy"])
        filtered = adjusted[:0]
        if random.size:
            filtered = self._kernels.filter_logits(rows_of(adjusted, random), RowFilters.of(records[random]))
        return _Step(records, segment, adjusted, random, filtered)

    def _adjusted(self, rows: SampleRows, records: NDArray[np.void]) -> Tensor:
        """Logits [N, ids] after masks, bias and penalties; a view of the input where there are none."""
        logits = rows.logits[:, : self._num_ids]
        changes = LogitChanges(_masks(rows), self._entries(rows, records), self._penalties(rows, records))
        return self._kernels.adjust_logits(logits, changes) if changes else logits

    def _entries(self, rows: SampleRows, records: NDArray[np.void]) -> Entries | None:
        sparse = self._table.sparse_entries(rows.segment_slot, rows.segment_start)
        if sparse is None:
            return None
        row, value = self._to_device(sparse.row), self._to_device(sparse.value)
        num_output = rows.position[row] + 1 - self._to_device(records["prompt_tokens"][sparse.row])
        until = self._to_device(sparse.until_output)
        return Entries(sparse.row, sparse.token_id, value.where((until == 0) | (num_output < until), 0.0))

    def _penalties(self, rows: SampleRows, records: NDArray[np.void]) -> Penalties | None:
        index = np.flatnonzero(records["penalties"])
        if not index.size:
            return None
        lengths = np.diff(rows.segment_start)
        num_drafts = np.arange(len(records)) - np.repeat(rows.segment_start[:-1], lengths)
        slots = np.repeat(rows.segment_slot, lengths)[index]
        return self._history.penalties(index, slots, num_drafts[index], rows.token, records[index])

    def _draw(self, step: _Step, position: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens [N], failed [N])."""
        if not step.random.size:
            return argmax_token(step.adjusted)
        seed = self._to_device(step.records["seed"][step.random])
        token, failed = self._kernels.draw_token(
            step.filtered, seed, rows_of(position, step.random) + 1, int(Stream.TOKEN)
        )
        if len(token) == len(step.adjusted):
            return token, failed
        all_token, all_failed = argmax_token(step.adjusted)
        at = self._to_device(step.random)
        return all_token.index_copy(0, at, token), all_failed.index_copy(0, at, failed)

    def _draw_by_ratio(self, step: _Step, rows: SampleRows, emitted: Tensor, stands: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the coupled verdict on random rows that check a draft; greedy rows and last rows stay."""
        checks = np.ones(len(step.records), np.bool_)
        checks[rows.segment_start[1:] - 1] = False
        chosen = checks[step.random]
        index = step.random[chosen]
        if not index.size:
            return emitted, stands
        if rows.draft_logits is None:
            raise ValueError("ratio verification needs the logits that the drafts were drawn from (draft_logits)")
        at = self._to_device(index)
        token, accepted = ratio_draw(
            step.filtered[self._to_device(np.flatnonzero(chosen))],
            apply_temperature(
                rows.draft_logits[at][:, : self._num_ids], self._to_device(step.records["temperature"][index])
            ),
            rows.token[at + 1],
            self._to_device(step.records["seed"][index]),
            rows.position[at] + 1,
            self._kernels,
        )
        return emitted.index_copy(0, at, token), stands.index_copy(0, at, accepted)

    def _commit(self, rows: SampleRows, tokens: Tensor) -> None:
        penalised = np.flatnonzero(self._table.records(rows.segment_slot)["penalties"])
        if penalised.size:
            self._history.commit(rows.segment_slot[penalised], tokens[self._to_device(penalised)])

    def _report(self, step: _Step, raw: Tensor, emitted: Tensor) -> tuple[ReportedRows, ...]:
        wanted, processed = step.records["num_logprobs"] >= 0, step.records["processed"]
        found: list[ReportedRows] = []
        for logits, chosen in ((raw, wanted & ~processed), (None, wanted & processed)):
            index = np.flatnonzero(chosen)
            if index.size:
                mine = rows_of(step.final_logits() if logits is None else logits, index)
                num_top = step.records["num_logprobs"][index]
                values = token_logprobs(mine, rows_of(emitted, index), int(num_top.max()), self._kernels)
                found.append(ReportedRows(values, step.segment[index], num_top))
        return tuple(found)

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self._device)


def _masks(rows: SampleRows) -> Masks | None:
    if not rows.grammar_masks:
        return None
    words = np.stack(list(rows.grammar_masks.values())).view(np.int32)
    return Masks(np.fromiter(rows.grammar_masks, np.int64), words)
