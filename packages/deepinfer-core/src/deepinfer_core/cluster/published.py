"""The published points, which of them are fitted, and what the cost model says about the others.

    point        what                                                        role
    decode-8     EP64, 8 requests a rank, 3 drafts, 131,072 tokens: 300 tokens/s a user            fitted: latency
    decode-256   the same with 256 requests: 25,600 tokens/s a device                              held out
    prefill-64k  EP4, 65,536 tokens a rank, 140 kept: 730 ms                                       fitted: efficiency
    prefill-4k   the same with 4,096 tokens: 60,000 tokens/s a device                              held out
    dspark-60    fixed 5 drafts to scheduled ones at 60 sequences a rank: +4 to +7 % throughput    held out
    dspark-16    the same at 16: -1.5 %                                                            held out

"75 % acceptance" of the decode points has two readings: `position`, each draft is accepted with 0.75 if those before
it were (1 + 0.75 + 0.75^2 + 0.75^3 = 2.73 tokens a step); `drafts`, 75 % of all drafts are (3.25). Steps are as much
longer under the second. Both are kept. Source: the original's charts, as read off by MarkTechPost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from deepinfer_core.cluster.drafting import DraftSettings, draft_table
from deepinfer_core.cluster.figures import Figure
from deepinfer_core.cluster.hardware import device_named
from deepinfer_core.cluster.model_work import RELEASE
from deepinfer_core.cluster.step_cost import Calibration, StepCost

__all__ = ["READINGS", "PointCheck", "Reading", "calibrate", "check_points", "fitted_figures"]

type Reading = Literal["position", "drafts"]
READINGS: tuple[Reading, ...] = get_args(Reading.__value__)

DECODE_DEVICE, PREFILL_DEVICE = "GB200", "B200"  # "64 SM100" in one supernode; "4 SM100" of an 8-GPU server
CONTEXT_TOKENS = 131_072
_ACCEPTANCE, _DRAFTS = 0.75, 3
_KEPT_ROWS = 140
_USER_RATE, _DEVICE_RATE = 300.0, 25_600.0  # tokens a second
_PREFILL_S = 0.73
_DSPARK_CONTEXT = 60_000  # assumed: nothing was published
_BISECTIONS, _ROUNDS = 60, 8

_FITTED = "to decode-8 and prefill-64k; see docs/cluster.md"


class PointCheck(NamedTuple):
    """One published point beside the model's value."""

    name: str
    unit: str
    published: float
    modelled: float
    fitted: bool

    @property
    def error(self) -> float:
        """modelled / published - 1."""
        return self.modelled / self.published - 1


def tokens_per_step(reading: Reading) -> float:
    """Tokens that a request gains in a step of the decode points."""
    if reading == "drafts":
        return 1 + _ACCEPTANCE * _DRAFTS
    return sum(_ACCEPTANCE**k for k in range(_DRAFTS + 1))


@lru_cache(maxsize=4)
def calibrate(reading: Reading) -> Calibration:
    """Latency and efficiency with which both fitted points come out exactly."""
    latency_s, efficiency = 2e-4, 0.4
    for _ in range(_ROUNDS):
        efficiency = _efficiency_with(latency_s)
        latency_s = _latency_with(efficiency, tokens_per_step(reading) / _USER_RATE)
    return Calibration(latency_s, efficiency)


def _efficiency_with(latency_s: float) -> float:
    return _root(0.01, 1.0, lambda e: _PREFILL_S - _prefill_s(65_536, Calibration(latency_s, e)))


def _latency_with(efficiency: float, step_s: float) -> float:
    return _root(0.0, 1e-3, lambda s: _decode_s(8, Calibration(s, efficiency)) - step_s)


def fitted_figures(reading: Reading) -> dict[str, Figure]:
    """The calibration with its marks."""
    fit = calibrate(reading)
    return {
        "layer_latency_s": Figure(fit.layer_latency_s, "fitted", _FITTED),
        "efficiency": Figure(fit.efficiency, "fitted", _FITTED),
    }


def check_points(reading: Reading) -> list[PointCheck]:
    """Every published point, fitted or held out."""
    fit, tokens = calibrate(reading), tokens_per_step(reading)
    return [
        PointCheck("decode-8", "tokens/s a user", _USER_RATE, tokens / _decode_s(8, fit), True),
        PointCheck("decode-256", "tokens/s a device", _DEVICE_RATE, 256 * tokens / _decode_s(256, fit), False),
        PointCheck("prefill-64k", "ms a step", 1e3 * _PREFILL_S, 1e3 * _prefill_s(65_536, fit), True),
        PointCheck("prefill-4k", "tokens/s a device", 60_000.0, 4_096 / _prefill_s(4_096, fit), False),
        PointCheck("dspark-60", "throughput, scheduled / fixed", 1.055, _scheduling_gain(60, fit), False),
        PointCheck("dspark-16", "throughput, scheduled / fixed", 0.985, _scheduling_gain(16, fit), False),
    ]


def _decode_s(requests: int, fit: Calibration) -> float:
    cost = StepCost(RELEASE, device_named(DECODE_DEVICE), 64, fit)
    return float(cost.decode_seconds(np.array([float(requests)]), np.array([float(_DRAFTS)]), CONTEXT_TOKENS)[0])


def _prefill_s(rows: int, fit: Calibration) -> float:
    cost = StepCost(RELEASE, device_named(PREFILL_DEVICE), 4, fit)
    return cost.prefill_seconds(rows, _KEPT_ROWS, CONTEXT_TOKENS)


def _scheduling_gain(requests: int, fit: Calibration) -> float:
    cost = StepCost(RELEASE, device_named(DECODE_DEVICE), 64, fit)
    rate: dict[str, float] = {}
    for schedule in ("fixed", "budget"):
        table = draft_table(cost, DraftSettings(schedule=schedule), requests, _DSPARK_CONTEXT, 1.0)
        rate[schedule] = table.tokens[requests] / table.seconds[requests]
    return rate["budget"] / rate["fixed"]


def _root(low: float, high: float, rising: Callable[[float], float]) -> float:
    """Where a rising function is 0, or the end of [low, high] that is nearest to it."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2
