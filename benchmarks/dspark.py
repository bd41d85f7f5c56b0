"""What does drafting bring at each load, and does the schedule ever cost? Tokens/s by batch, ways in turns.

    .venv/bin/python benchmarks/dspark.py --output benchmarks/results/dspark.json
    .venv/bin/python benchmarks/dspark.py --batch 1 --rounds 3 --temperature 0

    none        no drafts        fixed 3, fixed 5        every draft is verified        scheduled        the budget

The bundled model, everybody's answer of the same length. Every way has an engine of its own; each round runs all of
them in turn. `scheduled_over_best` is the ratio to the best of the other three within a round, `over_none` to none:
medians over rounds. Rates are medians, too; accepted and verified are drafts a request and step.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from measuring import OPENINGS, median_ratio, seconds_of, turns, write_results

from deepinfer_core import LLM, SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "none": {"num_drafts": 0},
    "fixed 3": {"num_drafts": 3, "draft_schedule": "fixed"},
    "fixed 5": {"num_drafts": 5, "draft_schedule": "fixed"},
    "scheduled": {"num_drafts": 5, "draft_schedule": "scheduled"},
}
MAX_REQUESTS = 64


def answer(llm: LLM, batch: int, output_tokens: int, temperature: float, number: int) -> float:
    """Output tokens a second of one round, prefill included: prompts are a few tokens long."""
    prompts = [f"{OPENINGS[(number + i) % len(OPENINGS)]}" for i in range(batch)]
    params = [
        SamplingParams(temperature=temperature, seed=1000 * number + i, max_tokens=output_tokens, ignore_eos=True)
        for i in range(batch)
    ]
    return batch * output_tokens / seconds_of(lambda: llm.generate(prompts, params, use_tqdm=False))


def counts(llm: LLM) -> tuple[int, int, int]:
    """Output tokens, verified and accepted drafts so far."""
    found = llm.statistics()
    return tuple(cast("int", found[name]) for name in ("output_tokens", "verified_drafts", "accepted_drafts"))  # type: ignore[return-value] # three of them


def measure(llms: dict[str, LLM], batch: int, output_tokens: int, temperature: float, rounds: int) -> dict[str, Any]:
    """One batch size: rates of all ways, and the ratios within rounds."""
    for llm in llms.values():  # the guard and the cost model settle at this load, as they would in a server
        answer(llm, batch, output_tokens, temperature, 0)
    before = {name: counts(llm) for name, llm in llms.items()}
    rates = turns(
        {name: lambda n, llm=llm: answer(llm, batch, output_tokens, temperature, 1 + n) for name, llm in llms.items()},
        rounds,
    )
    ways: dict[str, Any] = {}
    for name, llm in llms.items():
        tokens, verified, accepted = (a - b for a, b in zip(counts(llm), before[name], strict=True))
        draws = tokens - accepted  # each request draws one token of its own a step
        ways[name] = {
            "tokens_per_s": statistics.median(rates[name]),
            "accepted_a_step": accepted / draws,
            "verified_a_step": verified / draws,
        }
    best = [max(others) for others in zip(*(rates[name] for name in WAYS if name != "scheduled"), strict=True)]
    return {
        "batch": batch,
        "temperature": temperature,
        "ways": ways,
        "scheduled_over_best": median_ratio(rates["scheduled"], best),
        "scheduled_over_better_of_fixed_5_and_none": median_ratio(
            rates["scheduled"], [max(pair) for pair in zip(rates["none"], rates["fixed 5"], strict=True)]
        ),
        "scheduled_over_none": median_ratio(rates["scheduled"], rates["none"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 60])
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if not all(1 <= batch <= MAX_REQUESTS for batch in args.batch):
        parser.error(f"--batch goes from 1 to {MAX_REQUESTS}")
    with ExitStack() as stack:
        common: dict[str, Any] = {"quiet": True, "max_num_seqs": MAX_REQUESTS, "max_num_batched_tokens": 1024}
        llms = {name: stack.enter_context(LLM("tiny", **common, **settings)) for name, settings in WAYS.items()}
        results = [
            measure(llms, batch, args.output_tokens, temperature, args.rounds)
            for temperature in args.temperature
            for batch in args.batch
        ]
    write_results(args.output, {"output_tokens": args.output_tokens, "rounds": args.rounds, "results": results})


if __name__ == "__main__":
    main()
