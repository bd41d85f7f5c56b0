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
from deepinfer_core.sampling import processors
from deepinfer_core.sampling.draft_noise import DraftNoise
from deepinfer_core.sampling.draw import argmax_token, draw_token
from deepinfer_core.sampling.filters import RowFilters, rows_of, to_device
from deepinfer_core.sampling.history import TokenHistory
from deepinfer_core.sampling.logprobs import LogprobRows, token_logprobs
from deepinfer_core.sampling.slot_table import SlotTable
from deepinfer_core.sampling.streams import Stream
from deepinfer_core.sampling.verify import SegmentGrid, ratio_draw
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
class SampledBatch:
    """What was drawn, on the device."""

    tokens: Tensor  # [M, 1 + D] int64: accepted drafts, then the token drawn by the target; -1 beyond num_tokens
    num_tokens: Tensor  # [M] int64
    failed: Tensor  # [M] bool: no token could be drawn, since no logit was finite (NaN, or everything masked)
    num_verified: NDArray[np.int32]  # [M] drafts that were under verification
    logprob_rows: tuple[tuple[LogprobRows, NDArray[np.int64], NDArray[np.int64]], ...] = ()
    # groups of (values of L rows, their segments [L], their number of top entries [L])

    def logprobs_on_host(self) -> dict[int, list[TokenLogprobs]]:
        """segment -> one entry for each of its emitted tokens, for requests that asked. Waits for the device."""
        found: dict[int, list[TokenLogprobs]] = {}
        if self.logprob_rows:
            num_tokens = self.num_tokens.tolist()
            for values, segments, num_top in self.logprob_rows:
                for segment, entry in zip(segments.tolist(), values.on_host(num_top.tolist()), strict=True):
                    entries = found.setdefault(segment, [])
                    if len(entries) < num_tokens[segment]:
                        entries.append(entry)
        return found


class Sampler:
    """Draws and verifies tokens for up to `num_slots` requests at once (module docstring).

    vocab_size: width of the logits. mask_from: ids from here on have no token (`len(tokenizer)`) and are never drawn.
    mode: how drafts are verified. logprobs_mode: for requests that don't choose.
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
    ) -> None:
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
        lengths = np.diff(rows.segment_start)
        records = self._table.records(np.repeat(rows.segment_slot, lengths))  # [N]
        segment = np.repeat(np.arange(len(lengths)), lengths)
        adjusted = self._adjusted(rows, records)  # [N, ids]
        random = np.flatnonzero(~records["greedy"])
        filtered = adjusted[:0]  # [random, ids]
        if random.size:
            filtered = RowFilters.of(records[random]).apply(rows_of(adjusted, random))
        drawn, failed = self._draw(adjusted, filtered, records, random, rows.position)
        emitted, stands = drawn, drawn == rows.token.roll(-1)  # row k's draw against row k + 1's own token
        if self._mode == "ratio" and random.size and len(drawn) > len(lengths):
            emitted, stands = self._draw_by_ratio(rows, records, random, filtered, emitted, stands)
        grid = SegmentGrid.of(rows.segment_start, self._device)
        tokens, num_tokens = grid.accept(emitted, stands)
        self._commit(rows, tokens)
        return SampledBatch(
            tokens,
            num_tokens,
            grid.any_emitted(failed, num_tokens),
            (lengths - 1).astype(np.int32),
            self._logprobs(rows.logits, adjusted, filtered, random, emitted, records, segment),
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
        )

    # ---- steps of sample() ----------------------------------------------------------------------------------------

    def _adjusted(self, rows: SampleRows, records: NDArray[np.void]) -> Tensor:
        """Logits [N, ids] after masks, bias and penalties: a view of the input where there are none."""
        logits = rows.logits[:, : self._num_ids]
        sparse = self._table.sparse_entries(rows.segment_slot, rows.segment_start)
        penalised = np.flatnonzero(records["penalties"])
        if rows.grammar_masks or sparse is not None or penalised.size:
            logits = logits.clone()
        if rows.grammar_masks:
            masks = np.stack(list(rows.grammar_masks.values())).view(np.int32)
            index = np.fromiter(rows.grammar_masks, np.int64)
            processors.apply_bit_masks(logits, self._to_device(index), self._to_device(masks))
        if sparse is not None:
            row, value = self._to_device(sparse.row), self._to_device(sparse.value)
            num_output = rows.position[row] + 1 - self._to_device(records["prompt_tokens"][sparse.row])
            until = self._to_device(sparse.until_output)
            value = value.where((until == 0) | (num_output < until), 0.0)
            processors.add_sparse(logits, row, self._to_device(sparse.token_id), value)
        if penalised.size:
            self._penalise(logits, rows, records[penalised], penalised)
        return logits

    def _penalise(self, logits: Tensor, rows: SampleRows, records: NDArray[np.void], index: NDArray[np.int64]) -> None:
        lengths = np.diff(rows.segment_start)
        is_draft = np.ones(rows.segment_start[-1], np.bool_)
        is_draft[rows.segment_start[:-1]] = False
        at = self._to_device(index)
        slots = np.repeat(rows.segment_slot, lengths)[index]
        prompt_seen, output_count = self._history.before(slots, rows.token[at], is_draft[index])
        factors = (self._to_device(records[name]) for name in ("repetition", "presence", "frequency"))
        logits[at] = processors.apply_penalties(logits[at], prompt_seen, output_count, *factors)

    def _draw(
        self, adjusted: Tensor, filtered: Tensor, records: NDArray[np.void], random: NDArray[np.int64], position: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(tokens [N], failed [N])."""
        if random.size == 0:
            return argmax_token(adjusted)
        seed = self._to_device(records["seed"][random])
        token, failed = draw_token(filtered, seed, rows_of(position, random) + 1)
        if random.size == len(adjusted):
            return token, failed
        all_token, all_failed = argmax_token(adjusted)
        at = self._to_device(random)
        return all_token.index_copy(0, at, token), all_failed.index_copy(0, at, failed)

    def _draw_by_ratio(
        self,
        rows: SampleRows,
        records: NDArray[np.void],
        random: NDArray[np.int64],
        filtered: Tensor,
        emitted: Tensor,
        stands: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Replace the coupled verdict on random rows that check a draft; greedy rows and last rows stay."""
        if rows.draft_logits is None:
            raise ValueError("ratio verification needs the logits that the drafts were drawn from (draft_logits)")
        checks = np.ones(len(records), np.bool_)
        checks[rows.segment_start[1:] - 1] = False
        chosen = checks[random]
        index = random[chosen]
        if not index.size:
            return emitted, stands
        at = self._to_device(index)
        verdict = ratio_draw(
            filtered[self._to_device(np.flatnonzero(chosen))],
            RowFilters.of(records[index]).apply_temperature(rows.draft_logits[at][:, : self._num_ids]),
            rows.token[at + 1],
            self._to_device(records["seed"][index]),
            rows.position[at] + 1,
        )
        return emitted.index_copy(0, at, verdict[0]), stands.index_copy(0, at, verdict[1])

    def _commit(self, rows: SampleRows, tokens: Tensor) -> None:
        penalised = np.flatnonzero(self._table.records(rows.segment_slot)["penalties"])
        if penalised.size:
            self._history.commit(rows.segment_slot[penalised], tokens[self._to_device(penalised)])

    def _logprobs(
        self,
        raw: Tensor,
        adjusted: Tensor,
        filtered: Tensor,
        random: NDArray[np.int64],
        emitted: Tensor,
        records: NDArray[np.void],
        segment: NDArray[np.int64],
    ) -> tuple[tuple[LogprobRows, NDArray[np.int64], NDArray[np.int64]], ...]:
        wanted, processed = records["num_logprobs"] >= 0, records["processed"]
        groups: list[tuple[LogprobRows, NDArray[np.int64], NDArray[np.int64]]] = []
        for index, is_processed in (
            (np.flatnonzero(wanted & ~processed), False),
            (np.flatnonzero(wanted & processed), True),
        ):
            if not index.size:
                continue
            logits = rows_of(raw, index)
            if is_processed:
                final = adjusted.index_copy(0, self._to_device(random), filtered) if random.size else adjusted
                logits = rows_of(final, index)
            num_top = records["num_logprobs"][index]
            values = token_logprobs(logits, rows_of(emitted, index), int(num_top.max()))
            groups.append((values, segment[index], num_top))
        return tuple(groups)

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self._device)
