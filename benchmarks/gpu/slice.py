"""Where does a step of one rank of 64 spend its time? And a prefill as one rank of 8?

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/slice.py --out $OUT/slice.json [--only decode,profile,prefill]

The figures of `deepinfer bench --slice` (communication left out, random weights), and by the profiler the time of every
kernel of one step: sums by name over two replays. Kernels of two branches run at once, so the sum may exceed the step.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.ops import ceilings
from deepinfer_core.cli.bench_slice import decode_results, prefill_results
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.kernels.contract import Kernels, TakesPacked
from deepinfer_core.kernels.reference.packed import Packing
from deepinfer_core.kernels.registry import build_kernels, choose_provider
from deepinfer_core.model.params import Arrange
from deepinfer_core.runtime.rank_slice import RankSlice, SliceSize, release_config
from deepinfer_core.runtime.weight_form import PACKINGS

KINDS = {"greedy": SamplingParams(temperature=0), "temperature 1": SamplingParams(temperature=1.0)}
CONTEXT, DRAFTS, ACCEPTANCE = 131_072, 3, 0.75


@dataclass(frozen=True)
class Held:
    """How weights are held."""

    float8: bool
    packed: Packing
    arrange: Arrange | None


def breakdown(label: str, step: Callable[[], Any], steps: int = 2) -> dict[str, Any]:
    """Microseconds a step of every kernel, largest first."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        wall_us = (time.perf_counter() - start) * 1e6 / steps
    kernels = {
        event.key[:120]: (event.self_device_time_total / steps, event.count / steps)
        for event in recorded.key_averages()
        if event.self_device_time_total > 0
    }
    rows = sorted(kernels.items(), key=lambda item: -item[1][0])
    busy_us = sum(us for _, (us, _) in rows)
    for name, (us, count) in rows[:45]:
        print(f"{us:10.0f} us {count:7.1f} x  {name}", flush=True)
    print(f"{label}: wall {wall_us:.0f} us a step, device busy {busy_us:.0f} us", flush=True)
    return {"wall_us": wall_us, "busy_us": busy_us, "kernels": {name: list(value) for name, value in rows[:80]}}


def decode_parts(
    kernels: Kernels,
    report: dict[str, Any],
    wanted: set[str],
    requests: list[int],
    held: Held,
) -> None:
    """Everything on one model with room for the largest number of requests."""
    rows = max(requests) * (1 + DRAFTS)
    size = SliceSize(64, max(requests), CONTEXT, DRAFTS, rows, float8_products=held.float8, packed=held.packed)
    start = time.perf_counter()
    part = RankSlice(release_config(), size, kernels, "cuda", torch.bfloat16, held.arrange)
    torch.cuda.synchronize()
    report["build_s"] = time.perf_counter() - start
    print(f"built in {report['build_s']:.1f} s", flush=True)
    for name, params in KINDS.items():
        if "decode" in wanted:
            report[f"decode, {name}"] = decode_results(part, requests, params, ACCEPTANCE, 20)
            print(json.dumps(report[f"decode, {name}"], indent=1), flush=True)
        if "profile" in wanted:
            for count in (requests[0], requests[-1]):
                plan = part.decode_plan(count, params, first=False)
                label = f"{count} requests, {name}"
                report[f"profile, {label}"] = breakdown(label, partial(part.runner.run, plan))
    part.close()


def prefill_parts(kernels: Kernels, report: dict[str, Any], held: Held) -> None:
    """One rank of 8: 48 experts a layer. In bfloat16 six sets of weights serve all layers, since 43 would not fit."""
    sets = None if held.float8 or held.packed != "none" else 6
    size = SliceSize(8, 1, 65_536, DRAFTS, 8192, sets, held.float8, held.packed)
    part = RankSlice(release_config(), size, kernels, "cuda", torch.bfloat16, held.arrange)
    report["prefill, ep=8"] = prefill_results(part, [4096, 65_536])
    print(json.dumps(report["prefill, ep=8"]), flush=True)
    label = "prefill of 4,096 tokens"
    report[f"profile, {label}"] = breakdown(label, partial(part.prefill, 4096, 140), steps=1)
    part.close()


def main() -> int:
    """Run what is asked for; a part that fails leaves its traceback in the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default="decode,profile,prefill", help="parts, separated by commas")
    parser.add_argument("--requests", default="256,64,8", help="numbers of requests, the largest first")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--float8", action="store_true", help="with the engine's float8_products")
    forms.add_argument("--weight-form", choices=tuple(PACKINGS), default="bfloat16", help="as the engine's setting")
    arguments = parser.parse_args()
    wanted = set(arguments.only.split(","))
    requests = [int(number) for number in arguments.requests.split(",")]
    choice = choose_provider("nvidia")
    kernels, _ = build_kernels(choice, release_config(), torch.bfloat16)
    arrange = choice.provider.arranged if isinstance(choice.provider, TakesPacked) else None
    held = Held(arguments.float8, PACKINGS[arguments.weight_form], arrange)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "communication": "left out", "float8_products": arguments.float8, "ceilings": ceilings(),
        "weight_form": arguments.weight_form,
    }  # fmt: skip
    failed = 0
    parts: list[Callable[[], None]] = []
    if wanted & {"decode", "profile"}:
        parts.append(lambda: decode_parts(kernels, report, wanted, requests, held))
    if "prefill" in wanted:
        parts.append(lambda: prefill_parts(kernels, report, held))
    for run in parts:
        try:
            run()
        except Exception:
            traceback.print_exc()
            report.setdefault("errors", []).append(traceback.format_exc())
            failed = 1
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        gc.collect()
        torch.cuda.empty_cache()
    return failed


if __name__ == "__main__":
    sys.exit(main())
