"""`LLM` and `Engine` over real processes: answers, what each rank reads from disk, and ranks that die or stand still."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer_core import LLM, Chunk, Engine, SamplingParams
from deepinfer_core.errors import EngineError
from deepinfer_core.outputs import RequestOutput
from deepinfer_core.runtime.front_end import FrontEnd
from deepinfer_core.runtime.rank_scheduler import Ranks
from tests.core.harness import FIXTURES

MODEL = FIXTURES / "tiny-a"
SETTINGS: dict[str, Any] = {
    "quiet": True,
    "max_model_len": 400,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "num_blocks": 24,
    "draft_schedule": "fixed",
}
TWO: dict[str, Any] = {"data_parallel_size": 2, "expert_parallel_size": 2, "engram_parallel_size": 2}
PROMPTS = [list(range(20, 20 + length)) for length in (3, 40, 150, 290, 77)]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=14, ignore_eos=True, logprobs=1)


def ask(llm: LLM) -> list[RequestOutput]:
    return llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM(MODEL, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def group() -> Iterator[LLM]:
    with LLM(MODEL, **SETTINGS, **TWO) as llm:
        yield llm


def front_end_of(llm: LLM | Engine) -> FrontEnd:
    assert isinstance(llm._engine, FrontEnd)
    return llm._engine


def process_ids(ranks: Ranks) -> list[int]:
    return [worker.process.pid for worker in ranks.workers]  # type: ignore[attr-defined] # these are Workers


def test_two_processes_answer_as_one_does(alone: LLM, group: LLM) -> None:
    want = ask(alone)
    for _ in range(2):  # the second time with prefix hits
        got = ask(group)
        assert [output.outputs for output in got] == [output.outputs for output in want]
    assert got[3].num_cached_tokens >= 128
    counters: Any = group.statistics()
    assert all(counters[f"rank_{rank}"]["output_tokens"] > 0 for rank in range(2))


def test_a_rank_reads_its_own_experts_and_engram_rows_only(alone: LLM, group: LLM) -> None:
    whole = alone._engine.loaded_bytes  # type: ignore[attr-defined] # an engine in this process
    ready = front_end_of(group).ready
    assert sum(one.loaded_bytes["experts"] for one in ready) == whole["experts"]
    assert sum(one.loaded_bytes["engram_table"] for one in ready) == whole["engram_table"]
    for one in ready:
        assert one.loaded_bytes["experts"] * 2 == whole["experts"]
        assert one.loaded_bytes["attention"] == whole["attention"]
        assert abs(one.loaded_bytes["engram_table"] * 2 - whole["engram_table"]) <= 2 * 66  # two tables, a row each


@pytest.mark.slow
def test_streams_of_an_engine_come_from_the_rank_that_has_them(alone: LLM) -> None:
    want = ask(alone)

    async def read(engine: Engine, prompt: list[int]) -> list[int]:
        chunks: list[Chunk] = [chunk async for chunk in engine.add_request(prompt, PARAMS)]
        return [token for chunk in chunks for token in chunk.token_ids]

    async def main() -> None:
        async with Engine(MODEL, **SETTINGS, data_parallel_size=2, expert_parallel_size=2) as engine:
            tokens = await asyncio.gather(*(read(engine, prompt) for prompt in PROMPTS))
            assert tokens == [output.outputs[0].token_ids for output in want]
            stream = engine.add_request(PROMPTS[1], SamplingParams(max_tokens=300, ignore_eos=True))
            await anext(stream)
            await stream.aclose()
            assert await read(engine, PROMPTS[0]) == want[0].outputs[0].token_ids

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blow", "reason"),
    [(signal.SIGKILL, r"rank 1 .*killed by signal 9"), (signal.SIGSTOP, r"rank 1")],
    ids=["killed", "stopped"],
)
def test_a_rank_that_dies_or_stands_still_ends_the_requests_with_its_name(blow: int, reason: str) -> None:
    long = SamplingParams(temperature=1.0, seed=1, max_tokens=390, ignore_eos=True)
    llm = LLM(MODEL, **SETTINGS, **TWO, collective_deadline_s=3.0)
    ranks = process_ids(front_end_of(llm).scheduler._ranks)
    try:
        hit = threading.Timer(0.5, os.kill, (ranks[1], blow))
        hit.start()
        started = time.monotonic()
        outputs = llm.generate(prompt_token_ids=PROMPTS[:3], sampling_params=long, use_tqdm=False)
        assert time.monotonic() - started < 30
        for output in outputs:
            assert output.outputs[0].finish_reason == "error"
        error = outputs[0].outputs[0].error or ""
        with pytest.raises(EngineError, match=reason):
            llm.generate(prompt_token_ids=PROMPTS[:1], use_tqdm=False)
        assert "rank 1" in error
    finally:
        llm.close()
    for process_id in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
