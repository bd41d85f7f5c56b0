"""Does the engine give the same tokens in any company, end to end on a GPU?

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/e2e.py --out $OUT/e2e.json [--only bfloat16]

64 requests of the bundled checkpoint, greedy and sampled, answered alone and together, with and without drafts, graphs
and overlap: how many answers differ from those of one batch of 64 with everything on. Once with the default products,
once with float8_products, which gives other tokens and the same promise. tests/kernels/test_promise_on_gpu.py holds
random traffic to it: shared prefixes, grammars, stops, several answers a request, preemption, aborts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu.subjects import TINY
from deepinfer_core import LLM, SamplingParams
from deepinfer_core.runtime.assembly import AssembledEngine

REQUESTS, OUTPUT_TOKENS, ALONE = 64, 48, 12
NUMBERS: Mapping[str, Mapping[str, Any]] = {"bfloat16": {}, "float8_products": {"float8_products": True}}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "together": {},
    "again": {},
    "eager": {"enforce_eager": True},
    "one step after the other": {"overlap": False},
    "without drafts": {"num_drafts": 0},
    "small batches": {"max_num_seqs": 5, "max_num_batched_tokens": 96},
}


def prompts() -> list[list[int]]:
    """Lengths from 3 to 700: within a window, beyond it, with more entries than are selected."""
    random = np.random.default_rng(5)
    return [random.integers(11, 3000, int(length)).tolist() for length in random.integers(3, 700, REQUESTS)]


def params() -> list[SamplingParams]:
    """Greedy, plain sampling and filters in turn."""
    kinds: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9})
    return [
        SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=i, **kinds[i % len(kinds)])
        for i in range(REQUESTS)
    ]


def answers(llm: LLM, ids: list[list[int]], sampling: list[SamplingParams]) -> list[list[int]]:
    """Token ids of each request."""
    outputs = llm.generate(prompt_token_ids=ids, sampling_params=sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def compare(accelerator: str, numbers: Mapping[str, Any], repeats: int) -> tuple[dict[str, Any], bool]:
    """Every way to run the requests against one batch of all of them, which is `repeats` times played again in the same
    engine; the report, and whether all agree.
    """
    ids, sampling = prompts(), params()
    base: dict[str, Any] = {
        "accelerator": accelerator,
        "model": str(TINY),
        "quiet": True,
        "engram_storage": "device",
        **numbers,
    }
    report: dict[str, Any] = {}
    found: dict[str, list[list[int]]] = {}
    for name, settings in WAYS.items():
        start = time.perf_counter()
        with LLM(**base | dict(settings)) as llm:
            found[name] = answers(llm, ids, sampling)
            if name == "together":
                sources = cast(AssembledEngine, llm._engine).op_sources
                report["operations_from_the_reference"] = [s.op for s in sources if s.provider == "reference"]
                found |= {f"repeat {i + 1}": answers(llm, ids, sampling) for i in range(repeats)}
                found["alone"] = [answers(llm, [ids[i]], [sampling[i]])[0] for i in range(ALONE)]
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    wanted = found["together"]
    differing = {name: sum(a != b for a, b in zip(got, wanted, strict=False)) for name, got in found.items()}
    report["differing_answers"] = differing
    report["answers"] = {"requests": REQUESTS, "tokens": OUTPUT_TOKENS, "alone": ALONE}
    print(json.dumps(differing), flush=True)
    return report, not any(differing.values())


def main() -> int:
    """Run what is asked for; the exit status says whether all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default=",".join(NUMBERS), help="kinds of products, separated by commas (all)")
    parser.add_argument("--repeats", type=int, default=0, help="how often the batch is played again (0)")
    parser.add_argument("--accelerator", default="nvidia", help="provider (nvidia); cpu runs the script on itself")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    if torch.cuda.is_available():
        report["device"] = torch.cuda.get_device_name()
    good = True
    for name in arguments.only.split(","):
        report[name], agree = compare(arguments.accelerator, NUMBERS[name], arguments.repeats)
        good &= agree
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
