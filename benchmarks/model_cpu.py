"""How fast is the model on a CPU? Prefill and decode of ours beside transformers' DeepseekV4ForCausalLM, in one run.

    .venv/bin/python benchmarks/model_cpu.py --output benchmarks/results/model_cpu.json
    .venv/bin/python benchmarks/model_cpu.py --systems native,reference --rounds 1          without the peer

Systems: `native` (our C kernels), `reference` (plain torch), `transformers` (5.23.0, in an environment that this script
makes with uv in --peer-env; V4, since it has no V4.1: no Engram, no two-level indexer, no rounded caches).
Models: `random` (hidden 256, 8 layers, 16 experts top-4, float32; the peer has the same sizes) and `tiny` (the
checkpoint in the wheel; no peer).

    prefill   one prompt of 512 or 2,048 tokens in one step, logits of its last row
    decode    1, 8 or 32 requests with 256 tokens each, one token a step, greedy

Each round runs every system once, in turn, each in a process of its own. Within a round a figure is that of the median
step; across rounds the best round counts, and the spread stands beside it. transformers gets the better of one and two
torch threads, found in a round of its own; ours runs on one torch thread, and the native kernels start threads of
their own for large calls.

`tiles`: what row invariance costs. x [R, 256] w [256, N] as one plain product, in the reference's tiles of 8 rows with
w as [K, N] and as [N, K] (transposed view), and in the native product; microseconds, best of many.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEER_PACKAGES = ("torch==2.14.0", "transformers==5.23.0")
PROMPT_TOKENS = 256
CASES = ("prefill 512", "prefill 2048", "decode 1", "decode 8", "decode 32")
SIZES: dict[str, Any] = {
    "vocab_size": 3072,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 4,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 128,
    "sliding_window": 128,
}
OURS: dict[str, Any] = {
    "num_nextn_predict_layers": 0,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "candidate_source_layer_id": 4,
    "engram_layer_ids": [1, 3],
    "engram_num_embeddings": [20000, 20000],
    "dspark_target_layer_ids": [],
}

type Step = Callable[[], None]


# ---- what is timed --------------------------------------------------------------------------------------------------


def tokens_a_second(step: Step, tokens: int, seconds: float) -> float:
    """`tokens` over the median time of a step; steps for about `seconds`, at least two after a warm-up."""
    step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return tokens / statistics.median(times)


def measure(model: Any, seconds: float, cases: list[str]) -> dict[str, float]:
    """Tokens a second of each case, "prefill <tokens>" or "decode <batch>"."""
    found: dict[str, float] = {}
    for case in cases:
        kind, size = case.split()
        step = model.prefill(int(size)) if kind == "prefill" else model.decode(int(size))
        found[case] = tokens_a_second(step, int(size), seconds)
    return found


# ---- ours -----------------------------------------------------------------------------------------------------------


def make_ours(model: str, kernels_name: str) -> Any:
    import numpy as np
    import torch

    import deepinfer_core
    from deepinfer_core.cache import CacheLayout, ModelState
    from deepinfer_core.checkpoint.loader import load_model_weights
    from deepinfer_core.checkpoint.random_weights import random_weights
    from deepinfer_core.config.model import ModelConfig
    from deepinfer_core.kernels.registry import build_kernels, choose_provider
    from deepinfer_core.model import Backbone, build_batch, build_params
    from deepinfer_core.scheduling.plan import RowKind, StepPlan, TokenSource, Writes

    torch.set_num_threads(1)  # as the engine sets it; the native kernels start threads of their own
    folder = Path(deepinfer_core.__file__).parent / "models" / "tiny"
    if model == "tiny":
        config = ModelConfig.from_folder(folder)
        weights = load_model_weights(folder, config, dtype=torch.float32, device="cpu", draft=False, progress=False)
    else:
        root = json.loads((folder / "config.json").read_text())
        root["text_config"] |= SIZES | OURS
        config = ModelConfig.from_dict(root)
        weights = random_weights(config)
    chosen = "native" if kernels_name == "native" else "reference"
    kernels, _ = build_kernels(choose_provider("cpu"), config, torch.float32, cpu_kernels=chosen)
    params = build_params(weights, config)
    backbone = Backbone(config, params, kernels)
    blocks_a_request = config.max_position_embeddings // 128

    def plan_of(slots: int, start: int, tokens: Any) -> StepPlan:
        """`tokens` [slots, n] of requests 0, 1, .. at positions from `start` on; the last row of each is sampled."""
        rows, n = tokens.size, tokens.shape[1]
        last = np.zeros((slots, n), np.bool_)
        last[:, -1] = True
        return StepPlan(
            step=0,
            row_position=np.tile(np.arange(start, start + n, dtype=np.int64), slots),
            row_token=tokens.reshape(-1).astype(np.int64),
            row_source=np.full(rows, TokenSource.GIVEN, np.uint8),
            row_kind=np.full(rows, RowKind.PREFILL if n > 1 else RowKind.DECODE, np.uint8),
            row_content=np.zeros(rows, np.uint8),
            row_writes=np.full(rows, np.uint8(Writes.GLOBAL | Writes.WINDOW)),
            row_sample=last.reshape(-1),
            segment_start=np.arange(0, rows + 1, n, dtype=np.int32),
            segment_slot=np.arange(slots, dtype=np.int32),
            segment_generation=np.zeros(slots, np.int32),
            segment_window_from=np.zeros(slots, np.int64),
            segment_decoder_from=np.zeros(slots, np.int64),
            segment_num_drafts=np.zeros(slots, np.int32),
            block_tables=np.arange(slots * blocks_a_request, dtype=np.int32).reshape(slots, -1),
        )

    def run(state: ModelState, plan: StepPlan) -> Any:
        with torch.inference_mode():
            out = backbone.forward(build_batch(plan, state, params, kernels), state)
        assert out.logits is not None
        return out.logits.argmax(-1).numpy()[:, None]

    class Ours:
        def state(self, slots: int, rows: int) -> ModelState:
            layout = CacheLayout(config, slots, slots * blocks_a_request, rows, backtrack=2)
            return ModelState.allocate(layout, device="cpu", dtype=torch.float32)

        def prompts(self, slots: int, length: int) -> Any:
            return np.random.default_rng(slots).integers(16, config.vocab_size, (slots, length))

        def prefill(self, length: int) -> Step:
            state, plan = self.state(1, length), plan_of(1, 0, self.prompts(1, length))
            return lambda: run(state, plan)

        def decode(self, batch: int) -> Step:
            state = self.state(batch, batch * PROMPT_TOKENS)
            tokens = run(state, plan_of(batch, 0, self.prompts(batch, PROMPT_TOKENS)))
            position = PROMPT_TOKENS

            def step() -> None:
                nonlocal tokens, position
                tokens = run(state, plan_of(batch, position, tokens))
                position += 1

            return step

    return Ours()


def tile_costs() -> list[dict[str, Any]]:
    """Microseconds of one product by each method."""
    import timeit

    import torch

    from deepinfer_core.kernels.native import NativeProvider
    from deepinfer_core.kernels.reference import REFERENCE

    torch.set_num_threads(1)
    native = NativeProvider().load()["linear"]
    found: list[dict[str, Any]] = []
    for width in (256, 1024):
        weight = torch.randn(256, width)
        transposed = weight.t().contiguous().t()  # stored as [N, K]
        for rows in (1, 8, 32, 512):
            x = torch.randn(rows, 256)
            methods: dict[str, Callable[[], Any]] = {
                "plain": lambda x=x, w=weight: x @ w,
                "tiles [K, N]": lambda x=x, w=weight: REFERENCE.linear(x, w),
                "tiles [N, K]": lambda x=x, w=transposed: REFERENCE.linear(x, w),
                "native": lambda x=x, w=weight: native(x, w),
            }
            times = {
                name: round(min(timeit.repeat(method, number=5, repeat=100)) / 5 * 1e6, 1)
                for name, method in methods.items()
            }
            found.append({"rows": rows, "width": width, **times})
    return found


# ---- the peer -------------------------------------------------------------------------------------------------------


def make_peer(threads: int) -> Any:
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM  # pyright: ignore[reportMissingImports] (its own env)

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = DeepseekV4Config(
        **SIZES,
        partial_rotary_factor=SIZES["qk_rope_head_dim"] / SIZES["head_dim"],
        compress_ratios=[0, 0, 4, 128, 4, 128, 4, 128],
        num_hash_layers=0,
        num_nextn_predict_layers=0,
        max_position_embeddings=8192,
    )
    model = DeepseekV4ForCausalLM(config).float().eval()

    def run(tokens: Any, cache: Any) -> Any:
        with torch.inference_mode():
            return model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)

    class Peer:
        def prompts(self, batch: int, length: int) -> Any:
            return torch.randint(16, SIZES["vocab_size"], (batch, length))

        def prefill(self, length: int) -> Step:
            tokens = self.prompts(1, length)
            return lambda: run(tokens, None)

        def decode(self, batch: int) -> Step:
            out = run(self.prompts(batch, PROMPT_TOKENS), None)

            def step() -> None:
                nonlocal out
                out = run(out.logits[:, -1:].argmax(-1), out.past_key_values)

            return step

    return Peer()


def peer_python(folder: Path) -> Path:
    """The peer's interpreter; its environment is made where it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making the peer's environment in {folder}", file=sys.stderr)
        subprocess.run(["uv", "venv", "-q", "-p", "3.12", str(folder)], check=True)
        subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), *PEER_PACKAGES], check=True)
    return python


# ---- runs -----------------------------------------------------------------------------------------------------------


def worker(system: str, model: str, threads: int, seconds: float, cases: list[str]) -> None:
    """Measure one system on one model, or the tiles; one line of JSON."""
    if system == "tiles":
        result: Any = tile_costs()
    else:
        made = make_peer(threads) if system == "transformers" else make_ours(model, system)
        result = measure(made, seconds, cases)
    print("RESULT " + json.dumps(result))


def call(
    python: Path | str, system: str, model: str, seconds: float, threads: int = 1, cases: str = ",".join(CASES)
) -> Any:
    command = [str(python), __file__, "--worker", system, "--model", model, "--seconds", str(seconds)]
    command += ["--threads", str(threads), "--cases", cases]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{system} on {model} failed:\n{done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


def machine() -> dict[str, Any]:
    """Where the figures were taken, and how busy it was."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Run the rounds, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="native,reference,transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case in each round")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--peer-env", type=Path, default=Path.home() / ".cache" / "deepinfer" / "transformers-5.23.0")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.model, args.threads, args.seconds, args.cases.split(","))
        return
    systems = args.systems.split(",")
    peer = peer_python(args.peer_env) if "transformers" in systems else Path()
    threads = 1
    if "transformers" in systems:
        trials = {n: call(peer, "transformers", "random", 1.0, n, "decode 8")["decode 8"] for n in (1, 2)}
        threads = max(trials, key=lambda n: trials[n])
    cases = [("random", system) for system in systems] + [("tiny", s) for s in systems if s != "transformers"]
    rounds: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    before = machine()
    for _ in range(args.rounds):
        for model, system in cases:
            python = peer if system == "transformers" else sys.executable
            rounds[model, system].append(call(python, system, model, args.seconds, threads, args.cases))
    results = [
        {"model": model, "system": system, "case": case, "tokens_a_second": round(max(values), 1),
         "slowest_round": round(min(values), 1)}
        for (model, system), found in rounds.items()
        for case in found[0]
        for values in [[one[case] for one in found]]
    ]  # fmt: skip
    report = {
        "command": " ".join(["benchmarks/model_cpu.py", *sys.argv[1:]]),
        "machine": before,
        "load_after": round(os.getloadavg()[0], 2),
        "transformers_threads": threads,
        "results": results,
        "tiles_us": call(sys.executable, "tiles", "random", 0.0),
    }
    print_report(report)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def print_report(report: dict[str, Any]) -> None:
    """Tables for people."""
    print(f"{report['machine']}, transformers on {report['transformers_threads']} threads")
    for row in report["results"]:
        print(f"{row['model']:8} {row['system']:13} {row['case']:13} {row['tokens_a_second']:10.1f} tokens/s"
              f"   (slowest round {row['slowest_round']:.1f})")  # fmt: skip
    for row in report["tiles_us"]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
