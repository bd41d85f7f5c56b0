"""The result of a step on its way from the device: one list of integers, read once.

    | tokens [M, T] | number of tokens [M] | failed [M] | first position [M] | drafts [S, n] | confidences [S, n] |

Confidences stand there as the bits of float64. The copy to the host is queued behind the step's work; `read` waits for
it, and builds the `StepResult`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.sampling import PromptLogprobs, SampledBatch
from deepinfer_core.scheduling.plan import Admission, FloatArray, StepPlan, StepResult, TokenLogprobs

__all__ = ["PendingResult", "Proposals", "SampledRows"]

_NO_TOKEN = "no token could be drawn: every logit is masked or not finite"


@dataclass(frozen=True)
class SampledRows:
    """Which sample rows of a plan draw a token, and which only score the prompt."""

    segments: NDArray[np.int64]  # [M] segments that draw
    segment_start: NDArray[np.int32]  # [M + 1] into `draw`
    draw: NDArray[np.int64]  # [N] sample rows (rows of the logits)
    plan_rows: NDArray[np.int64]  # [N] the same as rows of the plan
    prompt_rows: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]  # segment -> sample rows, their positions

    @classmethod
    def of(cls, plan: StepPlan, admitted: dict[int, Admission]) -> SampledRows:
        plan_rows = np.flatnonzero(plan.row_sample)
        segment = np.searchsorted(plan.segment_start, plan_rows, side="right") - 1
        draws = np.ones(len(plan_rows), np.bool_)
        prompt_rows: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        for i in np.unique(segment).tolist():
            admission = admitted.get(int(plan.segment_slot[i]))
            if admission is None or admission.params.prompt_logprobs is None:
                continue
            mine = np.flatnonzero(segment == i)
            position = plan.row_position[plan_rows[mine]]
            scored = position < admission.prompt_tokens - 1
            draws[mine] = position >= len(admission.token_ids) - 1
            if scored.any():
                prompt_rows[i] = (mine[scored], position[scored])
        draw = np.flatnonzero(draws)
        segments, counts = np.unique(segment[draw], return_counts=True)
        start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        return cls(segments, start, draw, plan_rows[draw], prompt_rows)

    def masks(self, plan: StepPlan) -> dict[int, NDArray[np.uint32]]:
        """Grammar masks by number of the drawing row."""
        if not plan.grammar_masks:
            return {}
        return {
            i: plan.grammar_masks[row] for i, row in enumerate(self.plan_rows.tolist()) if row in plan.grammar_masks
        }


@dataclass(frozen=True, eq=False)
class Proposals:
    """New drafts of S of the M segments that drew a token."""

    entries: NDArray[np.int64]  # [S] which ones
    tokens: Tensor  # [S, n] int64, n the largest number wanted
    confidences: Tensor  # [S, n] float32, calibrated


@dataclass(frozen=True, eq=False)
class _Drawn:
    """What a step drew, on its way."""

    rows: SampledRows
    sampled: SampledBatch
    proposals: Proposals | None
    host: Tensor  # int64, as laid out above
    copied: Any | None  # event behind the copy to the host; None where there was none


@dataclass(frozen=True, eq=False)
class PendingResult:
    """A step whose work is queued."""

    plan: StepPlan
    started_s: float  # perf_counter
    prompt: Mapping[int, PromptLogprobs] = field(default_factory=dict[int, PromptLogprobs])
    drawn: _Drawn | None = None  # None: no token
    is_cold: bool = False  # as in `StepResult`

    @classmethod
    def queue(
        cls,
        plan: StepPlan,
        started_s: float,
        rows: SampledRows,
        first: Tensor,
        sampled: SampledBatch,
        proposals: Proposals | None,
        prompt: Mapping[int, PromptLogprobs],
    ) -> PendingResult:
        """Queue the copy. first [M]: position of each segment's first sample row."""
        parts = [sampled.tokens.flatten(), sampled.num_tokens, sampled.failed.long(), first]
        if proposals is not None:
            parts += [proposals.tokens.flatten(), proposals.confidences.double().flatten().view(torch.int64)]
        packed = torch.cat(parts)
        host, copied = packed, None
        if packed.device.type != "cpu":
            host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            copied = torch.get_device_module(packed.device).Event()
            copied.record()
        return cls(plan, started_s, prompt, _Drawn(rows, sampled, proposals, host, copied))

    def read(self) -> StepResult:
        """Wait for the device and take the result apart."""
        prompt = {segment: logprobs.on_host() for segment, logprobs in self.prompt.items()}
        if self.drawn is None:
            return _nothing_drawn(self.plan, prompt)
        if self.drawn.copied is not None:
            self.drawn.copied.synchronize()
        plan, rows, sampled = self.plan, self.drawn.rows, self.drawn.sampled
        host, width, count = self.drawn.host.numpy(), sampled.tokens.shape[1], len(rows.segments)
        tokens = host[: count * width].reshape(count, width)
        num_tokens, failed, first = host[count * width : count * (width + 3)].reshape(3, count)
        drafts, confidences = self._read_proposals(host[count * (width + 3) :], self.drawn)
        return StepResult(
            step=plan.step,
            slot=plan.segment_slot[rows.segments],
            generation=plan.segment_generation[rows.segments],
            position=first + 1,
            tokens=tokens,
            num_tokens=num_tokens.astype(np.int32),
            num_verified=sampled.num_verified,
            draft_tokens=drafts,
            confidences=confidences,
            logprobs=sampled.logprobs_on_host(),
            prompt_logprobs=prompt,
            errors={int(segment): _NO_TOKEN for segment in rows.segments[failed != 0]} if failed.any() else {},
        )

    def _read_proposals(self, numbers: NDArray[np.int64], drawn: _Drawn) -> tuple[NDArray[np.int64], FloatArray]:
        """(draft tokens, confidences) [M, n] from what the list of integers ends with."""
        segments, proposals = drawn.rows.segments, drawn.proposals
        if proposals is None:
            return np.zeros((len(segments), 0), np.int64), np.zeros((len(segments), 0), np.float32)
        depth = proposals.tokens.shape[1]
        drafts = np.full((len(segments), depth), -1, np.int64)
        confidences = np.zeros((len(segments), depth), np.float32)
        draft_tokens, confidence_bits = numbers.reshape(2, -1, depth)
        drafts[proposals.entries] = draft_tokens
        confidences[proposals.entries] = confidence_bits.view(np.float64)
        drafts[np.arange(depth) >= self.plan.segment_num_drafts[segments][:, None]] = -1
        return drafts, confidences


def _nothing_drawn(plan: StepPlan, prompt: Mapping[int, list[TokenLogprobs]]) -> StepResult:
    none32, none64 = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return StepResult(
        step=plan.step,
        slot=none32,
        generation=none32,
        position=none64,
        tokens=np.zeros((0, 1), np.int64),
        num_tokens=none32,
        num_verified=none32,
        draft_tokens=np.zeros((0, 0), np.int64),
        confidences=np.zeros((0, 0), np.float32),
        prompt_logprobs=prompt,
    )
