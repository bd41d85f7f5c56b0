"""`LLM(context_parallel_size=2)`: two processes that share long prompts, experts and Engram answer as one does."""

from __future__ import annotations

from typing import Any

from deepinfer_core import LLM, SamplingParams
from tests.core.harness import FIXTURES

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
    with LLM(str(FIXTURES / "tiny-a"), quiet=True, max_num_seqs=3, max_num_batched_tokens=256, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        found = [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]
        return found, dict(llm.statistics())


def test_two_processes_answer_as_one_does() -> None:
    together, counters = answers(**SIZES)
    alone, _ = answers()
    assert together == alone
    leader, follower = counters["rank_0"], counters["rank_1"]
    rows = [leader["rows_per_layer"][0], follower["rows_per_layer"][0]]
    assert leader["rows"] > follower["rows"] == 0  # one scheduler; the other rank has its plans from it
    assert max(rows) < 0.7 * leader["rows"]  # half of each long prompt, and what both compute
    assert sum(rows) >= leader["rows"]
