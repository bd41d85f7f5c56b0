"""`BalancePolicy`: at the end of a window, which experts move where, if that pays. Pure: one rank decides for all.

    load [L, E] of the window ─► plan from the placement in force ─► layers whose gain exceeds its cost ─► token split

What earlier rearrangements turned out to bring of what they promised lowers what the next ones are trusted with:
of a load that drifts fast, a gain measured on the last window is half gone in the next. A window without moves restores
some of the trust, or a balancer that was misled for a while would rest for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_core.scheduling.expert_load import MoveCost, TokenSplit, only_moves_that_pay, split_tokens
from deepinfer_core.scheduling.expert_placement import (
    ExpertMove,
    ExpertTopology,
    Placement,
    balancedness,
    plan,
)

__all__ = ["BalanceDecision", "BalancePolicy"]

type FloatArray = NDArray[np.float64]

_TRUST_IN_NEWEST = 0.5  # of an exponential mean
_TRUST_REGAINED = 0.1  # of what is missing of it, a window without moves


@dataclass(frozen=True, slots=True, eq=False)
class BalanceDecision:
    """What a window leads to. `moves` may be empty; the split follows the load in any case."""

    placement: Placement
    split: TokenSplit
    moves: tuple[ExpertMove, ...]
    before: FloatArray  # [L] balancedness of the window under the placement that it ran with
    after: FloatArray  # [L] of the same load under the new one


@dataclass(slots=True)
class BalancePolicy:
    """`steps_ahead`: until the next decision. `lasting_share`: see `MoveCost`; learnt from one decision to the next."""

    topology: ExpertTopology
    steps_ahead: int
    lasting_share: float = 1.0
    _promised: BalanceDecision | None = None

    def decide(
        self, load: FloatArray, placement: Placement, *, layer_seconds: float, move_seconds: float
    ) -> BalanceDecision:
        """load [L, E] of a window that ran with `placement`; seconds as in `MoveCost`."""
        now = balancedness(load, placement)
        self._learn(now)
        planned = plan(load, placement, self.topology, len(placement.expert_of_slot[0]))
        cost = MoveCost(
            layer_seconds=layer_seconds,
            move_seconds=move_seconds,
            steps_ahead=self.steps_ahead,
            lasting_share=self.lasting_share,
        )
        chosen = only_moves_that_pay(planned, placement, cost)
        decision = BalanceDecision(
            chosen.placement,
            split_tokens(load, chosen.placement),
            chosen.moves,
            now,
            chosen.balancedness,
        )
        self._promised = decision if decision.moves else None
        return decision

    def _learn(self, now: FloatArray) -> None:
        """Compare what the last rearrangement promised with what its first window had, in time lost to imbalance."""
        if self._promised is None:
            self.lasting_share += _TRUST_REGAINED * (1 - self.lasting_share)
            return
        promised = float((1 / self._promised.before - 1 / self._promised.after).sum())
        brought = float((1 / self._promised.before - 1 / now).sum())
        if promised > 0:
            share = min(1.0, max(0.0, brought / promised))
            self.lasting_share += _TRUST_IN_NEWEST * (share - self.lasting_share)
