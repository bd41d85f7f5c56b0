"""A rank that is slow, stopped, dead or failed ends the step on all others: with its name, in bounded time."""

from __future__ import annotations

import random
import re
import time

import pytest

from tests.core.parallel.rank_processes import RankProcesses

DEADLINE_S = 3.0
SILENT = "rank {rank} on .* has given no sign for .* s: it is stopped, dead or cut off"
ENDS = {
    "kill": SILENT,
    "stop": SILENT,
    "fail": "rank {rank} on .* failed: ValueError: a failure of its own",
    "leave": "rank {rank} on .* has ended",
}


@pytest.mark.slow
@pytest.mark.parametrize("end", list(ENDS))
def test_a_rank_that_meets_its_end_at_a_random_point_is_named_by_all_others(end: str) -> None:
    rng = random.Random(f"{end} at some point")
    num_ranks = 4 if end in {"kill", "stop"} else 2
    doomed = rng.randrange(num_ranks)
    others = [rank for rank in range(num_ranks) if rank != doomed]
    with RankProcesses(num_ranks, DEADLINE_S) as ranks:
        start_s = time.monotonic()
        ranks.ask("steps_until", doomed=doomed, num_collectives=rng.randrange(60), end=end)
        answers = ranks.answers(others)
        assert time.monotonic() - start_s < DEADLINE_S + 6
        for status, kind, text, late in answers:
            assert (status, kind, late) == ("error", "ParallelError", [doomed]), text
            assert re.search(ENDS[end].format(rank=doomed), text), text
            assert re.match(r"step \d+, exchange \(collective \d+ of group (control|expert) 0-\d\) ended after", text)
        if end != "stop":
            assert ranks.deaths == [] or f"rank {doomed} (process" in ranks.deaths[0]


@pytest.mark.slow
def test_a_slow_rank_is_waited_for_until_the_deadline_and_named_after_it() -> None:
    with RankProcesses(2, DEADLINE_S) as ranks:
        ranks.ask("step", step=4, seconds={"1": 1.6})
        assert ranks.answers() == [["ok", 4]] * 2
        ranks.ask("step", step=5, seconds={"1": DEADLINE_S + 1.0})
        first, second = ranks.answers()
        assert first[0] == "error"
        assert first[3] == [1]
        assert re.search(
            r"step 5, dispatch \(collective 2 of group expert 0-1\) ended after 3\.\d s of at most 3 s: rank 1 on .* "
            r"is late: it is busy in step 5, its last collective was notice",
            first[2],
        ), first[2]
        assert "rank 0 on" in second[2]  # it learns that it was given up, and why
        assert "rank 1 on" in second[2]
