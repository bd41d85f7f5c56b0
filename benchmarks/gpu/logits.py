"""Does a GPU give the logits of the CPU, up to what rounding to bfloat16 moves? Teacher-forced, every position.

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/logits.py --out $OUT/logits.json [--models tiny] [--orders 5]

The reference is float32 on the CPU, of the same weights. Beside it stand, each with the clear positions (top two more
than 1.0 apart) whose argmax is another one and the median of the differences:

gpu bfloat16        the product as it is                        gpu float32   every kernel that computes in float32
gpu float8          with float8_products                        cpu bfloat16  the reference provider's own bfloat16
cpu same points     the reference with the GPU's rounding points (rounding.py), in several orders of the sums
cpu float8          the reference's own bfloat16 with coded weights

These models are discontinuous: a code of a cache, an expert or a selected entry changes at a hair's breadth. So one
bfloat16 run is no oracle of another. What must hold: in float32 no clear argmax is lost; in bfloat16 none but such that
a CPU run with the same points loses, too, and the median is not above the largest of these runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.rounding import POINTS, rounding_table
from benchmarks.gpu.subjects import Agreement, Subject, lost_positions, subjects
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.registry import KernelChoice, build_kernels, choose_provider

_BFLOAT16, _FLOAT32 = torch.bfloat16, torch.float32


def on_accelerator(
    subject: Subject, choice: KernelChoice, dtype: torch.dtype, *, coded: bool = False
) -> tuple[Tensor, list[str]]:
    """Logits, and the operations that came from the reference."""
    kernels, sources = build_kernels(choice, subject.config, dtype)
    form = "plain" if choice.provider is None else choice.provider.cache_form
    logits = subject.logits(subject.params(dtype, choice.device, coded=coded), kernels, form)
    return logits, [source.op for source in sources if source.provider == "reference"]


def compare(subject: Subject, choice: KernelChoice, orders: int) -> tuple[dict[str, Any], bool]:
    """The report of one model, and whether what must hold does."""
    exact = subject.params(_FLOAT32)
    reference = subject.logits(exact, REFERENCE)
    report: dict[str, Any] = {}

    def note(name: str, logits: Tensor) -> Agreement:
        found = Agreement.of(reference, logits)
        report[name] = asdict(found)
        print(subject.name, name, json.dumps(report[name]), flush=True)
        return found

    bfloat16, from_reference = on_accelerator(subject, choice, _BFLOAT16)
    gpu = note("gpu bfloat16", bfloat16)
    in_float32, float32_from_reference = on_accelerator(subject, choice, _FLOAT32)
    single = note("gpu float32", in_float32)
    note("gpu float8", on_accelerator(subject, choice, _BFLOAT16, coded=True)[0])
    note("cpu float8", subject.logits(subject.params(_BFLOAT16, coded=True), REFERENCE))
    note("cpu bfloat16", subject.logits(subject.params(_BFLOAT16), REFERENCE))
    medians: list[float] = []
    lost_by_some = torch.zeros(len(reference), dtype=torch.bool)
    for order in range(orders):
        run = subject.logits(exact, rounding_table(exact, POINTS, order))
        medians.append(note(f"cpu same points, order {order}", run).median)
        lost_by_some |= lost_positions(reference, run)
    alone = int((lost_positions(reference, bfloat16) & ~lost_by_some).sum())
    report["clear argmaxes lost by the GPU alone"] = alone
    report["from the reference"] = {"bfloat16": from_reference, "float32": float32_from_reference}
    return report, not single.other_argmax and not alone and gpu.median <= max(medians)


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
    for subject in subjects(tuple(filter(None, arguments.models.split(",")))):
        report["logits"][subject.name], holds = compare(subject, choice, arguments.orders)
        good &= holds
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
