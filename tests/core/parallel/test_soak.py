"""2,000 requests over two ranks, some of them aborted, with experts on the move: nothing is lost, nothing leaks."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.requests import AnswerBook, PreparedRequest, RequestFactory
from tests.core.harness import FIXTURES
from tests.core.parallel.thread_ranks import front_end

MODEL = FIXTURES / "tiny-a"
REQUESTS = 2_000
OPEN_AT_ONCE = 40
SETTINGS: dict[str, Any] = {
    "data_parallel_size": 2,
    "expert_parallel_size": 2,
    "engram_parallel_size": 2,
    "num_extra_experts": 2,
    "expert_rearrangement_interval": 50,
    "expert_count_window": 25,
    "max_model_len": 320,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 256,
    "num_blocks": 30,
    "num_drafts": 3,
    "draft_schedule": "fixed",
}
MOST_GROWTH_BYTES = 24 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompt_of(rng: random.Random) -> list[int]:
    shared = [20 + position % 300 for position in range(rng.choice([0, 0, 0, 140, 270]))]
    return shared + [rng.randrange(20, 380) for _ in range(rng.randrange(1, 20))]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_two_thousand_requests_leave_nothing_behind() -> None:
    rng = random.Random(0)
    with front_end(MODEL, **SETTINGS) as (engine, ranks):
        factory, book = RequestFactory(engine, 0), AnswerBook(engine.scheduler, engine.fingerprint)
        ends: dict[str, int] = {}
        started, settled = 0, 0
        running: list[PreparedRequest] = []
        deadline = time.monotonic() + 240
        while started < REQUESTS or running:
            assert time.monotonic() < deadline, "the group hangs, or is far too slow"
            while started < REQUESTS and len(running) < OPEN_AT_ONCE:
                params = SamplingParams(temperature=1.0, seed=started, max_tokens=rng.randrange(1, 9), ignore_eos=True)
                request = factory.prepare(prompt_of(rng), params)
                factory.start(request)
                book.submit(request)
                running.append(request)
                started += 1
            if rng.random() < 0.05:
                for number in book.open_numbers(rng.choice(running)):
                    engine.scheduler.abort(number)
            for request in book.distribute(engine.loop.step()):
                running.remove(request)
                reason = request.output.outputs[0].finish_reason or "none"
                ends[reason] = ends.get(reason, 0) + 1
            if started >= REQUESTS // 2 and not settled:
                settled = resident_bytes()
        grown = resident_bytes() - settled
        counters: Any = engine.statistics()  # by then, every rank has read what it was told
        for one in ranks.engines.values():
            one.scheduler.check_idle()
        factory.close()
    assert sum(ends.values()) == REQUESTS
    assert set(ends) <= {"length", "abort"}
    assert ends["abort"] >= 10
    tokens = [counters[f"rank_{rank}"]["output_tokens"] for rank in range(2)]
    assert min(tokens) > 0.35 * sum(tokens)
    assert counters["rank_0"]["expert_windows"] >= 5
    assert counters["rank_0"]["expert_plans_with_moves"] >= 1
    assert counters["rank_0"]["expert_records_damaged"] == 0
    assert grown < MOST_GROWTH_BYTES
