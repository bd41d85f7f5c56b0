"""Log-probabilities of drawn tokens and of the most likely ones, with ranks that are unique.

    logprob(v) = log_softmax(x)_v          rank(v) = 1 + #{u : x_u > x_v, or x_u = x_v and u < v}

so the token with rank r is entry r - 1 of the descending list: equal values go by the lower id in both. Order is that
of the logits themselves, which their log-probabilities, rounded, may not tell apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.kernels.reference.filters import top_k_mask

__all__ = ["token_logprobs"]


def token_logprobs(logits: Tensor, token: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [R, V] float32, token [R] int64 -> logprob [R] float32 and rank [R] int64 of `token`, 1 = most likely;
    the n = min(num_top, V) most likely ids [R, n] int64, by descending value, then ascending id, and theirs [R, n].
    """
    logprobs = logits.log_softmax(-1)
    own = logits.gather(1, token[:, None])  # [R, 1]
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logits > own) | ((logits == own) & (ids < token[:, None]))
    top_ids = _top_ids(logits, min(num_top, logits.shape[1]))
    return logprobs.gather(1, token[:, None])[:, 0], ahead.sum(1) + 1, top_ids, logprobs.gather(1, top_ids)


def _top_ids(values: Tensor, n: int) -> Tensor:
    """ids [R, n] of the n largest entries, by descending value, then ascending id."""
    num_rows, num_ids = values.shape
    if n == 0:
        return values.new_empty(num_rows, 0, dtype=torch.int64)
    kept = top_k_mask(values, torch.full((num_rows,), n, device=values.device), n)
    ids = torch.arange(num_ids, device=values.device).where(kept, num_ids)
    ids = ids.topk(n, dim=1, largest=False, sorted=True).values  # the kept ids, ascending
    order = values.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)
