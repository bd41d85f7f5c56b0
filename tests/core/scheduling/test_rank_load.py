"""A request goes to the rank that is least loaded with it, by what would be short first."""

from __future__ import annotations

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
