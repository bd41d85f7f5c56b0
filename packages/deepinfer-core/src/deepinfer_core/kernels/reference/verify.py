"""Which drafts stand. A segment is an anchor and its drafts; row k draws the token that draft k + 1 should be.

row          0 anchor   1 draft x1   2 draft x2   3 draft x3
emits        y1         y2           y3           y4
stands       y1 = x1 ?  y2 = x2 ?    y3 = x3 ?    -            while true; the tokens are y1 .. y(accepted + 1)
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.kernels.reference.columns import to_device

__all__ = ["accept_drafts"]


def accept_drafts(
    emitted: Tensor, stands: Tensor, failed: Tensor, segment_start: NDArray[np.int32]
) -> tuple[Tensor, Tensor, Tensor]:
    """emitted [N] int64, the token that row k puts at the next position; stands [N] bool, whether the draft there, the
    next row's own token, is accepted (anything on a segment's last row); failed [N] bool; segment_start [M + 1] on the
    host: the first row of each of M segments, then N
    -> tokens [M, 1 + D] int64, -1 beyond the last, D the largest number of drafts; num_tokens [M] int64; bool [M]
    whether a row failed whose token is taken.
    """
    lengths = np.diff(segment_start)
    column = np.arange(lengths.max(initial=1))
    device = emitted.device
    row = to_device((segment_start[:-1, None] + np.minimum(column, lengths[:, None] - 1)).astype(np.int64), device)
    is_row = to_device(column < lengths[:, None], device)  # [M, 1 + D]
    # Row k's verdict is about row k + 1, so it counts only where there is one.
    good = stands[row[:, :-1]] & is_row[:, 1:]
    num_tokens = good.long().cumprod(1).sum(1) + 1
    taken = torch.arange(row.shape[1], device=device) < num_tokens[:, None]
    return emitted[row].where(taken, -1), num_tokens, (failed[row] & taken).any(1)
