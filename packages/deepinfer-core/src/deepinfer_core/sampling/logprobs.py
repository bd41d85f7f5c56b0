"""Log-probabilities on their way to the host: of drawn tokens and of a prompt's (kernels/reference/logprobs.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.scheduling.plan import TokenLogprobs

__all__ = ["LogprobRows", "PromptLogprobs", "prompt_logprobs", "token_logprobs"]

# Logits that prompt_logprobs handles at once: it bounds the memory of its temporaries.
_TILE_LOGITS = 1 << 24


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of L rows, each with `token` and the n most likely ids, on the device."""

    token: Tensor  # [L] int64
    logprob: Tensor  # [L] float32
    rank: Tensor  # [L] int64, 1 = most likely
    top_ids: Tensor  # [L, n] int64, by descending value, then ascending id
    top_logprobs: Tensor  # [L, n] float32

    def on_host(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """One entry a row, cut to the row's own number of top entries [L]. Waits for the device."""
        columns = zip(
            self.token.tolist(),
            self.logprob.tolist(),
            self.rank.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            num_top,
            strict=True,
        )
        return [
            TokenLogprobs(token, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, rank, ids, values, count in columns
        ]


def token_logprobs(logits: Tensor, token: Tensor, num_top: int, kernels: Kernels = REFERENCE) -> LogprobRows:
    """Of `token` [R] and the `num_top` most likely entries under logits [R, V]."""
    return LogprobRows(token, *kernels.token_logprobs(logits.float(), token, num_top))


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, on the device, in parts of some rows."""

    parts: tuple[LogprobRows, ...]
    num_top: int

    def on_host(self) -> list[TokenLogprobs]:
        """One entry a row. Waits for the device."""
        return [entry for part in self.parts for entry in part.on_host([self.num_top] * len(part.token))]


def prompt_logprobs(logits: Tensor, target: Tensor, num_top: int, kernels: Kernels = REFERENCE) -> PromptLogprobs:
    """For prompt rows: logits [R, V] of positions p, target [R] the prompt's tokens at p + 1."""
    rows = max(1, _TILE_LOGITS // logits.shape[1])
    pairs = zip(logits.split(rows), target.split(rows), strict=True)
    return PromptLogprobs(tuple(token_logprobs(part, tokens, num_top, kernels) for part, tokens in pairs), num_top)
