"""Which drafts stand. A segment is an anchor and its drafts; row k draws the token that draft k + 1 should be.

    row          0 anchor   1 draft x1   2 draft x2   3 draft x3
    own draw     y1         y2           y3           y4
    coupled      y1 = x1 ?  y2 = x2 ?    y3 = x3 ?    -            while equal; emit y1 .. y(accepted + 1)

Coupled (design.md 6): the drafter drew x with the same noise G(seed, position, v), so x = y often, and what is emitted
is always the target's own draw: a function of seed and position alone.

Ratio: x was drawn from q with noise of its own; accept with probability min(1, p(x) / q(x)), else draw from the
normalised positive part of p - q; when all stand, the last row's own draw is emitted. The emitted tokens are
distributed as p (Leviathan et al. 2023, Chen et al. 2023), but their noise depends on how many drafts were verified.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.sampling.filters import to_device
from deepinfer_core.sampling.philox import gumbel_noise, random_words, uniform
from deepinfer_core.sampling.streams import Stream

__all__ = ["SegmentGrid", "ratio_draw"]


@dataclass(frozen=True, slots=True)
class SegmentGrid:
    """Rows of M segments as a rectangle [M, 1 + D], D = the largest number of drafts; on the device."""

    row: Tensor  # [M, 1 + D] int64 row numbers, the segment's last row where it has no more
    is_row: Tensor  # [M, 1 + D] bool

    @classmethod
    def of(cls, segment_start: NDArray[np.int32], device: torch.device) -> SegmentGrid:
        """From the first rows of the segments, then the number of rows: [M + 1]."""
        lengths = np.diff(segment_start)
        column = np.arange(lengths.max(initial=1))
        row = segment_start[:-1, None] + np.minimum(column, lengths[:, None] - 1)
        return cls(to_device(row.astype(np.int64), device), to_device(column < lengths[:, None], device))

    def accept(self, emitted: Tensor, stands: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens [M, 1 + D] with -1 beyond the last, num_tokens [M]).

        emitted: int64 [N], the token that row k puts at the next position; stands: bool [N], whether the draft at that
        position, the next row's own token, is accepted (anything for a segment's last row).
        """
        # Row k's verdict is about row k + 1, so it counts only where there is one.
        good = stands[self.row[:, :-1]] & self.is_row[:, 1:]
        num_tokens = good.long().cumprod(1).sum(1) + 1
        column = torch.arange(self.row.shape[1], device=self.row.device)
        return emitted[self.row].where(column < num_tokens[:, None], -1), num_tokens

    def any_emitted(self, flag: Tensor, num_tokens: Tensor) -> Tensor:
        """bool [M]: whether `flag` [N] holds at a row whose token is emitted."""
        column = torch.arange(self.row.shape[1], device=self.row.device)
        return (flag[self.row] & (column < num_tokens[:, None])).any(1)


def ratio_draw(
    target_logits: Tensor, draft_logits: Tensor, draft: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """(emitted [R], stands [R]) for R rows that each check one draft by the ratio of probabilities.

    target_logits, draft_logits: [R, V], what softmax turns into p and q; draft: int64 [R], the token drawn from q;
    seed, position: int64 [R], position that of the draft.
    """
    p, q = target_logits.double().softmax(-1), draft_logits.double().softmax(-1)
    at = draft[:, None]
    coin = uniform(random_words(seed, position, 1, Stream.ACCEPT))  # [R, 1]
    stands = (coin * q.gather(1, at) < p.gather(1, at))[:, 0]
    residual = (p - q).clamp(min=0.0)
    # p = q up to rounding leaves nothing over; a draft is then rejected with probability 0, up to rounding, too.
    nothing = residual.amax(1, keepdim=True) <= 0.0
    scores = residual.where(~nothing, p).log().float()
    scores = scores + gumbel_noise(seed, position, p.shape[1], Stream.RESIDUAL)
    return draft.where(stands, scores.argmax(1)), stands
