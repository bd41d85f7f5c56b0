"""What does drafting bring at each load, and does the schedule ever cost? Tokens/s by batch, ways in turns.

    .venv/bin/python benchmarks/dspark.py --output benchmarks/results/dspark.json
    .venv/bin/python benchmarks/dspark.py --text chat --batch 1 --rounds 5 --temperature 0

    none        no drafts        fixed 3, fixed 5        every draft is verified        scheduled        the budget

A longer table is made in several calls: results of the same text, batch and temperature in the file of `--output` are
replaced, the others stay.

The bundled model on prompts of `texts.py`. Every way has two engines of its own, made in opposite orders, so that what
comes of the order cancels; each round runs all ways in turn on the engines of one order, and all give the same tokens.
`scheduled_over` are ratios of scheduled to each other way: the geometric mean of the two orders' medians over their
rounds (`by_order`), least and largest round. The least of the means is the ratio to the best other way. Rates are
medians; accepted and verified are drafts a request and step.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from measuring import median_ratio, seconds_of, turns, write_results
from texts import KINDS, prompt

from deepinfer_core import LLM, RequestOutput, SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "none": {"num_drafts": 0},
    "fixed 3": {"num_drafts": 3, "draft_schedule": "fixed"},
    "fixed 5": {"num_drafts": 5, "draft_schedule": "fixed"},
    "scheduled": {"num_drafts": 5, "draft_schedule": "scheduled"},
}
MAX_REQUESTS = 64
SHORTEST_TURN_TOKENS = 384  # a turn of fewer tokens would mostly measure its beginning and end


def answer(llm: LLM, text: str, batch: int, output_tokens: int, temperature: float, number: int) -> float:
    """Output tokens a second of one turn, prefill included; `batch` requests at a time, several times if they are few.

    Prose goes on until the length is reached; stories and chats end where the model ends them.
    """
    tokens, seconds = 0, 0.0
    for part in range(-(-SHORTEST_TURN_TOKENS // (batch * output_tokens))):
        first = 997 * number + 101 * part
        prompts = [prompt(text, first + i) for i in range(batch)]
        params = [
            SamplingParams(
                temperature=temperature, seed=first + i, max_tokens=output_tokens, ignore_eos=text == "prose"
            )
            for i in range(batch)
        ]
        outputs: list[RequestOutput] = []
        seconds += seconds_of(
            lambda: outputs.extend(llm.generate(prompts, params, use_tqdm=False, parse_special=True))  # noqa: B023 -- called at once
        )
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    return tokens / seconds


def counts(llm: LLM) -> list[int]:
    """Output tokens, verified and accepted drafts so far."""
    found = llm.statistics()
    return [cast("int", found[name]) for name in ("output_tokens", "verified_drafts", "accepted_drafts")]


def both(name: str, rates: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Scheduled over way `name` on the engines of both orders."""
    found = [median_ratio(order["scheduled"], order[name]) for order in rates]
    by_order = [ratio["median"] for ratio in found]
    return {
        "median": statistics.geometric_mean(by_order),
        "by_order": by_order,
        "least": min(ratio["least"] for ratio in found),
        "largest": max(ratio["largest"] for ratio in found),
    }


def measure(
    orders: list[dict[str, LLM]], text: str, batch: int, output_tokens: int, temperature: float, rounds: int
) -> dict[str, Any]:
    """One batch size: rates of all ways, and the ratios within `rounds` rounds of each order."""
    for llms in orders:  # the guard and the cost model settle at this load, as they would in a server
        for llm in llms.values():
            answer(llm, text, batch, output_tokens, temperature, 0)
    before = {name: [counts(llms[name]) for llms in orders] for name in WAYS}
    rates = [
        turns(
            {
                name: lambda n, llm=llm: answer(llm, text, batch, output_tokens, temperature, 1 + n)
                for name, llm in llms.items()
            },
            rounds,
        )
        for llms in orders
    ]
    ways: dict[str, Any] = {}
    for name in WAYS:
        after = [counts(llms[name]) for llms in orders]
        tokens, verified, accepted = (
            sum(new[i] - old[i] for new, old in zip(after, before[name], strict=True)) for i in range(3)
        )
        draws = tokens - accepted  # each request draws one token of its own a step
        ways[name] = {
            "tokens_per_s": statistics.median(rate for order in rates for rate in order[name]),
            "accepted_a_step": accepted / draws,
            "verified_a_step": verified / draws,
        }
    over = {name: both(name, rates) for name in WAYS if name != "scheduled"}
    return {
        "text": text,
        "batch": batch,
        "temperature": temperature,
        "output_tokens": output_tokens,
        "rounds": rounds,
        "ways": ways,
        "scheduled_over": over,
        "scheduled_over_best": min(ratio["median"] for ratio in over.values()),
        "policy": [llms["scheduled"].statistics()["draft_policy"] for llms in orders],
    }


def kept_results(output: Path | None, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the file of an earlier call holds beside `new`."""
    if output is None or not output.exists():
        return []
    replaced = [(found["text"], found["batch"], found["temperature"]) for found in new]
    old = json.loads(output.read_text(encoding="utf-8"))["results"]
    return [found for found in old if (found["text"], found["batch"], found["temperature"]) not in replaced]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--text", choices=KINDS, nargs="+", default=["prose", "chat"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 60])
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--rounds", type=int, default=5, help="of each order of making the engines (5)")
    args = parser.parse_args()
    if not all(1 <= batch <= MAX_REQUESTS for batch in args.batch):
        parser.error(f"--batch goes from 1 to {MAX_REQUESTS}")
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        common: dict[str, Any] = {"quiet": True, "max_num_seqs": MAX_REQUESTS, "max_num_batched_tokens": 1024}
        orders = [
            {name: stack.enter_context(LLM("tiny", **common, **WAYS[name])) for name in order}
            for order in (list(WAYS), list(WAYS)[::-1])
        ]
        for text in args.text:
            for temperature in args.temperature:
                for batch in args.batch:
                    found = measure(orders, text, batch, args.output_tokens, temperature, args.rounds)
                    print(text, batch, temperature, found["scheduled_over_best"], found["policy"], flush=True)
                    results.append(found)
    write_results(args.output, {"results": kept_results(args.output, results) + results})


if __name__ == "__main__":
    main()
