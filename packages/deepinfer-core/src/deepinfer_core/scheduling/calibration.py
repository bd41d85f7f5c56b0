"""Calibration of the confidence head: Sequential Temperature Scaling and the error it removes.

    survival(k) = product over i <= k of  sigmoid(z_i / T_i)          z_i = logit of the raw confidence of draft i
    ECE(k)      = sum over bins  n_bin / n  |mean survival - share in which drafts 1..k were all accepted|

T_1, T_2, .. are chosen one after the other, each to make ECE(k) smallest with the earlier ones held. Within a position
the order of requests stays; between positions it may change, which is wanted. Acceptance depends on how drafts are
verified, so a table belongs to one verification mode and draft length. Source: DSpark paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from deepinfer_core.config.checks import check_choice, check_integer, check_number, shown
from deepinfer_core.config.scheduler import Verification
from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.budget import Float64Array
from deepinfer_core.scheduling.plan import BoolArray, FloatArray, Int64Array

__all__ = ["Calibration", "ConfidenceLog", "calibration_error", "fit_temperatures", "survival_errors"]

NUM_BINS: Final = 15
_TEMPERATURES: Final = np.geomspace(0.1, 10.0, 41)  # 1 is among them
_MIN_RECORDS: Final = 100
_MAX_DRAFTS: Final = 32


@dataclass(frozen=True, slots=True)
class ConfidenceLog:
    """N verified draft blocks: raw confidences [N, D] in (0, 1), drafts verified [N] and accepted [N] of each."""

    confidences: FloatArray
    num_verified: Int64Array
    num_accepted: Int64Array

    def __post_init__(self) -> None:
        n = len(self.confidences)
        if self.confidences.ndim != 2 or self.num_verified.shape != (n,) or self.num_accepted.shape != (n,):
            raise ConfigError(
                f"a confidence log needs [N, D], [N] and [N]; it has {self.confidences.shape}, "
                f"{self.num_verified.shape} and {self.num_accepted.shape}"
            )
        if not ((self.confidences >= 0) & (self.confidences <= 1)).all():  # NaN is neither
            raise ConfigError("a confidence log holds confidences that are not from 0 to 1")
        if ((self.num_accepted < 0) | (self.num_accepted > self.num_verified)).any():
            raise ConfigError("a confidence log says that more drafts were accepted than verified")
        num_drafts = self.confidences.shape[1]
        if not 1 <= num_drafts <= _MAX_DRAFTS or (self.num_verified > num_drafts).any():
            raise ConfigError(
                f"a confidence log is about 1 to {_MAX_DRAFTS} drafts a block; it has {num_drafts} confidences a block "
                f"and up to {self.num_verified.max(initial=0)} drafts verified"
            )

    def judged(self, position: int) -> BoolArray:
        """Records [N] in which the draft at `position` (from 0) was verified.

        A block that failed earlier without it tells the outcome too, but only a bad one: counting it would bias.
        """
        return self.num_verified > position


def calibration_error(promised: Float64Array, happened: BoolArray) -> float:
    """Expected calibration error of probabilities [N] for events [N], in 15 bins of equal width; 0 where N = 0."""
    if len(promised) == 0:
        return 0.0
    bins = np.minimum((promised * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gap = np.bincount(bins, weights=promised - happened, minlength=NUM_BINS)
    return float(np.abs(gap).sum() / len(promised))


def fit_temperatures(log: ConfidenceLog) -> tuple[float, ...]:
    """One temperature a position, fitted left to right by grid search. Raises ConfigError where records are too few."""
    logits = _logits(log.confidences)
    survival = np.ones(len(logits))
    chosen: list[float] = []
    for position in range(logits.shape[1]):
        judged = log.judged(position)
        if np.count_nonzero(judged) < _MIN_RECORDS:
            raise ConfigError(
                f"draft position {position + 1} was verified {np.count_nonzero(judged)} times; fitting needs "
                f"{_MIN_RECORDS}: log more requests, with draft_schedule=fixed"
            )
        happened = (log.num_accepted > position)[judged]
        tried = [survival * _sigmoid(logits[:, position] / temperature) for temperature in _TEMPERATURES]
        errors = np.array([calibration_error(promised[judged], happened) for promised in tried])
        # Of equal errors the temperature nearest to 1 wins: no correction without evidence.
        best = min(range(len(errors)), key=lambda i: (errors[i], abs(np.log(_TEMPERATURES[i]))))
        survival = tried[best]
        chosen.append(float(_TEMPERATURES[best]))
    return tuple(chosen)


def survival_errors(log: ConfidenceLog, temperatures: tuple[float, ...]) -> tuple[float, ...]:
    """ECE(k) of each position under `temperatures`."""
    scaled = _sigmoid(_logits(log.confidences) / np.asarray(temperatures))
    survival = np.cumprod(scaled, axis=1)
    errors: list[float] = []
    for position in range(scaled.shape[1]):
        judged = log.judged(position)
        errors.append(calibration_error(survival[judged, position], (log.num_accepted > position)[judged]))
    return tuple(errors)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted table, what it is for, and what it gained."""

    verification: Verification
    temperatures: tuple[float, ...]
    num_records: int
    error_before: tuple[float, ...]
    error_after: tuple[float, ...]

    @classmethod
    def fit(cls, log: ConfidenceLog, verification: Verification) -> Calibration:
        """Fit to a log that was taken with all temperatures at 1."""
        temperatures = fit_temperatures(log)
        identity = (1.0,) * len(temperatures)
        return cls(
            verification=verification,
            temperatures=temperatures,
            num_records=len(log.confidences),
            error_before=survival_errors(log, identity),
            error_after=survival_errors(log, temperatures),
        )

    def for_use(self, verification: Verification, num_drafts: int) -> tuple[float, ...]:
        """The temperatures. Raises ConfigError for another mode or draft length than they were fitted for."""
        if verification != self.verification or num_drafts != len(self.temperatures):
            raise ConfigError(
                f"this calibration is for verification={self.verification!r} with {len(self.temperatures)} drafts, not "
                f"for {verification!r} with {num_drafts}; run deepinfer calibrate with these settings"
            )
        return self.temperatures

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "verification": self.verification,
            "temperatures": list(self.temperatures),
            "num_records": self.num_records,
            "error_before": list(self.error_before),
            "error_after": list(self.error_after),
        }

    @classmethod
    def from_dict(cls, raw: Any) -> Calibration:
        """From `as_dict`. Raises ConfigError for anything else."""
        if not isinstance(raw, dict) or set(cast("dict[Any, Any]", raw)) != set(cls.__slots__):
            raise ConfigError(
                f"a calibration needs exactly the keys {', '.join(cls.__slots__)}; it is {shown(cast('object', raw))}"
            )
        values = cast("dict[str, Any]", raw)
        check_choice("verification", values["verification"], ("coupled", "ratio"), ConfigError)
        check_integer("num_records", values["num_records"], 0, 2**53, ConfigError)
        numbers = {
            name: _numbers(name, values[name], low, high)
            for name, low, high in (
                ("temperatures", 0.01, 100.0),
                ("error_before", 0.0, 1.0),
                ("error_after", 0.0, 1.0),
            )
        }
        if len({len(row) for row in numbers.values()}) != 1:
            raise ConfigError("a calibration needs as many errors before and after as temperatures")
        return cls(verification=values["verification"], num_records=values["num_records"], **numbers)


def _numbers(name: str, values: Any, low: float, high: float) -> tuple[float, ...]:
    if not isinstance(values, list) or not 1 <= len(cast("list[Any]", values)) <= _MAX_DRAFTS:
        raise ConfigError(f"{name} is {shown(cast('object', values))}; it must be a list of 1 to {_MAX_DRAFTS} numbers")
    items = cast("list[Any]", values)
    return tuple(check_number(f"{name}[{i}]", value, low, high, ConfigError) for i, value in enumerate(items))


def _logits(confidences: FloatArray) -> Float64Array:
    clipped = np.clip(confidences.astype(np.float64), 1e-7, 1 - 1e-7)
    return np.log(clipped) - np.log1p(-clipped)


def _sigmoid(values: Float64Array) -> Float64Array:
    return 1.0 / (1.0 + np.exp(-values))
