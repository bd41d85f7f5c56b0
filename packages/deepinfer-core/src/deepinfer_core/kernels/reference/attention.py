"""Sparse attention with a sink over a window and selected entries; keys are values (docs/model.md: Attention).

    l_k = q . k / sqrt(D);   o = sum_k exp(l_k) k / (sum_k exp(l_k) + exp(sink))

Every row has the same number of key columns, visible or not: [window | selected]. A column that is not visible has
bias -inf and an arbitrary finite key, so it adds an exact zero, and the shapes, hence the bits, don't depend on the
company in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sparse_attention"]


def sparse_attention(
    q: Tensor,
    window_keys: Tensor,
    window_bias: Tensor,
    entry_keys: Tensor | None,
    entry_bias: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """One row = one query position of one request.

    q [R, H, D]; window_keys [R, W, D]; window_bias [R, W] (0 or -inf); entry_keys [R, E, D], entry_bias [R, E] or
    None; sink [H] -> [R, H, D]. A row with no visible key gives 0. The softmax runs in float32.
    """
    heads, dim = q.shape[1], q.shape[2]
    scaled = q * dim**-0.5
    logits = [torch.baddbmm(_spread(window_bias, heads), scaled, window_keys.transpose(1, 2))]
    if entry_keys is not None and entry_bias is not None:
        logits.append(torch.baddbmm(_spread(entry_bias, heads), scaled, entry_keys.transpose(1, 2)))
    logits.append(sink.to(q.dtype)[None, :, None].expand(q.shape[0], -1, 1))
    probabilities = torch.softmax(torch.cat(logits, -1).float(), -1).to(q.dtype)
    window = window_keys.shape[1]
    out = torch.bmm(probabilities[..., :window], window_keys)
    if entry_keys is not None:
        out = torch.baddbmm(out, probabilities[..., window:-1], entry_keys)
    return out


def _spread(bias: Tensor, heads: int) -> Tensor:
    return bias[:, None].expand(-1, heads, -1)
