"""What does the engine cost, and what do its caches bring? On the bundled model and a CPU, everything in turns.

    .venv/bin/python benchmarks/engine_cpu.py --output benchmarks/results/engine_cpu.json

    bare        32 requests through LLM.generate / the same step plans on a runner alone: no scheduler, no text, no
                outputs. The share that the engine leaves of the model's speed; step by step, in slices of 8 steps
    overlap     overlapped loop / plain loop, on the model and on a simulated device whose steps take 5 ms
    prefix      time to first token of a prompt with 4,096 cached tokens, cold / hit, with bounded and with exact replay
    queue       1,000 requests of mixed lengths on a small cache: peak use of blocks, preemptions

Ratios are medians over rounds in which the systems take turns; least and largest stand beside them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from measuring import OPENINGS, median_ratio, seconds_of, token_ids, turns, write_results

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.config.scheduler import SchedulerConfig, SpeculationConfig
from deepinfer_core.runtime.assembly import AssembledEngine
from deepinfer_core.runtime.engine_loop import make_loop
from deepinfer_core.runtime.simulated import SimulatedDevice
from deepinfer_core.scheduling.plan import StepPlan
from deepinfer_core.scheduling.replay import ReplayRules
from deepinfer_core.scheduling.request import StepOutputs
from deepinfer_core.scheduling.scheduler import Scheduler

BATCH, OUTPUT_TOKENS = 32, 48
SLICE_STEPS = 8
HIT_TOKENS, TAIL_TOKENS = 4096, 20
SIMULATED_STEP_S = 0.005
# Only what is named below may differ between systems; prefixes would make later rounds cheaper than earlier ones.
COMMON: dict[str, Any] = {"quiet": True, "max_num_seqs": 64, "max_num_batched_tokens": 1024, "draft_schedule": "fixed"}


def answer_all(llm: LLM, number: int) -> None:
    """One round of BATCH requests; all have the same length, so the batch stays full."""
    prompts = [f"{OPENINGS[i % len(OPENINGS)]} {number} {i}" for i in range(BATCH)]
    params = SamplingParams(temperature=0.8, seed=number, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)


class Relay:
    """An engine, and the plans that it makes on another engine's runner alone: some steps here, then the same there.

    Both get their turn within a fraction of a second, so what slows the machine down for a while slows both down.
    """

    def __init__(self, engine: LLM, other: LLM) -> None:
        assembled = cast(AssembledEngine, engine._engine)
        self._llm, self._bare = engine, cast(AssembledEngine, other._engine).runner
        self._step, self._launch = assembled.loop.step, assembled.runner.launch
        assembled.loop.step, assembled.runner.launch = self._timed_step, self._noted_launch
        self._plans: list[StepPlan] = []
        self._engine_s: list[float] = []
        self._bare_s: list[float] = []
        self._since = 0.0

    def round(self) -> tuple[list[float], list[float]]:
        """Seconds of every step of the engine and of the bare runner; the same requests in every round.

        What the engine does before its first step counts as part of that, and what it does at the end as the last's.
        """
        self._engine_s, self._bare_s = [], []
        self._since = time.perf_counter()
        answer_all(self._llm, 0)
        self._hand_over()
        return self._engine_s, self._bare_s

    def _timed_step(self) -> StepOutputs:
        if self._plans:
            if len(self._plans) > SLICE_STEPS:
                self._hand_over()
            else:
                self._engine_has_stepped()
        return self._step()

    def _noted_launch(self, plan: StepPlan) -> Future[Any]:
        self._plans.append(plan)
        return self._launch(plan)

    def _engine_has_stepped(self) -> None:
        now = time.perf_counter()
        self._engine_s.append(now - self._since)
        self._since = now

    def _hand_over(self) -> None:
        """The bare runner takes its turn. A step that is launched already runs in the engine's next one, in `wait`."""
        self._engine_has_stepped()
        self._bare_s += [seconds_of(partial(self._bare.run, plan)) for plan in self._plans]
        self._plans.clear()
        self._since = time.perf_counter()


def bare(rounds: int, num_drafts: int) -> dict[str, Any]:
    """Engine against the same plans on a runner alone.

    Compared are sums over the steps of medians over the rounds: a neighbour that takes a core for a moment hits a step
    of one round. Two engines swap roles, since one runner is faster than another by where its memory happens to lie.
    """
    settings = COMMON | {"prefix_replay": "off", "num_drafts": num_drafts}
    with LLM("tiny", **settings) as one, LLM("tiny", **settings) as other:
        relays = Relay(one, other), Relay(other, one)
        for relay in relays:
            relay.round()  # the first steps allocate
        found = [[seconds for relay in relays for seconds in relay.round()] for _ in range(rounds)]
    # found: by round, and in it [engine, bare] of the first relay, then of the second; each by step
    steps_s = [np.median(np.array(same), axis=0) for same in zip(*found, strict=True)]
    engine_s, bare_s = (float(sum(times.sum() for times in steps_s[role::2])) for role in (0, 1))
    rounds_s = [[sum(sum(times) for times in one_round[role::2]) for one_round in found] for role in (0, 1)]
    return {
        "share": bare_s / engine_s,
        "share_of_whole_rounds": median_ratio(rounds_s[1], rounds_s[0]),
        "tokens_per_s": 2 * BATCH * OUTPUT_TOKENS / engine_s,
        "drafts": num_drafts,
    }


def overlap_on_model(rounds: int) -> dict[str, Any]:
    """Plain seconds over overlapped seconds."""
    settings = COMMON | {"prefix_replay": "off", "num_drafts": 0}  # a step of drafting is longer, and hides more
    with LLM("tiny", **settings, overlap=True) as overlapped, LLM("tiny", **settings, overlap=False) as plain:
        systems = {"overlapped": overlapped, "plain": plain}
        for llm in systems.values():
            answer_all(llm, -1)
        times = turns(
            {name: lambda n, llm=llm: seconds_of(lambda: answer_all(llm, n)) for name, llm in systems.items()},
            rounds,
        )
    return median_ratio(times["plain"], times["overlapped"])


def simulated_seconds(overlap: bool) -> float:
    """64 requests with 100 tokens each on a device that computes without the host's cores."""
    device = SimulatedDevice(
        num_blocks=256, num_slots=64, num_drafts=0, vocab_size=3072, step_seconds=lambda plan: SIMULATED_STEP_S
    )
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=1024),
        num_blocks=256,
        max_model_len=2048,
        eos_token_id=1,
        rules=ReplayRules("compact", "off", 140, 128, 20, 2541),
        speculation=SpeculationConfig(num_drafts=0),
    )
    for i in range(64):
        scheduler.add(token_ids(30, 3072, i), SamplingParams(max_tokens=100, ignore_eos=True), seed=i)
    loop = make_loop(scheduler, device, overlap=overlap)

    def run() -> None:
        while loop.has_work:
            loop.step()

    return seconds_of(run)


def overlap_on_simulated_device(rounds: int) -> dict[str, Any]:
    """The same ratio where host and device really run at the same time."""
    times = turns(
        {"overlapped": lambda _: simulated_seconds(True), "plain": lambda _: simulated_seconds(False)}, rounds
    )
    return median_ratio(times["plain"], times["overlapped"])


def prefix(rounds: int, replay: str) -> dict[str, Any]:
    """Time to first token of one request: a document that is new, then the same with another end."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    settings = COMMON | {"max_num_batched_tokens": 8192, "prefix_replay": replay, "deterministic": replay != "bounded"}
    cold_s: list[float] = []
    hit_s: list[float] = []
    with LLM("tiny", **settings) as llm:
        vocabulary = llm.tokenizer.num_tokens

        def first_token_s(document: int, end: int) -> float:
            ids = token_ids(HIT_TOKENS, vocabulary, document) + token_ids(TAIL_TOKENS, vocabulary, end)
            return seconds_of(lambda: llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False))

        first_token_s(rounds, 10_000 + rounds)  # no document of a round: that one would be cached
        for number in range(rounds):
            cold_s.append(first_token_s(number, 10_000 + number))
            before = cast("int", llm.statistics()["hit_tokens"])
            hit_s.append(first_token_s(number, 20_000 + number))
            assert cast("int", llm.statistics()["hit_tokens"]) - before == HIT_TOKENS
    times = {"cold_ms": statistics.median(cold_s) * 1e3, "hit_ms": statistics.median(hit_s) * 1e3}
    return times | {"speedup": median_ratio(cold_s, hit_s)}


def queue(num_requests: int) -> dict[str, Any]:
    """Everything is queued at once; answers end where the scheduler cannot foresee it."""
    rng = random.Random(5)
    num_blocks = 96
    # Random token ids end answers at random points: about one token in sixty stops.
    stops = list(range(300, 350))
    settings = COMMON | {"draft_schedule": "scheduled", "num_blocks": num_blocks, "max_model_len": 2048}
    with LLM("tiny", **settings) as llm:
        prompts = [token_ids(rng.choice([8, 40, 120, 400]), llm.tokenizer.num_tokens, i) for i in range(num_requests)]
        params = [
            SamplingParams(
                temperature=1.0,
                seed=i,
                max_tokens=rng.choice([2, 16, 48, 160]),
                ignore_eos=True,
                stop_token_ids=stops if i % 2 else None,
            )
            for i in range(num_requests)
        ]
        seconds = seconds_of(lambda: llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False))
        found = llm.statistics()
    peak = cast("int", found["peak_used_blocks"])
    return {
        "requests": num_requests,
        "blocks": num_blocks,
        "peak_block_use": peak / num_blocks,
        "preemptions": found["preemptions"],
        "finished": found["finished"],
        "output_tokens_per_s": cast("int", found["output_tokens"]) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1_000, help="of the queue")
    parser.add_argument("--only", choices=["bare", "overlap", "prefix", "queue"], help="one part")
    args = parser.parse_args()
    parts = {
        "bare": lambda: [bare(args.rounds, 0), bare(args.rounds, 5)],
        "overlap": lambda: {
            "model": overlap_on_model(args.rounds),
            "simulated_device": overlap_on_simulated_device(args.rounds),
        },
        "prefix": lambda: {replay: prefix(args.rounds, replay) for replay in ("bounded", "exact")},
        "queue": lambda: queue(args.requests),
    }
    chosen = [args.only] if args.only else list(parts)
    write_results(args.output, {name: parts[name]() for name in chosen})


if __name__ == "__main__":
    main()
