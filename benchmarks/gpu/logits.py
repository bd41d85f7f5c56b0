"""Does a GPU give the logits of the CPU, up to what rounding to bfloat16 moves? Teacher-forced, every position.

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/logits.py --out $OUT/logits.json [--models tiny] [--orders 5]

The reference is float32 on the CPU, of the same weights. Beside it stand, each with the clear positions (top two more
than 1.0 apart) whose argmax is another one and the median of the differences:

gpu bfloat16        the product as it is                        gpu float32   every kernel that computes in float32
gpu float8          with float8_products                        cpu bfloat16  the reference provider's own bfloat16
cpu same points     the reference with the GPU's rounding points (rounding.py), in several orders of the sums
cpu float8          the reference's own bfloat16 with coded weights
.. same experts     the router's choices are those of the reference (choices.py); .. same choices: the entries', too

These models are discontinuous: where two experts are nearly tied, a hair's breadth decides and the row goes another
way, on the CPU as on the GPU. So one bfloat16 run is no oracle of another. But with the reference's experts every clear
argmax must be the reference's, and so it must in float32; and the medians in bfloat16 must not be above the largest of
those of the CPU runs with the same rounding points.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.choices import Choices, forcing, recording
from benchmarks.gpu.rounding import POINTS, rounding_table
from benchmarks.gpu.subjects import Agreement, Subject, subjects
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.registry import KernelChoice, build_kernels, choose_provider
from deepinfer_core.runtime.rank_slice import release_config

_BFLOAT16, _FLOAT32 = torch.bfloat16, torch.float32


def on_accelerator(
    subject: Subject,
    choice: KernelChoice,
    dtype: torch.dtype,
    change: Callable[[Kernels], Kernels] = lambda kernels: kernels,
    *,
    coded: bool = False,
) -> Tensor:
    """Logits of the product in `dtype`, its table changed."""
    kernels, _ = build_kernels(choice, subject.config, dtype)
    form = "plain" if choice.provider is None else choice.provider.cache_form
    return subject.logits(subject.params(dtype, choice.device, coded=coded), change(kernels), form)


def from_reference(choice: KernelChoice, dtype: torch.dtype) -> list[str]:
    """The operations that the provider leaves to the reference for the released model."""
    _, sources = build_kernels(choice, release_config(), dtype)
    return [source.op for source in sources if source.provider == "reference"]


def compare(subject: Subject, choice: KernelChoice, orders: int) -> tuple[dict[str, Any], bool]:
    """The report of one model, and whether what must hold does."""
    exact, choices = subject.params(_FLOAT32), Choices()
    reference = subject.logits(exact, recording(REFERENCE, choices))
    report: dict[str, Any] = {}

    def note(name: str, logits: Tensor) -> Agreement:
        found = Agreement.of(reference, logits)
        report[name] = asdict(found)
        print(subject.name, name, json.dumps(report[name]), flush=True)
        return found

    on_gpu = partial(on_accelerator, subject, choice)
    gpu = note("gpu bfloat16", on_gpu(_BFLOAT16))
    single = note("gpu float32", on_gpu(_FLOAT32))
    same_experts = note(
        "gpu bfloat16, same experts", on_gpu(_BFLOAT16, partial(forcing, choices=choices, entries=False))
    )
    note("gpu bfloat16, same choices", on_gpu(_BFLOAT16, partial(forcing, choices=choices, entries=True)))
    note("gpu float8", on_gpu(_BFLOAT16, coded=True))
    note("gpu float8, same experts", on_gpu(_BFLOAT16, partial(forcing, choices=choices, entries=False), coded=True))
    note("cpu float8", subject.logits(subject.params(_BFLOAT16, coded=True), REFERENCE))
    note("cpu bfloat16", subject.logits(subject.params(_BFLOAT16), REFERENCE))
    medians: list[float] = []
    forced_medians: list[float] = []
    for order in range(orders):
        table = rounding_table(POINTS, order)
        medians.append(note(f"cpu same points, order {order}", subject.logits(exact, table)).median)
        forced = subject.logits(exact, forcing(table, choices, entries=False))
        forced_medians.append(note(f"cpu same points, same experts, order {order}", forced).median)
    held = not (single.other_argmax or same_experts.other_argmax)
    return report, held and gpu.median <= max(medians) and same_experts.median <= max(forced_medians)


def main() -> int:
    """Compare what is asked for; the exit status says whether all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--models", default="", help="names of subjects, separated by commas; all when empty")
    parser.add_argument("--orders", type=int, default=5, help="orders of the CPU's sums (5)")
    parser.add_argument("--accelerator", default="nvidia", help="provider (nvidia); cpu runs the script on itself")
    arguments = parser.parse_args()
    choice = choose_provider(arguments.accelerator)
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "logits": {}}
    if torch.cuda.is_available():
        report["device"] = torch.cuda.get_device_name()
    good = True
    for dtype in (_BFLOAT16, _FLOAT32):
        report[f"from the reference in {str(dtype).removeprefix('torch.')}"] = from_reference(choice, dtype)
    for subject in subjects(tuple(filter(None, arguments.models.split(",")))):
        report["logits"][subject.name], holds = compare(subject, choice, arguments.orders)
        good &= holds
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
