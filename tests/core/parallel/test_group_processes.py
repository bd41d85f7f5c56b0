"""`LLM` and `Engine` over processes: answers, what a rank reads from disk, and ranks that die or stand still."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
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
MIXED = [
    PARAMS,
    dataclasses.replace(PARAMS, n=3, temperature=0.7),
    dataclasses.replace(PARAMS, prompt_logprobs=2),
    PARAMS,
    dataclasses.replace(PARAMS, temperature=0.0, stop=["e", "th"], logit_bias={70: 3.5}, ignore_eos=False),
]


def ask(llm: LLM) -> list[RequestOutput]:
    return llm.generate(prompt_token_ids=PROMPTS, sampling_params=MIXED, use_tqdm=False)


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM(MODEL, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def group() -> Iterator[LLM]:
    with LLM(MODEL, **SETTINGS, **TWO) as llm:
        yield llm


LAUNCHED = """
from deepinfer_core import LLM, SamplingParams

settings = {settings!r}
with LLM({model!r}, **settings) as llm:
    outputs = llm.generate(prompt_token_ids={prompts!r}, sampling_params=SamplingParams(temperature=0, max_tokens=6))
    print([output.outputs[0].token_ids for output in outputs])
"""


@pytest.mark.slow
def test_under_torchrun_rank_0_answers_and_the_others_serve(alone: LLM, tmp_path: Path) -> None:
    want = alone.generate(prompt_token_ids=PROMPTS[:2], sampling_params=SamplingParams(temperature=0, max_tokens=6))
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED.format(settings=SETTINGS | TWO, model=str(MODEL), prompts=PROMPTS[:2]))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([output.outputs[0].token_ids for output in want])


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
        assert got[2].prompt_logprobs == want[2].prompt_logprobs
    assert got[3].num_cached_tokens >= 128
    counters: Any = group.statistics()
    assert all(counters[f"rank_{rank}"]["output_tokens"] > 0 for rank in range(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"data_parallel_size": 4, "expert_parallel_size": 4, "engram_parallel_size": 4},
        {"data_parallel_size": 2, "context_parallel_size": 2, "expert_parallel_size": 4},
    ],
    ids=["each has requests of its own", "pairs share long prompts"],
)
def test_four_processes_answer_as_one_does(alone: LLM, sizes: dict[str, Any]) -> None:
    want = ask(alone)
    with LLM(MODEL, **SETTINGS, **sizes) as llm:
        for _ in range(2):  # the second time with prefix hits
            assert [output.outputs for output in ask(llm)] == [output.outputs for output in want]


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
            alike = [0, 3]
            tokens = await asyncio.gather(*(read(engine, PROMPTS[i]) for i in alike))
            assert tokens == [want[i].outputs[0].token_ids for i in alike]
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
