"""Recorded routing, played again under a balancer: what the busiest device would have had, step by step. Pure.

    counts [T, L, E]     ─► first placement, never changed                      ─► busiest / mean [T]   without
                         ─► windows, plans, moves that pay, new token splits    ─► busiest / mean [T]   with

A layer's busiest / mean is averaged over the layers of a step; a layer without tokens in a step is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_core.config.checks import check_integer
from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.expert_balance import BalancePolicy
from deepinfer_core.scheduling.expert_load import TokenSplit, split_tokens, window_step
from deepinfer_core.scheduling.expert_placement import ExpertTopology, Placement, plan

__all__ = ["Rearrangement", "ReplayCosts", "ReplayedBalance", "replay_routing", "skewed"]

type IntArray = NDArray[np.int64]
type FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCosts:
    """Times for the guard, see `MoveCost`; and how many steps pass between a plan and its last swap."""

    layer_seconds: float = 2e-4
    move_seconds: float = 1e-5
    steps_to_move: int = 10


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """One plan with moves."""

    step: int  # at which it is in force
    moves: int
    lasting_share: float  # of its promises that were believed when it was made


@dataclass(frozen=True, slots=True, eq=False)
class _InForce:
    """From `step` on."""

    step: int
    placement: Placement
    split: TokenSplit
    moves: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedBalance:
    """busiest / mean of each step [T], and what was moved."""

    without: FloatArray
    with_balancer: FloatArray
    rearrangements: tuple[Rearrangement, ...]


def replay_routing(
    counts: IntArray, topology: ExpertTopology, num_slots: int, window: int, interval: int, costs: ReplayCosts
) -> ReplayedBalance:
    """counts [T, L, E]: tokens of each expert, step by step. Raises ConfigError for sizes that do not fit."""
    if counts.ndim != 3 or 0 in counts.shape:
        raise ConfigError(f"counts have shape {list(counts.shape)}; they must be [steps, layers, experts], none 0")
    check_integer("interval", interval, 1, 2**31, ConfigError)
    num_layers, num_experts = counts.shape[1:]
    first = plan(np.ones((num_layers, num_experts)), None, topology, num_slots).placement
    even = split_tokens(np.zeros((num_layers, num_experts)), first)
    without = np.array([_busiest_over_mean(step, first, even) for step in counts])
    policy = BalancePolicy(topology, interval)
    now = _InForce(0, first, even)
    pending: _InForce | None = None
    window_load = np.zeros((num_layers, num_experts))
    made: list[Rearrangement] = []
    balanced: list[float] = []
    for step, load in enumerate(counts):
        if pending is not None and step >= pending.step:
            now, pending = pending, None
            if now.moves:
                made.append(Rearrangement(step, now.moves, policy.lasting_share))
        balanced.append(_busiest_over_mean(load, now.placement, now.split))
        place = window_step(step, interval, window)
        if place.starts:
            window_load[:] = 0
        if place.counted:
            window_load += load
        if place.ends and pending is None:
            decision = policy.decide(
                window_load, now.placement, layer_seconds=costs.layer_seconds, move_seconds=costs.move_seconds
            )
            in_force = step + 1 + costs.steps_to_move
            pending = _InForce(in_force, decision.placement, decision.split, len(decision.moves))
    return ReplayedBalance(without, np.array(balanced), tuple(made))


def skewed(counts: IntArray, exponent: float, drift_steps: int, seed: int = 0) -> IntArray:
    """The same routing with some experts asked for more: each count times (rank of its expert)^-exponent, ranks by
    chance and drawn anew for a tenth of the experts every `drift_steps`. Sums of a layer stay about the same.
    """
    rng = np.random.default_rng(seed)
    num_steps, num_layers, num_experts = counts.shape
    ranks = np.stack([rng.permutation(num_experts) for _ in range(num_layers)])
    out = np.empty_like(counts)
    for step in range(num_steps):
        if step and step % drift_steps == 0:
            for layer in range(num_layers):
                chosen = rng.choice(num_experts, max(2, num_experts // 10), replace=False)
                ranks[layer, chosen] = ranks[layer, rng.permutation(chosen)]
        weighed = counts[step] * (1.0 + ranks) ** -exponent
        total = weighed.sum(1, keepdims=True)
        scale = np.divide(counts[step].sum(1, keepdims=True), total, out=np.ones_like(total), where=total > 0)
        out[step] = np.rint(weighed * scale)
    return out


def _busiest_over_mean(load: IntArray, placement: Placement, split: TokenSplit) -> float:
    """Of one step's load [L, E], an expert's tokens shared between its replicas as the split says."""
    num_layers, num_slots = placement.expert_of_slot.shape
    shares = split.shares() * load[:, :, None]  # [L, E, R]
    held = split.slots >= 0
    per_slot = np.zeros((num_layers, num_slots))
    per_slot[np.nonzero(held)[0], split.slots[held]] = shares[held]
    per_device = np.add.reduceat(per_slot, placement.slot_start[:-1], axis=1)
    busy = per_device.sum(1) > 0
    if not busy.any():
        return 1.0
    return float((per_device[busy].max(1) / per_device[busy].mean(1)).mean())
