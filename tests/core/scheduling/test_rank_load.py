"""A request goes to the rank that is least loaded with it, by what would be short first."""

from __future__ import annotations

import numpy as np

from deepinfer_core.scheduling.budget import choose_budget
from deepinfer_core.scheduling.cost import CostModel, CostTable
from deepinfer_core.scheduling.rank_load import RankCapacity, RankLoad, choose_rank

CAPACITY = RankCapacity(slots=10, cache_tokens=1_000, step_rows=100)


def test_the_scarcest_of_slots_cache_and_rows_decides_and_not_their_sum() -> None:
    many_short = RankLoad(requests=6, context_tokens=60)
    one_long = RankLoad(requests=1, context_tokens=700)
    assert many_short.share(CAPACITY) == 0.6
    assert one_long.share(CAPACITY) == 0.7
    assert choose_rank([many_short, one_long], CAPACITY, prompt_tokens=10) == 0
    # As a sum, the second would be fuller: 0.3 + 0.5 + 0.5 against 0.6.
    balanced = RankLoad(requests=3, context_tokens=400, prefill_tokens=40)
    assert choose_rank([RankLoad(requests=6), balanced], CAPACITY, prompt_tokens=10) == 1


def test_a_prompt_that_waits_for_its_rows_counts() -> None:
    waiting = RankLoad(requests=1, context_tokens=90, prefill_tokens=90)
    decoding = RankLoad(requests=4, context_tokens=90)
    assert choose_rank([waiting, decoding], CAPACITY, prompt_tokens=20) == 1


def test_equal_ranks_take_turns() -> None:
    loads = [RankLoad() for _ in range(3)]
    chosen = []
    for _ in range(6):
        rank = choose_rank(loads, CAPACITY, prompt_tokens=5)
        loads[rank].requests += 1
        chosen.append(rank)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_long_prompt_does_not_go_where_a_long_one_is() -> None:
    loads = [RankLoad(requests=1, context_tokens=800, prefill_tokens=0), RankLoad(requests=5, context_tokens=300)]
    assert choose_rank(loads, CAPACITY, prompt_tokens=80) == 1


def test_drafts_up_to_the_rows_of_the_fullest_rank_are_free() -> None:
    """A step of many ranks takes as long as its fullest one needs: the others fill up to that."""
    cost = CostModel(CostTable((1, 64), (0.001, 0.064)), CostTable((1, 8), (1e-6, 1e-6)), max_rows=64, max_requests=8)
    survival = np.full((5, 2), 0.02, np.float32)  # hardly any draft is right
    caps = np.full(2, 5, np.int64)

    def budget() -> int:
        return choose_budget(survival, caps, cost.verify_seconds(2, 11) + cost.draft_seconds(2), 2).num_drafts

    alone = budget()
    cost.shared_rows = 9
    assert alone < budget() <= 7
    assert (cost.verify_seconds(0, 10) == cost.verify_seconds(9, 1)).all()
    cost.shared_rows = 0
    assert budget() == alone


def test_a_step_that_waited_for_a_fuller_rank_does_not_make_few_rows_look_expensive() -> None:
    def learned(shared_rows: int) -> float:
        table = CostTable((1, 8, 64), (0.001, 0.008, 0.064))
        cost = CostModel(table, CostTable((1, 8), (1e-6, 1e-6)), max_rows=64, max_requests=8)
        cost.shared_rows = shared_rows
        for _ in range(64):
            cost.observe(1, 0, 0.064)
        cost.shared_rows = 0
        return float(cost.verify_seconds(1, 1)[0])

    assert learned(64) < 0.002 < learned(0)
