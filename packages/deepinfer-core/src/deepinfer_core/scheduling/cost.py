"""`CostModel`: seconds of a step by its rows, measured at start and corrected while serving.

    step seconds = verify(rows) + draft(requests)

    verify   |            ________/    up to `captured_rows` a staircase: a step is padded to the next captured size
             |    _______|             above it a straight line between the measured points
             | __|                     never falling: a larger step that looks cheaper is noise

The corrections are one factor a measured point, an average over the steps that were seen near it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.budget import Float64Array

__all__ = ["CostModel", "CostTable"]

_CORRECTION_RATE = 0.1  # weight of one measured step
_MAX_CORRECTION = 8.0  # a pause of the process is not a property of the device
_REBUILD_STEPS = 16


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured (rows, seconds) points, ascending by rows. Raises ConfigError unless they are positive and finite."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    captured_rows: int = 0  # largest graph size; steps up to it are padded to the next point

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ConfigError(
                f"a cost table has {len(self.rows)} sizes and {len(self.seconds)} times; give one time a size"
            )
        if self.rows[0] < 1 or any(b <= a for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ConfigError(f"the sizes of a cost table must ascend from at least 1: {list(self.rows)}")
        if not all(math.isfinite(t) and t > 0 for t in self.seconds):
            raise ConfigError(f"the times of a cost table must be positive: {list(self.seconds)}")

    def dense(self, max_rows: int, correction: Sequence[float] | Float64Array | None = None) -> Float64Array:
        """Seconds for 0..max_rows rows [max_rows + 1], each point times its correction, made monotone."""
        points = np.asarray(self.seconds) * (1.0 if correction is None else np.asarray(correction))
        points = _monotone(points)
        sizes = np.asarray(self.rows, np.float64)
        wanted = np.arange(max_rows + 1, dtype=np.float64)
        seconds = np.interp(wanted, sizes, points)
        if len(points) > 1:  # beyond the last point: its slope goes on
            slope = (points[-1] - points[-2]) / (sizes[-1] - sizes[-2])
            seconds += np.maximum(wanted - sizes[-1], 0.0) * slope
        padded = wanted <= min(self.captured_rows, self.rows[-1])
        seconds[padded] = points[np.searchsorted(sizes, wanted[padded])]
        return seconds


class CostModel:
    """Prior tables with a correction a point, learned from the steps that ran.

    max_rows, max_requests: of a step; tables are continued to there.
    """

    def __init__(self, verify: CostTable, draft: CostTable, *, max_rows: int, max_requests: int) -> None:
        self._verify = verify
        self.max_rows = max_rows
        self.max_requests = max_requests
        self._correction = np.ones(len(verify.rows))
        self._observed = 0
        self._prior_seconds = verify.dense(max_rows)
        self._verify_seconds = self._prior_seconds
        self._draft_seconds = draft.dense(max_requests)

    def verify_seconds(self, first_rows: int, count: int) -> Float64Array:
        """Cost of the target's pass for first_rows, first_rows + 1, .. rows, `count` values at most [<= count]."""
        return self._verify_seconds[first_rows : first_rows + count]

    def draft_seconds(self, num_requests: int) -> float:
        """Cost of drafting for so many requests; drafting for none is free."""
        return float(self._draft_seconds[num_requests]) if num_requests else 0.0

    def observe(self, rows: int, num_drafting: int, seconds: float) -> None:
        """Correct the model by a step that took `seconds` for `rows` rows and drafts for `num_drafting` requests."""
        rows = min(rows, self.max_rows)
        ratio = (seconds - self.draft_seconds(num_drafting)) / self._prior_seconds[rows]
        ratio = min(max(ratio, 1 / _MAX_CORRECTION), _MAX_CORRECTION)
        point = min(int(np.searchsorted(self._verify.rows, rows)), len(self._correction) - 1)
        self._correction[point] += _CORRECTION_RATE * (ratio - self._correction[point])
        self._observed += 1
        if self._observed % _REBUILD_STEPS == 0:
            self._verify_seconds = self._verify.dense(self.max_rows, self._correction)


def _monotone(values: Float64Array) -> Float64Array:
    """The mean of the tightest rising curves above and below `values`; `values` itself if it rises."""
    above = np.maximum.accumulate(values)
    below = np.minimum.accumulate(values[::-1])[::-1]
    return (above + below) / 2
