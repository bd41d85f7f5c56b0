"""`CostModel`: seconds of a step by its rows, measured at start and corrected while serving.

    step seconds = speed x (verify(rows) + draft(requests))

    verify   |            ________/    a straight line between the measured points; never falling: a larger step that
             |    _______|             looks cheaper is noise
             | __|                     up to the largest captured size a staircase: a step is padded to the next one

Corrections are factors: of the speed, of each point of the verify table, of each point of the draft table. A step shows
only their product with its time, so a Kalman filter over their logarithms shares the surprise out: to what is known
least, and to the speed, which drifts fastest. Steps with and without drafting tell the two tables apart. Steps of one
shape that follow each other are one observation, their median: one request's steps are short, and correcting the model
takes a hundredth of one.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.budget import Float64Array

__all__ = ["CostModel", "CostTable"]

# Standard deviations of logarithms, so about relative ones.
_STEP_NOISE = 0.15  # of a measured step
_SPEED_PRIOR, _SPEED_DRIFT = 0.5, 0.02  # drifts are a step's
_POINT_PRIOR, _POINT_DRIFT = 0.25, 0.002
_DRAFT_PRIOR = 0.4  # of all points of the drafter together
_ALIKE_OCTAVES = 3.0  # sizes so far apart have 1/e of their errors in common
_MOST_SURPRISE = math.log(2.0)  # a pause of the process is not a property of the device
_TOGETHER_STEPS = 8  # of one shape, at most
_REBUILD_STEPS = 8


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured (rows, seconds) points, ascending by rows. Raises ConfigError unless they are positive and finite."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    captured: tuple[int, ...] = ()  # sizes of graphs, ascending: a step up to the largest is padded to the next one

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ConfigError(
                f"a cost table has {len(self.rows)} sizes and {len(self.seconds)} times; give one time a size"
            )
        if self.rows[0] < 1 or any(b <= a for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ConfigError(f"the sizes of a cost table must ascend from at least 1: {list(self.rows)}")
        if not all(math.isfinite(t) and t > 0 for t in self.seconds):
            raise ConfigError(f"the times of a cost table must be positive: {list(self.seconds)}")

    def dense(self, max_rows: int, factors: Float64Array | None = None) -> Float64Array:
        """Seconds for 0..max_rows rows [max_rows + 1], each point times its factor, made monotone."""
        measured: Float64Array = np.array(self.seconds, np.float64)
        points = _monotone(measured if factors is None else measured * factors)
        sizes = np.asarray(self.rows, np.float64)
        wanted = self.padded(np.arange(max_rows + 1, dtype=np.float64))
        seconds = np.interp(wanted, sizes, points)
        if len(points) > 1:  # beyond the last point: its slope goes on
            slope = (points[-1] - points[-2]) / (sizes[-1] - sizes[-2])
            seconds += np.clip(wanted - sizes[-1], 0.0, None) * slope
        return seconds

    def padded(self, sizes: Float64Array) -> Float64Array:
        """Rows that steps of `sizes` compute."""
        if not self.captured:
            return sizes
        graphs = np.asarray(self.captured, np.float64)
        at = np.minimum(np.searchsorted(graphs, sizes), len(graphs) - 1)
        return np.where((sizes > 0) & (sizes <= graphs[-1]), graphs[at], sizes)

    def reaching(self, max_rows: int) -> CostTable:
        """This table with a point at `max_rows`, on the slope of its last ones: what steps of long prompts correct.

        Such a step has many times the rows of the last measured point, and other ones: it would bend that point, and
        the costs of drafts with it.
        """
        if max_rows <= self.rows[-1]:
            return self
        seconds = float(self.dense(max_rows)[-1])
        return CostTable((*self.rows, max_rows), (*self.seconds, seconds), self.captured)

    def neighbours(self, size: int) -> tuple[tuple[int, float], ...]:
        """The points that the cost at `size` comes from, with their weights: two, or one."""
        size = int(self.padded(np.array([size], np.float64))[0])
        upper = bisect_left(self.rows, size)
        if upper == len(self.rows):
            return ((upper - 1, 1.0),)
        if upper == 0 or self.rows[upper] == size:
            return ((upper, 1.0),)
        weight = (size - self.rows[upper - 1]) / (self.rows[upper] - self.rows[upper - 1])
        return (upper - 1, 1.0 - weight), (upper, weight)


class CostModel:
    """Prior tables, corrected by the steps that ran. `max_rows`, `max_requests`: of a step; tables reach to there."""

    def __init__(self, verify: CostTable, draft: CostTable, *, max_rows: int, max_requests: int) -> None:
        self.max_rows = max_rows
        self.max_requests = max_requests
        self._verify_table, self._draft_table = verify.reaching(max_rows), draft
        self._first_draft = 1 + len(self._verify_table.rows)  # factors: speed, verify points, draft points
        num_factors = self._first_draft + len(draft.rows)
        self._log_factor = np.zeros(num_factors)
        alike = np.zeros((num_factors, num_factors))  # points of a table, by how near they are
        alike[1 : self._first_draft, 1 : self._first_draft] = _likeness(self._verify_table.rows)
        alike[self._first_draft :, self._first_draft :] = _likeness(draft.rows)
        self._covariance = _POINT_PRIOR**2 * alike
        self._covariance[0, 0] = _SPEED_PRIOR**2
        self._covariance[self._first_draft :, self._first_draft :] += _DRAFT_PRIOR**2
        self._drift = _POINT_DRIFT**2 * alike
        self._drift[0, 0] = _SPEED_DRIFT**2
        self._shape = (0, 0)  # rows and drafting requests of the steps that wait to be learned from
        self._log_seconds: list[float] = []  # theirs
        self._since_rebuild = 0  # steps
        self._row_counts = np.arange(max_rows + 1, dtype=np.float64)
        self.shared_rows = 0  # of the fullest of the ranks that step together, without drafts: computed in any case
        self._rebuild()

    def verify_seconds(self, first_rows: int, count: int) -> Float64Array:
        """Cost of the target's pass for first_rows, first_rows + 1, .. rows, `count` values at most [<= count]."""
        return np.maximum(self._verify_seconds[first_rows : first_rows + count], self._shared_seconds())

    def verify_seconds_at(self, rows: Float64Array) -> Float64Array:
        """The same for mean numbers of rows [n], which need not be whole."""
        seconds: Float64Array = np.interp(rows, self._row_counts, self._verify_seconds)
        return np.maximum(seconds, self._shared_seconds())

    def _shared_seconds(self) -> float:
        """What the step costs in any case: tables rise."""
        return float(self._verify_seconds[min(self.shared_rows, self.max_rows)])

    def draft_seconds(self, num_requests: int) -> float:
        """Cost of drafting for so many requests; drafting for none is free."""
        return float(self._draft_seconds[num_requests]) if num_requests else 0.0

    def observe(self, rows: int, num_drafting: int, seconds: float) -> None:
        """Correct the model by a step that took `seconds` for `rows` rows and drafts for `num_drafting` requests."""
        shape = min(max(rows, self.shared_rows), self.max_rows), num_drafting
        if shape != self._shape:
            self._learn()
            self._shape = shape
        self._log_seconds.append(math.log(seconds))
        if len(self._log_seconds) == _TOGETHER_STEPS:
            self._learn()

    def _learn(self) -> None:
        """Share the surprise of the waiting steps out."""
        count = len(self._log_seconds)
        if count == 0:
            return
        rows, num_drafting = self._shape
        verify, draft = float(self._verify_seconds[rows]), self.draft_seconds(num_drafting)
        effect = np.zeros(len(self._log_factor))  # of each log factor on the log of the steps' seconds
        effect[0] = 1.0
        for point, weight in self._verify_table.neighbours(rows):
            effect[1 + point] = weight * verify / (verify + draft)
        if num_drafting:
            for point, weight in self._draft_table.neighbours(num_drafting):
                effect[self._first_draft + point] = weight * draft / (verify + draft)
        # The tables in use are of the last rebuild; what was learned since then is in the factors.
        known = effect @ (self._log_factor - self._built_from)
        surprise = statistics.median(self._log_seconds) - math.log(verify + draft) - known
        surprise = min(max(surprise, -_MOST_SURPRISE), _MOST_SURPRISE)
        spread = self._covariance @ effect
        gain = spread / (effect @ spread + _STEP_NOISE**2 / count)
        self._log_factor += gain * surprise
        self._covariance -= gain[:, None] * spread
        self._covariance += count * self._drift
        self._log_seconds.clear()
        self._since_rebuild += count
        if self._since_rebuild >= _REBUILD_STEPS:
            self._rebuild()

    def _rebuild(self) -> None:
        factors = np.exp(self._log_factor)
        verify, draft = factors[1 : self._first_draft], factors[self._first_draft :]
        self._verify_seconds: Float64Array = factors[0] * self._verify_table.dense(self.max_rows, verify)
        self._draft_seconds: Float64Array = factors[0] * self._draft_table.dense(self.max_requests, draft)
        self._built_from = self._log_factor.copy()
        self._since_rebuild = 0


def _likeness(sizes: tuple[int, ...]) -> Float64Array:
    """Correlation of the points of a table [N, N]: what is dearer than measured is so at nearby sizes, too."""
    octave = np.log2(np.asarray(sizes, np.float64))
    return np.exp(-np.abs(octave[:, None] - octave) / _ALIKE_OCTAVES)


def _monotone(values: Float64Array) -> Float64Array:
    """The mean of the tightest rising curves above and below `values`; `values` itself if it rises."""
    above = np.maximum.accumulate(values)
    below = np.minimum.accumulate(values[::-1])[::-1]
    return (above + below) / 2
