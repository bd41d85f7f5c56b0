"""How level the experts are between two rearrangements, when their load drifts.

    balance    1 |\\      |\\      |\\
    mean/busiest |  \\__   |  \\__   |  \\__      at each rearrangement the engine's planner places the experts
                 |     \\__|     \\__|     \\__   for the last window and splits tokens by it; then the load walks away
                 +--------interval-------->  steps

The load of an expert is Zipf's with a random walk of its logarithm, scaled back to the same spread; placement and split
are the engine's own (`expert_placement.plan`, `expert_load.split_tokens`). Layers are alike, so a few stand for all.
The published "busiest +9 %" is a balance of 0.917.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deepinfer_core.cluster.settings import Section, setting
from deepinfer_core.scheduling.expert_load import TokenSplit, split_tokens
from deepinfer_core.scheduling.expert_placement import ExpertTopology, Placement, balancedness, plan

__all__ = ["PHASES", "BalanceSettings", "balance_by_phase"]

type FloatArray = NDArray[np.float64]

PHASES = 8  # an interval is cut into so many pieces of constant balance
_INTERVALS = 4
_LAYERS = 4
_TOKENS = 1e6  # of the busiest expert in a window


@dataclass(frozen=True)
class BalanceSettings(Section):
    """`[balance]` of a plan."""

    interval_steps: int = setting(10_000, 0, 10**9, "published", "as in production; 0: experts are never moved")
    spare_slots: int = setting(64, 0, 4_096, "assumed", "one spare expert a decode device")
    zipf: float = setting(0.8, 0.0, 3.0, "assumed", "how uneven the router's load is")
    drift: float = setting(0.12, 0.0, 5.0, "assumed", "walk of log load in an interval; gives the published 0.917")
    move_seconds: float = setting(0.06, 0.0, 60.0, "published", "1.5 ms a layer, of SwiftBalancer: added at each move")


def balance_by_phase(settings: BalanceSettings, num_devices: int, num_experts: int) -> tuple[float, ...]:
    """Mean / busiest device in each phase of an interval [PHASES], a mean over layers and intervals.

    With interval_steps 0 experts lie as one plan for a load of long ago left them: all phases are alike.
    """
    if not settings.interval_steps:
        return (_balance_of_a_stranger(num_devices, num_experts, settings.spare_slots, settings.zipf),) * PHASES
    return _balance_by_phase(num_devices, num_experts, settings.spare_slots, settings.zipf, settings.drift)


@lru_cache(maxsize=32)
def _balance_by_phase(
    num_devices: int, num_experts: int, spare_slots: int, zipf: float, drift: float
) -> tuple[float, ...]:
    topology = ExpertTopology(num_devices=num_devices)
    num_slots = num_experts + spare_slots
    rng = np.random.default_rng(0)
    load = _zipf_load(num_experts, zipf, rng)
    placement = plan(load, None, topology, num_slots).placement
    seen: list[list[float]] = []
    for _ in range(_INTERVALS):
        split = split_tokens(load, placement)
        phases: list[float] = []
        for _ in range(PHASES):
            load = _walk(load, drift / PHASES**0.5, rng)
            phases.append(_balance(load, placement, split))
        seen.append(phases)
        placement = plan(load, placement, topology, num_slots).placement
    return tuple(np.mean(seen, axis=0).tolist())


@lru_cache(maxsize=32)
def _balance_of_a_stranger(num_devices: int, num_experts: int, spare_slots: int, zipf: float) -> float:
    rng = np.random.default_rng(0)
    planned, met = _zipf_load(num_experts, zipf, rng), _zipf_load(num_experts, zipf, rng)
    placement = plan(planned, None, ExpertTopology(num_devices=num_devices), num_experts + spare_slots).placement
    return float(balancedness(met, placement).mean())


def _zipf_load(num_experts: int, zipf: float, rng: np.random.Generator) -> FloatArray:
    """[L, E]: in another order in every layer."""
    ranks: FloatArray = np.arange(1, num_experts + 1, dtype=np.float64) ** -zipf
    return np.array([rng.permutation(ranks) for _ in range(_LAYERS)]) * _TOKENS


def _walk(load: FloatArray, deviation: float, rng: np.random.Generator) -> FloatArray:
    """Another load of the same mean and spread."""
    log = np.log(load)
    moved = log + deviation * rng.normal(size=log.shape)
    moved -= moved.mean(axis=1, keepdims=True)
    spread = log.std(axis=1, keepdims=True)
    moved *= np.divide(spread, moved.std(axis=1, keepdims=True), out=np.ones_like(spread), where=spread > 0)
    return np.exp(moved + log.mean(axis=1, keepdims=True))


def _balance(load: FloatArray, placement: Placement, split: TokenSplit) -> float:
    device_load = np.zeros((len(load), len(placement.slot_start) - 1))
    layer, expert, replica = np.nonzero(split.slots >= 0)
    device = placement.device_of_slot[split.slots[layer, expert, replica]]
    np.add.at(device_load, (layer, device), load[layer, expert] * split.shares()[layer, expert, replica])
    return float((device_load.mean(axis=1) / device_load.max(axis=1)).mean())
