"""How long does each kernel take at the shapes of one rank of 64 (EP64), against ceilings measured in the same run?

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/ops.py --out $OUT/ops.json [--only attend]

256 requests of 4 rows, context 131,072. A case is captured in a CUDA graph of ten calls over rotating inputs; reported
is the median of 20 replays. Bytes count every input read once and every output written once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tilelang
import torch
from torch import Tensor

from deepinfer_core.kernels.reference.records import COMPRESSED, WINDOW, RecordFormat, pack
from deepinfer_kernels_nvidia.ops import TABLE

ROWS, HIDDEN, HEADS, HEAD_DIM, STREAMS = 1024, 5120, 64, 512, 4
WINDOW_KEYS, SELECTED = 128, 512
CACHE_ROWS = 262_144
CALLS, REPLAYS, INPUT_SETS = 10, 20, 3


@dataclass(frozen=True)
class Case:
    """One timed call: `calls[i % len(calls)]` are the same operation on different inputs."""

    op: str
    shape: str
    calls: list[Callable[[], Any]]
    num_bytes: float
    num_flops: float = 0.0


@dataclass(frozen=True)
class Timing:
    """Result of a case; shares are of the ceilings of this run."""

    op: str
    shape: str
    microseconds: float
    terabytes_per_s: float
    teraflops: float
    share_of_copy: float
    share_of_matmul: float


def graph_time(calls: list[Callable[[], Any]]) -> float:
    """Seconds of one call, median over replays of a graph of CALLS calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            calls[i % len(calls)]()
    samples: list[float] = []
    for _ in range(REPLAYS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e-3 / CALLS)
    return statistics.median(samples[3:])


def ceilings() -> dict[str, float]:
    """Copy bandwidth in TB/s (read + written) and bf16 8192^3 rate in TFLOP/s."""
    source = randn(1 << 30)
    target = torch.empty_like(source)
    copy_s = graph_time([lambda: target.copy_(source)])
    a, b = randn(8192, 8192), randn(8192, 8192)
    return {
        "copy_TB_s": 4 * (1 << 30) / copy_s / 1e12,
        "bf16_TFLOP_s": 2 * 8192**3 / graph_time([lambda: a @ b]) / 1e12,
    }


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def sets(make: Callable[[], Callable[[], Any]]) -> list[Callable[[], Any]]:
    """INPUT_SETS calls, each on inputs of its own."""
    return [make() for _ in range(INPUT_SETS)]


def cache(rows: int, fmt: RecordFormat, dim: int) -> Tensor:
    """Packed records of random values."""
    return pack(randn(4096, dim, dtype=torch.float32), fmt).repeat(rows // 4096, 1)


def cache_writes() -> Iterator[Case]:
    for op, dim, record in (
        ("write_window", HEAD_DIM, 528),
        ("write_entries", HEAD_DIM, 288),
        ("write_index_keys", 128, 68),
    ):
        for rows in (ROWS, 131_072):

            def make(op: str = op, dim: int = dim, record: int = record, rows: int = rows) -> Callable[[], Any]:
                target = torch.zeros(CACHE_ROWS, record, dtype=torch.uint8, device="cuda")
                where, keys = torch.randperm(CACHE_ROWS, device="cuda")[:rows], randn(rows, dim)
                return lambda: TABLE[op](target, where, keys)

            yield Case(op, f"{rows} rows", sets(make), rows * (2 * dim + record + 8))

    def make_copy() -> Callable[[], Any]:
        target, order = cache(CACHE_ROWS, WINDOW, HEAD_DIM), torch.randperm(CACHE_ROWS, device="cuda")
        return lambda: TABLE["copy_rows"](target, order[:ROWS], order[ROWS : 2 * ROWS])

    yield Case("copy_rows", f"{ROWS} window records", sets(make_copy), ROWS * (2 * 528 + 16))

    def make_round() -> Callable[[], Any]:
        queries = randn(ROWS, 32, 128)
        return lambda: TABLE["round_index"](queries)

    yield Case("round_index", f"{ROWS}x32x128", sets(make_round), ROWS * 32 * 128 * 4)


def norms_and_streams() -> Iterator[Case]:
    table = TABLE["rope_table"](torch.arange(ROWS, device="cuda"), torch.rand(32, device="cuda"))

    def simple(op: str, num_bytes: float, make: Callable[[], tuple[Any, ...]], shape: str, **options: Any) -> Case:
        def bind() -> Callable[[], Any]:
            arguments = make()
            return lambda: TABLE[op](*arguments, **options)

        return Case(op, shape, sets(bind), num_bytes)

    row_bytes = ROWS * HIDDEN * 2
    mix = {"iterations": 20, "norm_eps": 1e-20, "eps": 1e-6}
    wide, f32 = STREAMS * HIDDEN, torch.float32
    yield simple("rms_norm", 2 * row_bytes, lambda: (randn(ROWS, HIDDEN), randn(HIDDEN, dtype=f32), 1e-20), "1024x5120")
    rope_bytes = 4 * ROWS * HEADS * HEAD_DIM
    yield simple("apply_rope", rope_bytes, lambda: (randn(ROWS, HEADS, HEAD_DIM), table), "1024x64x512")
    yield simple(
        "mhc_mix",
        4 * row_bytes + 24 * wide * 4,
        lambda: (randn(ROWS, STREAMS, HIDDEN), randn(wide, 24, dtype=f32), randn(24, dtype=f32), randn(24, dtype=f32)),
        "1024x4x5120",
        **mix,
    )
    yield simple(
        "mhc_collapse", 5 * row_bytes, lambda: (randn(ROWS, STREAMS, HIDDEN), randn(ROWS, 4, dtype=f32)), "1024x4x5120"
    )
    yield simple(
        "mhc_expand",
        9 * row_bytes,
        lambda: (randn(ROWS, 4, HIDDEN), randn(ROWS, HIDDEN), randn(ROWS, 4, dtype=f32), randn(ROWS, 4, 4, dtype=f32)),
        "1024x4x5120",
    )
    pair = (ROWS, 2, HEAD_DIM)
    yield simple(
        "pool_pairs", ROWS * HEAD_DIM * 20, lambda: (randn(*pair, dtype=f32), randn(*pair, dtype=f32)), "1024x512"
    )


def attention() -> Iterator[Case]:
    for rows in (8, 256, ROWS, 4096):

        def make(rows: int = rows) -> Callable[[], Any]:
            window, entries = cache(CACHE_ROWS, WINDOW, HEAD_DIM), cache(CACHE_ROWS, COMPRESSED, HEAD_DIM)
            near = torch.randint(0, CACHE_ROWS, (rows, WINDOW_KEYS), device="cuda")
            far = torch.randint(0, CACHE_ROWS, (rows, SELECTED), device="cuda").sort(1).values
            plans = TABLE["plan_keys"](near), TABLE["plan_keys"](far)
            q, sink = randn(rows, HEADS, HEAD_DIM), randn(HEADS, dtype=torch.float32)
            return lambda: TABLE["attend"](q, window, plans[0], entries, plans[1], sink)

        keys = WINDOW_KEYS + SELECTED
        num_bytes = rows * (WINDOW_KEYS * 528 + SELECTED * 288 + 4 * HEADS * HEAD_DIM)
        yield Case(
            "attend", f"{rows} rows, 128 + 512 keys", sets(make), num_bytes, 4.0 * rows * HEADS * keys * HEAD_DIM
        )


def products() -> Iterator[Case]:
    for name, k, n in (
        ("wq_a + wkv", 5120, 1792),
        ("wq_b", 1280, 32_768),
        ("wo_b", 8192, 5120),
        ("index wq_b", 1280, 4096),
        ("head", 5120, 129_280),
    ):
        for rows in (8, ROWS):

            def make(k: int = k, n: int = n, rows: int = rows) -> Callable[[], Any]:
                x, w = randn(rows, k), randn(k, n)
                return lambda: TABLE["linear"](x, w)

            num_bytes = 2 * (rows * k + k * n + rows * n)
            yield Case("linear", f"{name}: {rows}x{k}x{n}", sets(make), num_bytes, 2.0 * rows * k * n)

    def make_groups() -> Callable[[], Any]:
        x, w = randn(ROWS, 8, 4096), randn(8, 4096, 1024)
        return lambda: TABLE["grouped_linear"](x, w)

    flops = 2.0 * ROWS * 8 * 4096 * 1024
    yield Case("grouped_linear", "wo_a: 1024x8x4096x1024", sets(make_groups), 2 * 8 * 4096 * (ROWS + 1024), flops)

    def make_float32() -> Callable[[], Any]:
        x, w = randn(ROWS, 5120, dtype=torch.float32), randn(5120, 1024, dtype=torch.float32)
        return lambda: TABLE["linear"](x, w)

    flops = 2.0 * ROWS * 5120 * 1024
    yield Case("linear", "float32 compressor: 1024x5120x1024", sets(make_float32), 4 * 5120 * 2048, flops)


def main() -> None:
    """Time every case and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default="", help="operations to time, separated by commas")
    arguments = parser.parse_args()
    wanted = set(filter(None, arguments.only.split(",")))
    limits, timings = ceilings(), []
    for part in (cache_writes, norms_and_streams, attention, products):
        for case in part():
            if wanted and case.op not in wanted:
                continue
            seconds = graph_time(case.calls)
            bandwidth, rate = case.num_bytes / seconds / 1e12, case.num_flops / seconds / 1e12
            shares = bandwidth / limits["copy_TB_s"], rate / limits["bf16_TFLOP_s"]
            timings.append(Timing(case.op, case.shape, seconds * 1e6, bandwidth, rate, *shares))
            print(
                f"{case.op:18} {case.shape:42} {seconds * 1e6:9.1f} us {bandwidth:6.2f} TB/s {rate:7.1f} TFLOP/s",
                flush=True,
            )
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "tilelang": tilelang.__version__, "driver": driver.stdout.strip()},
        "ceilings": limits,
        "timings": [asdict(timing) for timing in timings],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
