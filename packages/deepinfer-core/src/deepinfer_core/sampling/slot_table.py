"""Sampling parameters of the requests that hold a slot: one record a slot, on the host.

    slot       0     1     2     3
    temperature 0.6  -     0.0   1.0         records(slots)
    top_p      0.95  -     1.0   1.0         gathers one record for each sample row, and tells the sampler, on the
    seed       7     -     -     12          host, which steps are needed at all; only the columns in use travel.

Token ids that only some requests name (logit_bias, end tokens before `min_tokens`) are kept beside the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_core.config.sampling import LogprobsMode
from deepinfer_core.scheduling.plan import Admission, Release

__all__ = ["SlotTable", "SparseEntries"]

_RECORD = np.dtype([
    ("generation", np.int64),
    ("greedy", np.bool_),
    ("temperature", np.float32),
    ("top_k", np.int64),  # 0 = off
    ("top_p", np.float64),  # 1 = off
    ("min_p", np.float64),  # 0 = off
    ("penalties", np.bool_),
    ("repetition", np.float32),
    ("presence", np.float32),
    ("frequency", np.float32),
    ("seed", np.int64),  # two's complement of the unsigned seed
    ("prompt_tokens", np.int64),
    ("min_tokens", np.int64),
    ("sparse", np.bool_),  # has logit_bias or banned end tokens
    ("num_logprobs", np.int64),  # -1 = none
    ("processed", np.bool_),  # log-probabilities of the processed logits
])  # fmt: skip

_FREE = -1


@dataclass(frozen=True, slots=True)
class SparseEntries:
    """Values to add to single logits: `value` everywhere, or -inf on rows that draw before `until_output` tokens."""

    row: NDArray[np.int64]  # [E]
    token_id: NDArray[np.int64]  # [E]
    value: NDArray[np.float32]  # [E]
    until_output: NDArray[np.int64]  # [E] 0 = always


class SlotTable:
    """Records by slot. `admit` fills one, `release` frees it unless it was taken by a later generation meanwhile."""

    def __init__(self, num_slots: int, eos_token_id: int, logprobs_mode: LogprobsMode) -> None:
        self._records = np.zeros(num_slots, _RECORD)
        self._records["generation"] = _FREE
        self._eos_token_id = eos_token_id
        self._logprobs_mode = logprobs_mode
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._ends: dict[int, NDArray[np.int64]] = {}

    def admit(self, admission: Admission) -> None:
        """Take the request's parameters into its slot."""
        slot, params = admission.slot, admission.params
        self._clear(slot)
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, np.int64)
            self._bias[slot] = (ids, np.fromiter(params.logit_bias.values(), np.float32))
        if params.min_tokens:
            ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {self._eos_token_id})
            self._ends[slot] = np.array(sorted(ends), np.int64)
        record = self._records[slot]
        record["generation"] = admission.generation
        record["greedy"] = params.greedy
        record["temperature"] = 1.0 if params.greedy else params.temperature
        record["top_k"], record["top_p"], record["min_p"] = params.top_k, params.top_p, params.min_p
        record["penalties"] = params.has_penalties
        record["repetition"] = params.repetition_penalty
        record["presence"], record["frequency"] = params.presence_penalty, params.frequency_penalty
        record["seed"] = np.uint64(admission.seed).astype(np.int64)
        record["prompt_tokens"], record["min_tokens"] = admission.prompt_tokens, params.min_tokens
        record["sparse"] = slot in self._bias or slot in self._ends
        record["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
        record["processed"] = (params.logprobs_mode or self._logprobs_mode) == "processed"

    def release(self, release: Release) -> bool:
        """Free the slot; False, and nothing happens, when another generation holds it."""
        if self._records["generation"][release.slot] != release.generation:
            return False
        self._clear(release.slot)
        return True

    def _clear(self, slot: int) -> None:
        self._records[slot] = np.zeros((), _RECORD)
        self._records["generation"][slot] = _FREE
        self._bias.pop(slot, None)
        self._ends.pop(slot, None)

    def records(self, slots: NDArray[np.int32]) -> NDArray[np.void]:
        """A copy of one record for each of `slots`."""
        return self._records[slots]

    def sparse_entries(self, slots: NDArray[np.int32], starts: NDArray[np.int32]) -> SparseEntries | None:
        """What the segments (slots [M], starts [M + 1]) add to single logits; None = nothing."""
        parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], int]] = []
        for segment in np.flatnonzero(self._records["sparse"][slots]):
            slot, rows = int(slots[segment]), np.arange(starts[segment], starts[segment + 1], dtype=np.int64)
            if slot in self._bias:
                parts.append((rows, *self._bias[slot], 0))
            if slot in self._ends:
                ends = self._ends[slot]
                never = np.full(len(ends), -np.inf, np.float32)
                parts.append((rows, ends, never, int(self._records["min_tokens"][slot])))
        if not parts:
            return None
        return SparseEntries(
            row=np.concatenate([np.repeat(rows, len(ids)) for rows, ids, _, _ in parts]),
            token_id=np.concatenate([np.tile(ids, len(rows)) for rows, ids, _, _ in parts]),
            value=np.concatenate([np.tile(values, len(rows)) for rows, _, values, _ in parts]),
            until_output=np.concatenate([np.full(len(rows) * len(ids), until) for rows, ids, _, until in parts]),
        )
