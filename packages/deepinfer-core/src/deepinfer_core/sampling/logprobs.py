"""Log-probabilities of drawn tokens and of the most likely ones, with ranks that are unique.

    logprob(v) = log_softmax(logits)_v          rank(v) = 1 + #{u : x_u > x_v, or x_u = x_v and u < v}

so the token with rank r is entry r - 1 of the descending list: equal values go by the lower id in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.sampling.processors import top_k_mask
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


def token_logprobs(logits: Tensor, token: Tensor, num_top: int) -> LogprobRows:
    """Of `token` [R] and the `num_top` most likely entries under logits [R, V]."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, token[:, None])  # [R, 1]
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logprobs > own) | ((logprobs == own) & (ids < token[:, None]))
    top_ids, top_values = _top_entries(logprobs, min(num_top, logits.shape[1]))
    return LogprobRows(token, own[:, 0], ahead.sum(1) + 1, top_ids, top_values)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, on the device, in parts of some rows."""

    parts: tuple[LogprobRows, ...]
    num_top: int

    def on_host(self) -> list[TokenLogprobs]:
        """One entry a row. Waits for the device."""
        return [entry for part in self.parts for entry in part.on_host([self.num_top] * len(part.token))]


def prompt_logprobs(logits: Tensor, target: Tensor, num_top: int) -> PromptLogprobs:
    """For prompt rows: logits [R, V] of positions p, target [R] the prompt's tokens at p + 1."""
    rows = max(1, _TILE_LOGITS // logits.shape[1])
    pairs = zip(logits.split(rows), target.split(rows), strict=True)
    return PromptLogprobs(tuple(token_logprobs(part, tokens, num_top) for part, tokens in pairs), num_top)


def _top_entries(values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """ids and values [R, n] of the n largest entries, by descending value, then ascending id."""
    num_rows, num_ids = values.shape
    if n == 0:
        return values.new_empty(num_rows, 0, dtype=torch.int64), values.new_empty(num_rows, 0)
    kept = top_k_mask(values, torch.full((num_rows,), n, device=values.device), n)
    ids = torch.arange(num_ids, device=values.device).where(kept, num_ids)
    ids = ids.topk(n, dim=1, largest=False, sorted=True).values  # the kept ids, ascending
    top = values.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return ids.gather(1, top.indices), top.values
