"""A request's answer is the same over any number of ranks as in one process alone: tokens, reasons, log-probabilities.

Random traffic with drafts, prefix hits, preemptions, aborts and grammars on thread ranks with real exchanges; the same
through real processes in test_group_processes.py.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from deepinfer_core.outputs import CompletionOutput
from deepinfer_core.requests import AnswerBook
from deepinfer_core.runtime.assembly import AssembledEngine
from deepinfer_core.runtime.front_end import FrontEnd
from deepinfer_core.scheduling.request import StepOutputs
from tests.core.engine.random_traffic import SHARED, random_traffic
from tests.core.engine.traces import STYLES, Job, Oracle, Traffic
from tests.core.harness import FIXTURES
from tests.core.parallel.thread_ranks import ThreadRanks, front_end

MODEL = FIXTURES / "tiny-a"
MAX_MODEL_LEN = 640
COMMON = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 100,
    "num_blocks": 14,
    "num_drafts": 5,
    "draft_schedule": "fixed",
}
# A layer has 8 experts; with extra ones some have two replicas, whose rows are split.
GROUPS: dict[str, dict[str, Any]] = {
    "2 ranks": {"data_parallel_size": 2, "expert_parallel_size": 2, "engram_parallel_size": 2},
    "3 ranks, unequal shares, tables on disk": {
        "data_parallel_size": 3,
        "expert_parallel_size": 3,
        "engram_parallel_size": 3,
        "engram_storage": "disk",
    },
    "4 ranks, replicas, plain loop": {
        "data_parallel_size": 4,
        "expert_parallel_size": 4,
        "num_extra_experts": 3,
        "overlap": False,
    },
    "4 ranks in two sets": {
        "data_parallel_size": 4,
        "expert_parallel_size": 2,
        "engram_parallel_size": 4,
        "num_extra_experts": 1,
    },
    "context and data": {
        "data_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_parallel_size": 4,
        "engram_parallel_size": 2,
    },
    "experts on the move": {
        "data_parallel_size": 2,
        "expert_parallel_size": 2,
        "num_extra_experts": 2,
        "expert_rearrangement_interval": 8,
        "expert_count_window": 6,
    },
    "replicas of all": {"data_parallel_size": 2, "draft_schedule": "scheduled"},
}


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    made = Oracle(MODEL, MAX_MODEL_LEN)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference_oracle() -> Iterator[Oracle]:
    made = Oracle(MODEL, MAX_MODEL_LEN, cpu_kernels="reference")
    yield made
    made.close()


@pytest.fixture(
    scope="module",
    params=[name if name == "2 ranks" else pytest.param(name, marks=pytest.mark.slow) for name in GROUPS],
)
def group(request: pytest.FixtureRequest) -> Iterator[tuple[FrontEnd, ThreadRanks]]:
    with front_end(MODEL, **COMMON | GROUPS[request.param]) as made:
        yield made
        for rank, engine in made[1].engines.items():
            if rank in made[0].scheduler._leaders:
                engine.scheduler.check_idle()
        if request.param == "experts on the move":
            counters: Any = made[0].statistics()
            assert counters["rank_0"]["expert_layers_changed"] >= 1


def play(engine: FrontEnd, oracle: Oracle, traffic: Sequence[Traffic]) -> list[list[CompletionOutput]]:
    """Times are counted in rounds of the front end."""
    book = AnswerBook(engine.scheduler, engine.fingerprint)
    requests = [oracle.prepare(one.job) for one in traffic]
    waiting, now = set(range(len(traffic))), 0
    deadline = time.monotonic() + 180
    while waiting or book.all_numbers():
        assert time.monotonic() < deadline, "the group hangs"
        for i in sorted(waiting):
            if traffic[i].arrives <= now or not book.all_numbers():
                book.submit(requests[i], priority=traffic[i].priority)
                waiting.remove(i)
        for one, request in zip(traffic, requests, strict=True):
            if one.aborted_after is not None and now >= one.arrives + one.aborted_after:
                for number in book.open_numbers(request):
                    engine.scheduler.abort(number)
        book.distribute(engine.loop.step())
        now += 1
    return [request.output.outputs for request in requests]


def check(engine: FrontEnd, oracle: Oracle, traffic: Sequence[Traffic]) -> None:
    """Every answer is the oracle's; of an aborted one its beginning."""
    for one, answers in zip(traffic, play(engine, oracle, traffic), strict=True):
        for got, want in zip(answers, oracle.answers(one.job, "compact"), strict=True):
            assert got.error is None
            if got.finish_reason == "abort":
                assert one.aborted_after is not None
                assert got.token_ids == want.token_ids[: len(got.token_ids)]
            else:
                assert got == want


@settings(
    deadline=None,
    max_examples=2,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(random_traffic(8))
def test_answers_do_not_depend_on_how_many_ranks_share_the_work(
    group: tuple[FrontEnd, ThreadRanks], oracle: Oracle, traffic: list[Traffic]
) -> None:
    check(group[0], oracle, traffic)


@pytest.mark.slow
def test_the_reference_kernels_keep_the_promise_too(reference_oracle: Oracle) -> None:
    with front_end(MODEL, **COMMON | GROUPS["2 ranks"] | {"cpu_kernels": "reference"}) as (engine, _):
        check(engine, reference_oracle, crowd(2, 3))


def crowd(seed: int, count: int) -> list[Traffic]:
    rng = random.Random(seed)
    styles = tuple(STYLES)
    return [
        Traffic(
            Job(rng.randrange(2), rng.choice(SHARED), rng.randrange(1, 40), styles[i % len(styles)], i, 40),
            arrives=4 * i,
            priority=rng.choice([-1, 0, 1]),
        )
        for i in range(count)
    ]


def preempting(engine: AssembledEngine, steps: frozenset[int]) -> None:
    """The least urgent request loses its slot before these steps of a rank."""
    step, count = engine.loop.step, itertools.count()

    def disturbed() -> StepOutputs:
        if next(count) in steps and engine.scheduler.num_running:
            engine.scheduler._life.preempt(engine.scheduler._table.least_urgent())
        return step()

    engine.loop.step = disturbed  # type: ignore[method-assign] # mischief


@pytest.mark.slow
def test_a_crowd_meets_hits_preemptions_and_drafts_on_every_rank(oracle: Oracle) -> None:
    """The same property on traffic that is known to meet everything, so that the random one can't miss it for ever."""
    with front_end(MODEL, **COMMON | GROUPS["2 ranks"]) as (engine, ranks):
        for one in ranks.engines.values():
            preempting(one, frozenset({8, 20, 33}))
        check(engine, oracle, crowd(1, 9))
        stats = [one.scheduler.stats for _, one in sorted(ranks.engines.items())]
    for one in stats:
        assert one.output_tokens > 50
        assert one.preemptions >= 1
        assert 0 < one.accepted_drafts < one.verified_drafts
    assert sum(one.hit_tokens for one in stats) >= 128
    # Whatever each verified and drafted: the same collectives in the same order, and a dummy step where one was idle.
    for meeting in (ranks._control, ranks._groups["expert"][0], ranks._groups["engram"][0]):
        assert meeting.labels[0] == meeting.labels[1]
    assert ranks._control.labels[0].count("notice of a step") > max(one.steps for one in stats)
