"""`AcceptanceMeter`: what became of drafts, by position, and what to expect of the next ones.

    planned survival s    what was known of a draft when its step was planned: that of this block, or of the one before
    outcome y             1 if it and all drafts before it were accepted
    expected survival     E[y | s] = intercept + slope s, a line a position, fitted to the drafts that were verified

A line corrects three things at once: a confidence head that promises too much, one that promises too little, and
confidences that are a step old, which say less about the block at hand (the slope falls, the mean stays). Which drafts
are verified depends on s, but a regression on s is not biased by that.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from deepinfer_core.scheduling.budget import accumulate_positions
from deepinfer_core.scheduling.plan import FloatArray, Int64Array

__all__ = ["UNKNOWN_SURVIVAL", "AcceptanceMeter"]

UNKNOWN_SURVIVAL: Final = 2.0  # above every probability: nothing is known of the block yet

_MEMORY_BLOCKS = 400  # that the line remembers, but at least
_MEMORY_STEPS = 50
_REFIT_BLOCKS = 8  # new ones that move the line noticeably; one request brings one a step, and a fit takes a while
_PRIOR_WEIGHT = 3.0  # blocks at each end of the line y = s, until outcomes say otherwise
_STEEPEST = 2.0
_COLLAPSED_BELOW = 0.1  # of first drafts; a drafter that fits its target gets most of them right
_ENOUGH_DRAFTS = 1_000


class AcceptanceMeter:
    """Counts for the statistics, and the lines, for blocks of `num_drafts` drafts."""

    def __init__(self, num_drafts: int) -> None:
        self.verified = np.zeros(num_drafts, np.int64)  # drafts verified at each position
        self.accepted = np.zeros(num_drafts, np.int64)
        self._position = np.arange(num_drafts, dtype=np.int64)[:, None]
        self._sums = np.zeros((5, num_drafts))  # decayed, over verified drafts: 1, s, y, s s, s y
        self._unfitted_blocks = _REFIT_BLOCKS  # that the line does not know yet; there is none at first

    def observe(self, survival: FloatArray, num_verified: Int64Array, num_accepted: Int64Array) -> None:
        """Count the blocks of a step: planned survivals [D, R], drafts verified and accepted [R]."""
        tried = self._position < num_verified  # [D, R]
        taken = self._position < np.minimum(num_accepted, num_verified)
        self.verified += tried.sum(axis=1)
        self.accepted += taken.sum(axis=1)
        known = tried & (survival <= 1.0)
        s = survival * known
        y = taken & known
        num_blocks = np.count_nonzero(num_verified)
        self._sums *= max(1.0 - 1.0 / _MEMORY_STEPS, 1.0 - num_blocks / _MEMORY_BLOCKS)
        self._sums += np.array((known, s, y, s * s, s * y)).sum(axis=2)
        self._unfitted_blocks += num_blocks

    def _fit(self) -> None:
        w = _PRIOR_WEIGHT
        count, s, y, ss, sy = self._sums + np.array([[2 * w], [w], [w], [w], [w]])
        slope = np.clip((sy - s * y / count) / (ss - s * s / count), 0.0, _STEEPEST)
        mean = y / count
        self._slope: FloatArray = slope[:, None].astype(np.float32)
        self._intercept: FloatArray = (mean - slope * s / count)[:, None].astype(np.float32)
        self._mean: FloatArray = mean[:, None].astype(np.float32)
        self._unfitted_blocks = 0

    def expected(self, survival: FloatArray) -> FloatArray:
        """Survivals [D, R] that outcomes bear out, falling in d; where nothing is known, the mean."""
        if self._unfitted_blocks >= _REFIT_BLOCKS:
            self._fit()
        line = (self._intercept + self._slope * survival).astype(np.float32, copy=False)
        np.copyto(line, self._mean, where=survival > 1.0)
        np.clip(line, 0.0, 1.0, out=line)
        return accumulate_positions(np.minimum, line)

    @property
    def has_collapsed(self) -> bool:
        """Whether hardly any draft is accepted, as when the drafter belongs to other weights: worth a warning."""
        return bool(self.verified.sum() >= _ENOUGH_DRAFTS and self._sums[2, 0] < _COLLAPSED_BELOW * self._sums[0, 0])
