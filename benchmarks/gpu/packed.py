"""Are products with packed weights those with decoded ones, bit for bit, and what do they take?

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/packed.py --out $OUT/packed.json

Shapes of one rank of 64. Weights are any codes but NaN, as a checkpoint stores them; `ragged` rows are compared only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.timing import graph_time, write_report
from deepinfer_core.kernels.reference.packed import FP4_ROWS, FP8_ROWS, PackedWeight
from deepinfer_core.kernels.reference.records import RecordFormat
from deepinfer_kernels_nvidia.ops import TABLE
from deepinfer_kernels_nvidia.ops.packed_tiles import arranged

EXPERTS, HIDDEN, WIDTH = 6, 5120, 2304
TIMED, RAGGED = (8, 32, 64, 128, 256, 1024), (1, 3, 17, 33, 65, 100, 700, 1000)
DENSE = {"linear wq_b": (1280, 32768), "linear wo_b": (8192, HIDDEN)}

type Call = Callable[[], Tensor]


def stored(form: RecordFormat, *shape: int) -> PackedWeight:
    """[.., K, N] of random bytes; scales of 2^-15 .. 2^-4."""
    *outer, k, n = shape
    codes = torch.randint(0, 256, (*outer, n, k * form.value_bits // 8), device="cuda", dtype=torch.uint8)
    if form is FP8_ROWS:
        codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)
    scales = torch.randint(112, 124, (*outer, n, k // 32), device="cuda", dtype=torch.uint8)
    return PackedWeight(torch.cat([codes, scales], -1), form, torch.bfloat16)


def both_forms(form: RecordFormat, *shape: int, halves: bool = False) -> tuple[Any, Any]:
    """One weight, packed and decoded."""
    weight = stored(form, *shape)
    return arranged(weight, halves), weight.decoded(torch.bfloat16)


def subjects() -> Iterator[tuple[str, Callable[[int], tuple[Call, Call]]]]:
    """Name; number of rows -> the call with packed weights and the one with decoded ones."""
    for name, shape in DENSE.items():
        weights = both_forms(FP8_ROWS, *shape)

        def products(rows: int, weights: tuple[Any, Any] = weights, k: int = shape[0]) -> tuple[Call, Call]:
            x = torch.randn(rows, k, device="cuda").bfloat16() * 0.02
            return lambda: TABLE["linear"](x, weights[0]), lambda: TABLE["linear"](x, weights[1])

        yield name, products
    gate_up = both_forms(FP8_ROWS, HIDDEN, 2 * WIDTH, halves=True)
    down = both_forms(FP8_ROWS, WIDTH, HIDDEN)

    def shared(rows: int) -> tuple[Call, Call]:
        x = torch.randn(rows, HIDDEN, device="cuda").bfloat16() * 0.02
        run = TABLE["shared_expert"]
        return lambda: run(x, gate_up[0], down[0], 10.0), lambda: run(x, gate_up[1], down[1], 10.0)

    yield "shared_expert", shared
    w13 = both_forms(FP4_ROWS, EXPERTS, HIDDEN, 2 * WIDTH, halves=True)
    w2 = both_forms(FP4_ROWS, EXPERTS, WIDTH, HIDDEN)

    def routed(rows: int) -> tuple[Call, Call]:
        x, scale = torch.randn(rows, HIDDEN, device="cuda").bfloat16() * 0.05, torch.rand(rows, EXPERTS, device="cuda")
        ids = torch.arange(EXPERTS, device="cuda").expand(rows, -1).contiguous()
        if rows in RAGGED:  # the first expert gets the most
            ids = (torch.rand(rows, EXPERTS, device="cuda") ** 3 * EXPERTS).int().clamp(0, EXPERTS - 1)
        plan, run = TABLE["plan_experts"](ids, EXPERTS), TABLE["run_experts"]
        return lambda: run(x, scale, plan, w13[0], w2[0], 10.0), lambda: run(x, scale, plan, w13[1], w2[1], 10.0)

    yield "run_experts", routed


def main() -> int:
    """Compare and time everything; 1 where a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    out = parser.parse_args().out
    microseconds: dict[str, dict[str, float]] = {}
    different: list[str] = []
    for name, make in subjects():
        for rows in sorted((*TIMED, *RAGGED)):
            packed, decoded = make(rows)
            if not torch.equal(packed(), decoded()):
                different.append(f"{name}, {rows} rows")
            if rows in TIMED:
                times = {"packed": graph_time([packed]) * 1e6, "bfloat16": graph_time([decoded]) * 1e6}
                microseconds[f"{name}, {rows} rows"] = times
                print(name, rows, {form: round(time, 1) for form, time in times.items()}, flush=True)
    write_report(out, different=different, microseconds=microseconds)
    print(f"different: {different or 'none'}")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
