"""`LLM(context_parallel_size=2)`: two processes that share long prompts, experts and Engram answer as one does."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.runtime.front_end import FrontEnd
from tests.core.harness import FIXTURES

MODEL = FIXTURES / "tiny-a"
COMMON: dict[str, Any] = {"quiet": True, "max_num_seqs": 3, "max_num_batched_tokens": 256}
SIZES = {"context_parallel_size": 2, "expert_parallel_size": 2, "engram_parallel_size": 2}


def answers(**settings: Any) -> tuple[list[Any], dict[str, Any]]:
    """Tokens and log-probabilities of prompts that share their start, and the engine's counters."""
    shared = [9 + (i * i) % 300 for i in range(420)]
    prompts = [shared[:300] + [40] * 50, shared, shared[:300] + list(range(50, 90)), shared[:11]]
    params = [
        SamplingParams(max_tokens=12, seed=1, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(max_tokens=12, seed=2, ignore_eos=True, frequency_penalty=0.5),
        SamplingParams(max_tokens=12, seed=3, ignore_eos=True),
    ]
    with LLM(MODEL, **COMMON, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        found = [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]
        return found, dict(llm.statistics())


@pytest.mark.slow
def test_two_processes_answer_as_one_does() -> None:
    together, counters = answers(**SIZES)
    alone, _ = answers()
    assert together == alone
    leader, follower = counters["rank_0"], counters["rank_1"]
    rows = [leader["rows_per_layer"][0], follower["rows_per_layer"][0]]
    assert leader["rows"] > follower["rows"] == 0  # one scheduler; the other rank has its plans from it
    assert max(rows) < 0.7 * leader["rows"]  # half of each long prompt, and what both compute
    assert sum(rows) >= leader["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "blow"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_of_the_group_that_is_lost_ends_the_requests_with_its_name(rank: int, blow: int) -> None:
    """In the middle of a long prompt, whose rows only that rank can compute."""
    prompts = [[9 + (i * i + n) % 300 for i in range(600)] for n in range(8)]
    long = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
    llm = LLM(MODEL, **COMMON, **SIZES, collective_deadline_s=3.0)
    try:
        assert isinstance(llm._engine, FrontEnd)
        workers: Any = llm._engine.scheduler._ranks
        hit = threading.Timer(0.5, os.kill, (workers.workers[rank].process.pid, blow))
        hit.start()
        started = time.monotonic()
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=long, use_tqdm=False)
        assert time.monotonic() - started < 30
        for output in outputs:
            assert output.outputs[0].finish_reason == "error"
            assert f"rank {rank}" in (output.outputs[0].error or "")
    finally:
        llm.close()
