"""A rank process whose balancer places the experts anew, by chance, after every window."""

from __future__ import annotations

import sys

import numpy as np

from deepinfer_core.runtime import rank_main, rank_part
from deepinfer_core.scheduling.expert_balance import BalanceDecision, BalancePolicy
from deepinfer_core.scheduling.expert_load import split_tokens
from deepinfer_core.scheduling.expert_placement import Placement, balancedness, moves_between, plan


class RestlessPolicy(BalancePolicy):
    """Asserts what it is told, and decides without looking at it."""

    num_decisions = 0

    def decide(
        self, load: np.ndarray, placement: Placement, *, layer_seconds: float, move_seconds: float
    ) -> BalanceDecision:
        assert layer_seconds > 0
        assert move_seconds > 0
        type(self).num_decisions += 1
        chance = np.random.default_rng(self.num_decisions).random(load.shape)
        new = plan(chance, None, self.topology, placement.expert_of_slot.shape[1]).placement
        moves = moves_between(placement, new, self.topology)
        before, after = balancedness(load, placement), balancedness(load, new)
        return BalanceDecision(new, split_tokens(load, new), moves, before, after)


if __name__ == "__main__":
    rank_part.BalancePolicy = RestlessPolicy  # type: ignore[misc]  # on purpose
    sys.exit(rank_main.main())
