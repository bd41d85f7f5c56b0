"""What does the engine cost, and what do its caches bring? On the bundled model and a CPU, everything in turns.

    .venv/bin/python benchmarks/engine_cpu.py --output benchmarks/results/engine_cpu.json

    bare        32 requests through LLM.generate / the same step plans replayed on a second runner: no scheduler, no
                text, no outputs. The share that the engine leaves of the model's speed
    overlap     overlapped loop / plain loop, on the model and on a simulated device whose steps take 5 ms
    prefix      time to first token of a prompt with 4,096 cached tokens, cold / hit, with bounded and with exact replay
    queue       1,000 requests of mixed lengths on a small cache: peak use of blocks, preemptions

Ratios are medians over rounds in which the systems take turns; least and largest stand beside them.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import Any, cast

from measuring import OPENINGS, median_ratio, seconds_of, token_ids, turns, write_results

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.config.engine import resolve_settings
from deepinfer_core.config.scheduler import SchedulerConfig, SpeculationConfig
from deepinfer_core.runtime.assembly import AssembledEngine, assemble_engine
from deepinfer_core.runtime.engine_loop import make_loop
from deepinfer_core.runtime.simulated import SimulatedDevice
from deepinfer_core.scheduling.plan import StepPlan
from deepinfer_core.scheduling.replay import ReplayRules
from deepinfer_core.scheduling.scheduler import Scheduler

BATCH, OUTPUT_TOKENS = 32, 48
HIT_TOKENS, TAIL_TOKENS = 4096, 20
SIMULATED_STEP_S = 0.005
# Only what is named below may differ between systems; prefixes would make later rounds cheaper than earlier ones.
COMMON: dict[str, Any] = {"quiet": True, "max_num_seqs": 64, "max_num_batched_tokens": 1024, "draft_schedule": "fixed"}


def answer_all(llm: LLM, number: int) -> None:
    """One round of BATCH requests; all have the same length, so the batch stays full."""
    prompts = [f"{OPENINGS[i % len(OPENINGS)]} {number} {i}" for i in range(BATCH)]
    params = SamplingParams(temperature=0.8, seed=number, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)


def bare(rounds: int, num_drafts: int) -> dict[str, Any]:
    """Engine against the same plans on a runner alone."""
    settings = COMMON | {"prefix_replay": "off", "num_drafts": num_drafts}
    plans: list[StepPlan] = []
    twin = assemble_engine(resolve_settings({"model": "tiny"} | settings, {}).config).runner
    with LLM("tiny", **settings) as llm:
        runner = cast(AssembledEngine, llm._engine).runner
        launch = runner.launch

        def record(plan: StepPlan) -> Any:
            plans.append(plan)
            return launch(plan)

        runner.launch = record

        def engine(number: int) -> float:
            plans.clear()
            return seconds_of(lambda: answer_all(llm, number))

        def model(number: int) -> float:
            return seconds_of(lambda: [twin.run(plan) for plan in plans])

        engine(-1)  # the first steps allocate
        model(-1)
        times: dict[str, list[float]] = {"engine": [], "bare": []}
        for number in range(rounds):  # the plans of a round must have been made before they can be replayed
            times["engine"].append(engine(number))
            times["bare"].append(model(number))
    twin.close()
    rate = BATCH * OUTPUT_TOKENS / statistics.median(times["engine"])
    return {
        "share": median_ratio(times["bare"], times["engine"]),
        "share_of_fastest": min(times["bare"]) / min(times["engine"]),  # other work on the machine only adds time
        "tokens_per_s": rate,
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

        first_token_s(-1, -2)
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
