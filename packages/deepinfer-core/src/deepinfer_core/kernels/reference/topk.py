"""Top-k with one rule for the whole engine: value descending, then lower index; invisible entries never enter.

A float32 score and its index form one int64 key, so that no two keys are equal and the choice depends neither on
padding nor on the library's order among ties:

    key = (order-preserving integer of the score) << 32 | (2^32 - 1 - index)
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["top_k", "top_k_set"]

_LOW = 0xFFFFFFFF
_NEGATIVE_INFINITY = -0x7F800001  # order-preserving integer of -inf


def top_k(scores: Tensor, k: int) -> Tensor:
    """Indices of the k best of scores [..., N] float32, best first, -1 where fewer than k are above -inf: [..., k]
    int64.
    """
    n = scores.shape[-1]
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered << 32) | (_LOW - torch.arange(n, device=scores.device))
    best = torch.topk(keys, min(k, n), dim=-1).values
    indices = _LOW - (best & _LOW)
    visible = (best >> 32) > _NEGATIVE_INFINITY
    indices = torch.where(visible, indices, -1)
    return indices if n >= k else torch.nn.functional.pad(indices, (0, k - n), value=-1)


def top_k_set(scores: Tensor, k: int) -> Tensor:
    """Like `top_k`, but ascending by index, the -1 last."""
    indices = top_k(scores, k)
    ordered = torch.where(indices < 0, _LOW, indices).sort(-1).values
    return torch.where(ordered == _LOW, -1, ordered)
