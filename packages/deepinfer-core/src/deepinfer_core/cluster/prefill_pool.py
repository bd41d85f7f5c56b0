"""The prefill pool: groups of a few ranks, each group in lockstep, fed from one queue in order of arrival.

    step of a group   rank 0 | ...rest of a long prompt......  chunk |     a rank takes up to `chunk_tokens` rows; what
                      rank 1 | prompt | prompt | part of one.. chunk |     a prompt has left it takes in the next steps
    time              that of the fullest rank

A prompt's rows run through the encoder half; the step that ends it also runs its last `keep_tokens` rows through the
decoder half and draws the first token. With `balanced_context` a step's rows are spread evenly over the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from deepinfer_core.cluster.request import Request

__all__ = ["PrefillGroup", "PrefillStep"]

type StepSeconds = Callable[[float, float, float], float]  # rows, kept rows, mean context -> seconds


class PrefillStep(NamedTuple):
    """What a group does next."""

    seconds: float
    rows: int  # of all ranks
    finished: list[Request]  # get their first token at its end


class PrefillGroup:
    """One group. The caller ends a step before it starts the next."""

    def __init__(
        self, num_ranks: int, chunk_tokens: int, keep_tokens: int, balanced_context: bool, seconds: StepSeconds
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._keep_tokens = keep_tokens
        self._balanced = balanced_context
        self._seconds = seconds
        self._carried: list[Request | None] = [None] * num_ranks  # prompts that take further steps, by rank
        self._rows: list[int] = []
        self._kept: list[int] = []
        self._context_sum = 0.0
        self._finished: list[Request] = []
        self.is_busy = False
        self.adapter_free_s = 0.0  # when its links to the decode pool are free

    def next_step(self, queue: deque[Request], now_s: float) -> PrefillStep | None:
        """Take rows for a step that starts now; None if there are none."""
        num_ranks = len(self._carried)
        self._rows, self._kept = [0] * num_ranks, [0] * num_ranks
        self._context_sum, self._finished = 0.0, []
        for rank, request in enumerate(self._carried):
            if request is not None:
                self._serve(rank, request)
        while queue:
            rank = self._rows.index(min(self._rows))
            if self._rows[rank] >= self._chunk_tokens:
                break
            request = queue.popleft()
            request.started_s = now_s
            self._serve(rank, request)
        total = sum(self._rows)
        if not total:
            return None
        if self._balanced:
            rows, kept = -(-total // num_ranks), -(-sum(self._kept) // num_ranks)
        else:
            rows, kept = max(self._rows), max(self._kept)
        return PrefillStep(self._seconds(rows, kept, self._context_sum / total), total, self._finished)

    @property
    def carried_requests(self) -> int:
        """Prompts that have begun and have not ended."""
        return sum(request is not None for request in self._carried)

    def _serve(self, rank: int, request: Request) -> None:
        rows = min(self._chunk_tokens - self._rows[rank], request.rows_left)
        self._rows[rank] += rows
        self._context_sum += rows * (request.prompt_tokens - request.rows_left + rows / 2)
        request.rows_left -= rows
        self._carried[rank] = request if request.rows_left else None
        if not request.rows_left:
            self._kept[rank] += min(self._keep_tokens, request.prompt_tokens)
            self._finished.append(request)
