"""How many drafts a step verifies and what it yields, for every number of requests a rank.

    survivals    a[j, r] of 256 typical requests: products of conditional acceptances, Beta distributed around one mean
    seconds(k)   of a step with k / 256 drafts a request
    budget       the engine's own `choose_budget` on them: the K that maximises expected tokens a second
    guard        never worse than the better of the fixed length and none, as in the engine

The mean acceptance follows from the published accepted length of five drafts. The spread decides what is lost when a
part of the drafts is dropped; it is chosen so that about 3.2 of 5 drafts are verified at 60 requests a rank, as was
published for the busy end (docs/cluster.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer_core.cluster.settings import Section, setting
from deepinfer_core.cluster.step_cost import StepCost
from deepinfer_core.scheduling.budget import choose_budget, survivals

__all__ = ["DraftSettings", "DraftTable", "draft_table"]

type FloatArray = NDArray[np.float64]

_SAMPLE = 256  # typical requests: the budget of a group is chosen over thousands
_GRID = 24  # numbers of requests at which a budget is chosen; between them the table is interpolated


@dataclass(frozen=True)
class DraftSettings(Section):
    """`[drafts]` of a plan."""

    length: int = setting(5, 0, 16, "published", "the release's block; DEEPINFER_USE_NEXTN_DECODE")
    schedule: str = setting(
        "budget", 0, 0, "published", "confidence-scheduled verification", choices=("budget", "fixed")
    )
    accepted_length: float = setting(3.29, 1.0, 6.0, "published", "tokens a step with five drafts, original's curves")
    concentration: float = setting(
        2.0, 0.05, 1e3, "assumed", "spread of confidences: 3.2 of 5 drafts verified at 60 a rank"
    )


class DraftTable(NamedTuple):
    """By requests a rank, 0 .. N: seconds of a step, tokens that a request gains in it, drafts that it verifies."""

    seconds: list[float]
    tokens: list[float]
    drafts: list[float]


def draft_table(
    cost: StepCost, settings: DraftSettings, max_requests: int, context_tokens: float, balance: float
) -> DraftTable:
    """The table for up to `max_requests` requests a rank of this mean context."""
    grid = np.unique(np.geomspace(1, max_requests, _GRID).round())
    rates = np.array([_best(cost, settings, m, context_tokens, balance) for m in grid])  # [G, 2]: drafts, tokens
    requests = np.arange(max_requests + 1, dtype=np.float64)
    drafts = np.interp(requests, grid, rates[:, 0])
    tokens = np.interp(requests, grid, rates[:, 1])
    seconds = cost.decode_seconds(requests, drafts, context_tokens, balance)
    return DraftTable(seconds.tolist(), tokens.tolist(), drafts.tolist())


def mean_acceptance(accepted_length: float) -> float:
    """The conditional acceptance p with 1 + p + .. + p^5 = `accepted_length`, or 1."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(6)) < accepted_length else (low, middle)
    return high


def _best(
    cost: StepCost, settings: DraftSettings, requests: float, context_tokens: float, balance: float
) -> tuple[float, float]:
    """Drafts a request and tokens a request and step."""
    survival = _typical_survivals(settings.length, settings.accepted_length, settings.concentration)
    most = settings.length * _SAMPLE
    fixed_tokens = 1 + float(survival.sum()) / _SAMPLE
    if settings.schedule == "fixed" or not settings.length:
        return float(settings.length), fixed_tokens
    drafts = np.arange(most + 1) / _SAMPLE
    seconds = cost.decode_seconds(np.full(most + 1, requests), drafts, context_tokens, balance)
    budget = choose_budget(survival, np.full(_SAMPLE, settings.length), seconds, _SAMPLE)
    choices = [
        (budget.num_drafts / _SAMPLE, 1 + budget.expected / _SAMPLE),
        (float(settings.length), fixed_tokens),
        (0.0, 1.0),
    ]
    return max(choices, key=lambda choice: choice[1] / seconds[round(choice[0] * _SAMPLE)])


@lru_cache(maxsize=16)
def _typical_survivals(length: int, accepted_length: float, concentration: float) -> NDArray[np.float32]:
    """[D, 256]"""
    p = mean_acceptance(accepted_length)
    rng = np.random.default_rng(0)
    spread = (max(p * concentration, 1e-6), max((1 - p) * concentration, 1e-6))
    confidences = rng.beta(*spread, size=(length, _SAMPLE)) if p < 1 else np.ones((length, _SAMPLE))
    means = confidences.mean(axis=1, keepdims=True)  # a sample of 256 is off by a percent: put back to the mean
    confidences = np.clip(confidences * (p / np.maximum(means, 1e-9)), 0, 1) if length else confidences
    return survivals(confidences.astype(np.float32), np.full(_SAMPLE, length))
