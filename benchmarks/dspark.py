"""What does drafting bring at each load, and does the schedule ever cost? Tokens/s by batch, ways in turns.

    .venv/bin/python benchmarks/dspark.py --output benchmarks/results/dspark.json
    .venv/bin/python benchmarks/dspark.py --text chat --batch 1 --seconds 60 --temperature 0

    none        no drafts        fixed 3, fixed 5        every draft is verified        scheduled        the budget

A longer table is made in several calls: results of the same text, batch and temperature in the file of `--output` are
replaced, the others stay.

The bundled model on prompts of `texts.py`. Every way has two engines of its own, made in opposite orders, so that what
comes of the order cancels. In a round each way answers the same prompts once, in turn, on the engines of one order; all
ways give the same tokens.

Equal steps of one engine take 10 to 30 ms on a machine that others use, and single rounds scatter by a tenth, so there
are many: `scheduled_over` are medians, over all rounds of both orders, of the ratio of an other way's seconds to those
of scheduled; `error` is the standard error of such a median, from the rounds' median deviation. The clock runs from the
first request to the last text. The least of the medians is the ratio to the best other way. Accepted and verified are
drafts a request and step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from measuring import turns, write_results
from texts import KINDS, prompt

from deepinfer_core import LLM, SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "none": {"num_drafts": 0},
    "fixed 3": {"num_drafts": 3, "draft_schedule": "fixed"},
    "fixed 5": {"num_drafts": 5, "draft_schedule": "fixed"},
    "scheduled": {"num_drafts": 5, "draft_schedule": "scheduled"},
}
MAX_REQUESTS = 64
SETTLING_STEPS = 200  # before anything is measured: guard and cost model know this load, as they would in a server
FEWEST_ROUNDS = 3


class Engine:
    """An engine and its `rounds`: tokens, and wall seconds."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.rounds: list[tuple[int, float]] = []

    def answer(self, text: str, batch: int, output_tokens: int, temperature: float, number: int) -> None:
        """One turn: `batch` requests at a time. Prose goes on until the length is reached; stories and chats end where
        the model ends them.
        """
        prompts = [prompt(text, 997 * number + i) for i in range(batch)]
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=output_tokens, ignore_eos=text == "prose")
            for i in range(batch)
        ]
        start_s = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False, parse_special=True)
        seconds = time.perf_counter() - start_s
        self.rounds.append((sum(len(output.outputs[0].token_ids) for output in outputs), seconds))

    def settle(self, text: str, batch: int, output_tokens: int, temperature: float) -> float:
        """Answer until SETTLING_STEPS are done; seconds of a round."""
        self.rounds = []
        end = self.counts()["steps"] + SETTLING_STEPS
        while self.counts()["steps"] < end:
            self.answer(text, batch, output_tokens, temperature, -1 - len(self.rounds))
        seconds = self.seconds()
        self.rounds = []
        return math.fsum(seconds) / len(seconds)

    def counts(self) -> dict[str, int]:
        """So far."""
        found = self._llm.statistics()
        return {
            name: cast("int", found[name]) for name in ("steps", "output_tokens", "verified_drafts", "accepted_drafts")
        }

    @property
    def policy(self) -> object:
        """What the guard has chosen last."""
        return self._llm.statistics()["draft_policy"]

    def seconds(self) -> list[float]:
        """Of each round."""
        return [seconds for _, seconds in self.rounds]


def ratio(orders: list[dict[str, Engine]], name: str) -> dict[str, Any]:
    """Scheduled over way `name`: the same tokens in both, so a ratio of seconds."""
    by_order = [
        [a / b for a, b in zip(engines[name].seconds(), engines["scheduled"].seconds(), strict=True)]
        for engines in orders
    ]
    rounds = [found for order in by_order for found in order]
    median = statistics.median(rounds)
    spread = 1.4826 * statistics.median(abs(found - median) for found in rounds)  # as of a normal distribution
    totals = [[math.fsum(engines[way].seconds()) for engines in orders] for way in (name, "scheduled")]
    return {
        "median": median,
        "error": 1.2533 * spread / math.sqrt(len(rounds)),
        "by_order": [statistics.median(order) for order in by_order],
        "all_seconds": math.fsum(totals[0]) / math.fsum(totals[1]),
        "least": min(rounds),
        "largest": max(rounds),
    }


def tokens_per_s(engines: list[Engine]) -> float:
    """Of the median round of each engine: what disturbs a round is not the engine."""
    return statistics.geometric_mean(statistics.median(t / s for t, s in engine.rounds) for engine in engines)


def measure(
    orders: list[dict[str, Engine]], text: str, batch: int, output_tokens: int, temperature: float, seconds: float
) -> dict[str, Any]:
    """One batch size: rates of all ways, and the ratios, from rounds of about `seconds` with each order."""
    before: dict[str, list[dict[str, int]]] = {name: [] for name in WAYS}
    for engines in orders:
        round_s = sum(engine.settle(text, batch, output_tokens, temperature) for engine in engines.values())
        for name in WAYS:
            before[name].append(engines[name].counts())
        turns(
            {
                name: lambda n, engine=engine: engine.answer(text, batch, output_tokens, temperature, n)
                for name, engine in engines.items()
            },
            max(FEWEST_ROUNDS, round(seconds / round_s)),
        )
    ways: dict[str, Any] = {}
    for name in WAYS:
        after = [engines[name].counts() for engines in orders]
        steps, tokens, verified, accepted = (
            sum(new[count] - old[count] for new, old in zip(after, before[name], strict=True)) for count in after[0]
        )
        draws = tokens - accepted  # each request draws one token of its own a step
        ways[name] = {
            "tokens_per_s": tokens_per_s([engines[name] for engines in orders]),
            "accepted_a_step": accepted / draws,
            "verified_a_step": verified / draws,
            "steps_a_round": steps / sum(len(engines[name].rounds) for engines in orders),
        }
    over = {name: ratio(orders, name) for name in WAYS if name != "scheduled"}
    return {
        "text": text,
        "batch": batch,
        "temperature": temperature,
        "output_tokens": output_tokens,
        "rounds": [len(engines["scheduled"].rounds) for engines in orders],
        "ways": ways,
        "scheduled_over": over,
        "scheduled_over_best": min(found["median"] for found in over.values()),
        "policy": [engines["scheduled"].policy for engines in orders],
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
    parser.add_argument("--seconds", type=float, default=60.0, help="of each row and order of making the engines (60)")
    args = parser.parse_args()
    if not all(1 <= batch <= MAX_REQUESTS for batch in args.batch):
        parser.error(f"--batch goes from 1 to {MAX_REQUESTS}")
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        common: dict[str, Any] = {"quiet": True, "max_num_seqs": MAX_REQUESTS, "max_num_batched_tokens": 1024}
        orders = [
            {name: Engine(stack.enter_context(LLM("tiny", **common, **WAYS[name]))) for name in order}
            for order in (list(WAYS), list(WAYS)[::-1])
        ]
        for text in args.text:
            for temperature in args.temperature:
                for batch in args.batch:
                    found = measure(orders, text, batch, args.output_tokens, temperature, args.seconds)
                    over = {
                        name: f"{of['median']:.3f} ± {of['error']:.3f}" for name, of in found["scheduled_over"].items()
                    }
                    print(
                        text,
                        batch,
                        temperature,
                        f"{found['scheduled_over_best']:.3f}",
                        over,
                        found["policy"],
                        flush=True,
                    )
                    results.append(found)
    write_results(args.output, {"results": kept_results(args.output, results) + results})


if __name__ == "__main__":
    main()
