"""What does drafting bring at each load, and does the schedule ever cost? Tokens/s by batch, ways in turns.

    .venv/bin/python benchmarks/dspark.py --output benchmarks/results/dspark.json
    .venv/bin/python benchmarks/dspark.py --text chat --batch 1 --seconds 60 --temperature 0

    none        no drafts        fixed 3, fixed 5        every draft is verified        scheduled        the budget

A longer table is made in several calls: results of the same text, batch and temperature in the file of `--output` are
replaced, the others stay.

The bundled model on prompts of `texts.py`. Every way has two engines of its own, made in opposite orders, so that what
comes of the order cancels. In a round each way answers the same prompts once, in turn, on the engines of one order; all
ways give the same tokens.

    tokens/s = tokens / sum over all steps of the lower quartile of the seconds of steps of that shape, on that engine

On a machine that others use a step takes 10 ms, the next one 20, some seconds are slow as a whole, and single rounds
scatter by a quarter. So every step counts, whatever it was for, but with what such a step takes undisturbed. Wall
seconds run from one step's end to the next one's: planning, text and outputs are in them. `scheduled_over` are ratios
of scheduled to each other way, the geometric mean of both orders (`by_order`); beside it stands what the clock showed:
the ratio of all seconds (`clock`), of the least and of the largest round. The least of the means is the ratio to the
best other way. Accepted and verified are drafts a request and step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
from measuring import turns, write_results
from texts import KINDS, prompt

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.runtime.assembly import AssembledEngine
from deepinfer_core.runtime.forward import bucket
from deepinfer_core.scheduling.plan import RowKind, StepPlan

WAYS: dict[str, dict[str, Any]] = {
    "none": {"num_drafts": 0},
    "fixed 3": {"num_drafts": 3, "draft_schedule": "fixed"},
    "fixed 5": {"num_drafts": 5, "draft_schedule": "fixed"},
    "scheduled": {"num_drafts": 5, "draft_schedule": "scheduled"},
}
MAX_REQUESTS = 64
SETTLING_STEPS = 100  # before anything is measured: guard and cost model know this load, as they would in a server
FEWEST_ROUNDS = 3
UNDISTURBED = 0.25  # this quantile of a shape's steps

Shape = tuple[int, int, int, bool]  # buckets of rows, prompt rows and drafting requests; whether context is kept up
Step = tuple[Shape, float]  # and wall seconds


class Engine:
    """An engine that notes its steps. `rounds`: tokens, and the steps that they took."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._scheduler = cast(AssembledEngine, llm._engine).scheduler
        self._observe = self._scheduler.observe_seconds
        self._scheduler.observe_seconds = self._noted  # called once for each step, right after its commit
        self._since_s = 0.0
        self._steps: list[Step] = []
        self.rounds: list[tuple[int, list[Step]]] = []

    def _noted(self, plan: StepPlan, seconds: float) -> None:
        self._observe(plan, seconds)
        shape = (
            bucket(plan.num_rows),
            bucket(int(np.count_nonzero(plan.row_kind <= RowKind.REPLAY))),
            bucket(int(np.count_nonzero(plan.segment_num_drafts))),
            plan.stores_draft_context,
        )
        now_s = time.perf_counter()
        self._steps.append((shape, now_s - self._since_s))
        self._since_s = now_s

    def answer(self, text: str, batch: int, output_tokens: int, temperature: float, number: int) -> None:
        """One turn: `batch` requests at a time. Prose goes on until the length is reached; stories and chats end where
        the model ends them.
        """
        prompts = [prompt(text, 997 * number + i) for i in range(batch)]
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=output_tokens, ignore_eos=text == "prose")
            for i in range(batch)
        ]
        self._steps = []
        self._since_s = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False, parse_special=True)
        shape, seconds = self._steps[-1]
        self._steps[-1] = shape, seconds + time.perf_counter() - self._since_s  # what is left to do after the last step
        self.rounds.append((sum(len(output.outputs[0].token_ids) for output in outputs), self._steps))

    def settle(self, text: str, batch: int, output_tokens: int, temperature: float) -> float:
        """Answer until SETTLING_STEPS are done; seconds of a round."""
        start_s = time.perf_counter()
        self.rounds = []
        while sum(len(steps) for _, steps in self.rounds) < SETTLING_STEPS:
            self.answer(text, batch, output_tokens, temperature, -1 - len(self.rounds))
        seconds = (time.perf_counter() - start_s) / len(self.rounds)
        self.rounds = []
        return seconds

    def counts(self) -> list[int]:
        """Output tokens, verified and accepted drafts so far."""
        found = self._llm.statistics()
        return [cast("int", found[name]) for name in ("output_tokens", "verified_drafts", "accepted_drafts")]

    @property
    def policy(self) -> object:
        """What the guard has chosen last."""
        return self._llm.statistics()["draft_policy"]

    def tokens_per_s(self) -> float:
        """Of all rounds, as above."""
        by_shape: defaultdict[Shape, list[float]] = defaultdict(list)
        for _, steps in self.rounds:
            for shape, seconds in steps:
                by_shape[shape].append(seconds)
        total_s = sum(len(same) * float(np.quantile(same, UNDISTURBED)) for same in by_shape.values())
        return sum(tokens for tokens, _ in self.rounds) / total_s

    def seconds(self) -> list[float]:
        """By the clock, of each round."""
        return [math.fsum(seconds for _, seconds in steps) for _, steps in self.rounds]


def ratio(orders: list[dict[str, Engine]], name: str) -> dict[str, Any]:
    """Scheduled over way `name`: the same tokens in both, so a ratio of seconds."""
    by_order = [engines["scheduled"].tokens_per_s() / engines[name].tokens_per_s() for engines in orders]
    clock = [(engines[name].seconds(), engines["scheduled"].seconds()) for engines in orders]
    rounds = [a / b for other, scheduled in clock for a, b in zip(other, scheduled, strict=True)]
    return {
        "mean": statistics.geometric_mean(by_order),
        "by_order": by_order,
        "clock": sum(sum(other) for other, _ in clock) / sum(sum(scheduled) for _, scheduled in clock),
        "least": min(rounds),
        "largest": max(rounds),
    }


def measure(
    orders: list[dict[str, Engine]], text: str, batch: int, output_tokens: int, temperature: float, seconds: float
) -> dict[str, Any]:
    """One batch size: rates of all ways, and the ratios, from rounds of about `seconds` with each order."""
    before: dict[str, list[list[int]]] = {name: [] for name in WAYS}
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
        tokens, verified, accepted = (
            sum(new[i] - old[i] for new, old in zip(after, before[name], strict=True)) for i in range(3)
        )
        draws = tokens - accepted  # each request draws one token of its own a step
        ways[name] = {
            "tokens_per_s": statistics.geometric_mean(engines[name].tokens_per_s() for engines in orders),
            "accepted_a_step": accepted / draws,
            "verified_a_step": verified / draws,
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
        "scheduled_over_best": min(found["mean"] for found in over.values()),
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
                    print(text, batch, temperature, found["scheduled_over_best"], found["policy"], flush=True)
                    results.append(found)
    write_results(args.output, {"results": kept_results(args.output, results) + results})


if __name__ == "__main__":
    main()
