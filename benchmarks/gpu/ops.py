"""How long does each kernel take at the shapes of one rank of 64 (EP64), against ceilings measured in the same run?

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/ops.py --out $OUT/ops.json [--only attend]

256 requests of 4 rows, context 131,072. A case is captured in a CUDA graph of ten calls over rotating inputs; reported
is the median of 20 replays. Bytes count every input read once and every output written once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.timing import graph_time, write_report
from deepinfer_core.kernels.reference.coded import code_columns
from deepinfer_core.kernels.reference.records import COMPRESSED, INDEX, WINDOW, RecordFormat, pack
from deepinfer_kernels_nvidia.ops import TABLE

ROWS, HIDDEN, HEADS, HEAD_DIM, STREAMS = 1024, 5120, 64, 512, 4
ROTARY = 64
WINDOW_KEYS, SELECTED = 128, 512
CACHE_ROWS = 262_144
INPUT_SETS = 3  # that a graph takes in turn


@dataclass(frozen=True)
class Case:
    """One timed call: `calls[i % len(calls)]` are the same operation on different inputs."""

    op: str
    shape: str
    calls: Sequence[Callable[[], Any]]
    num_bytes: float
    num_flops: float = 0.0
    peer: Sequence[Callable[[], Any]] | None = None  # what torch has for the same job


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
    torch_microseconds: float | None


def ceilings() -> dict[str, float]:
    """Copy bandwidth in TB/s (read + written), rates of 8192^3 in bf16 and in e4m3 in TFLOP/s, both of cuBLAS."""
    source = randn(1 << 30)
    target = torch.empty_like(source)
    copy_s = graph_time([lambda: torch.neg(source, out=target)])  # a kernel: copy_ becomes a slower memcpy node
    a, b = randn(8192, 8192), randn(8192, 8192)
    codes, one = (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()), torch.ones((), device="cuda")
    scaled_mm = partial(torch.ops.aten._scaled_mm.default, *codes, one, one, None, None, torch.bfloat16)
    return {
        "copy_TB_s": 4 * (1 << 30) / copy_s / 1e12,
        "bf16_TFLOP_s": 2 * 8192**3 / graph_time([lambda: a @ b]) / 1e12,
        "e4m3_TFLOP_s": 2 * 8192**3 / graph_time([scaled_mm]) / 1e12,
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
        for rows, run in ((ROWS, 1), (131_072, 1), (131_072, 128)):

            def make(
                op: str = op, dim: int = dim, record: int = record, rows: int = rows, run: int = run
            ) -> Callable[[], Any]:
                target = torch.zeros(CACHE_ROWS, record, dtype=torch.uint8, device="cuda")
                first = torch.randperm(CACHE_ROWS // run, device="cuda")[: rows // run] * run
                where, keys = (first[:, None] + torch.arange(run, device="cuda")).flatten(), randn(rows, dim)
                return lambda: TABLE[op](target, where, keys)

            order = "random" if run == 1 else f"in blocks of {run}"
            yield Case(op, f"{rows} rows, {order}", sets(make), rows * (2 * dim + record + 8))

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
    rope_bytes = 4 * ROWS * HEADS * ROTARY
    yield simple(
        "apply_rope",
        rope_bytes,
        lambda: (randn(ROWS, HEADS, HEAD_DIM), table),
        "1024x64x512, 64 in place",
        in_place=True,
    )
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
    mixes = ((ROWS, 4), (ROWS, 4, 4), (ROWS, 4))
    yield simple(
        "mhc_next",
        10 * row_bytes,
        lambda: (
            randn(ROWS, 4, HIDDEN),
            randn(ROWS, HIDDEN),
            *(randn(*shape, dtype=f32) for shape in mixes),
            randn(HIDDEN, dtype=f32),
            1e-20,
        ),
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
            inputs = [(randn(rows, k), randn(k, n)) for _ in range(INPUT_SETS)]
            ours = [partial(TABLE["linear"], x, w) for x, w in inputs]
            torches = [partial(torch.mm, x, w) for x, w in inputs]
            num_bytes = 2 * (rows * k + k * n + rows * n)
            yield Case("linear", f"{name}: {rows}x{k}x{n}", ours, num_bytes, 2.0 * rows * k * n, torches)

    def make_groups() -> Callable[[], Any]:
        x, w = randn(ROWS, 8, 4096), randn(8, 4096, 1024)
        return lambda: TABLE["grouped_linear"](x, w)

    flops = 2.0 * ROWS * 8 * 4096 * 1024
    yield Case("grouped_linear", "wo_a: 1024x8x4096x1024", sets(make_groups), 2 * 8 * 4096 * (ROWS + 1024), flops)

    def make_sums() -> Callable[[], Any]:
        x, w = randn(ROWS, 5120), randn(5120, 1024)
        return lambda: TABLE["head_logits"](x, w)

    flops = 2.0 * ROWS * 5120 * 1024
    yield Case("head_logits", "compressor: 1024x5120x1024", sets(make_sums), 2 * 5120 * 2048, flops)


def coded_products() -> Iterator[Case]:
    """With weights in e4m3, as `float8_products` has them; rows are coded on the way."""
    for name, k, n in (("wq_b", 1280, 32_768), ("wo_b", 8192, 5120)):
        for rows in (8, ROWS):

            def make(rows: int = rows, k: int = k, n: int = n) -> Callable[[], Any]:
                x, w = randn(rows, k), code_columns(randn(k, n))
                return lambda: TABLE["linear"](x, w)

            flops = 2.0 * rows * k * n
            yield Case("linear_coded", f"{name}: {rows}x{k}x{n}", sets(make), k * n + 2 * rows * (k + n), flops)
    width, local = 2304, 6
    for rows in (8, ROWS):

        def make_shared(rows: int = rows) -> Callable[[], Any]:
            x, w13, w2 = randn(rows, HIDDEN), code_columns(randn(HIDDEN, 2 * width)), code_columns(randn(width, HIDDEN))
            return lambda: TABLE["shared_expert"](x, w13, w2, 10.0)

        flops = 6.0 * rows * HIDDEN * width
        yield Case("shared_expert_coded", f"{rows} rows", sets(make_shared), 3 * HIDDEN * width, flops)

        def make_routed(rows: int = rows) -> Callable[[], Any]:
            x, ids = randn(rows, HIDDEN), torch.arange(local, device="cuda").expand(rows, -1).contiguous()
            w13, w2 = code_columns(randn(local, HIDDEN, 2 * width)), code_columns(randn(local, width, HIDDEN))
            scale, plan = torch.rand(rows, local, device="cuda"), TABLE["plan_experts"](ids, local)
            return lambda: TABLE["run_experts"](x, scale, plan, w13, w2, 10.0)

        flops = 6.0 * rows * local * HIDDEN * width
        shape = f"6 experts, {rows} rows each"
        yield Case("run_experts_coded", shape, sets(make_routed), 3 * local * HIDDEN * width, flops)


def experts() -> Iterator[Case]:
    width, local = 2304, 6
    weight_bytes = 2 * local * 3 * HIDDEN * width
    for rows in (8, ROWS):

        def make_routed(rows: int = rows) -> Callable[[], Any]:
            x, ids = randn(rows, HIDDEN), torch.arange(local, device="cuda").expand(rows, -1).contiguous()
            w13, w2 = randn(local, HIDDEN, 2 * width), randn(local, width, HIDDEN)
            scale, plan = torch.rand(rows, local, device="cuda"), TABLE["plan_experts"](ids, local)
            return lambda: TABLE["run_experts"](x, scale, plan, w13, w2, 10.0)

        flops = 6.0 * rows * local * HIDDEN * width
        yield Case("run_experts", f"6 experts, {rows} rows each", sets(make_routed), weight_bytes, flops)

    def make_plan() -> Callable[[], Any]:
        ids = torch.rand(ROWS, 384, device="cuda").topk(6, 1).indices
        return lambda: TABLE["plan_experts"](ids, 384)

    yield Case("plan_experts", f"{ROWS}x6 of 384", sets(make_plan), ROWS * 6 * 12)

    for rows in (8, ROWS):

        def make_shared(rows: int = rows) -> Callable[[], Any]:
            x, w13, w2 = randn(rows, HIDDEN), randn(HIDDEN, 2 * width), randn(width, HIDDEN)
            return lambda: TABLE["shared_expert"](x, w13, w2, 10.0)

        flops = 6.0 * rows * HIDDEN * width
        yield Case("shared_expert", f"{rows} rows", sets(make_shared), 2 * 3 * HIDDEN * width, flops)

    def make_route() -> Callable[[], Any]:
        x, gate = randn(ROWS, HIDDEN), randn(HIDDEN, 384)
        bias = torch.randn(384, device="cuda")
        return lambda: TABLE["route"](x, gate, bias, 6, 1.5)

    yield Case("route", f"{ROWS}x{HIDDEN}x384", sets(make_route), 2 * ROWS * HIDDEN + 2 * HIDDEN * 384)

    def make_combine() -> Callable[[], Any]:
        pairs, shared = randn(ROWS, 6, HIDDEN), randn(ROWS, HIDDEN)
        return lambda: TABLE["combine_experts"](pairs, shared)

    yield Case("combine_experts", f"{ROWS}x6x{HIDDEN}", sets(make_combine), 2 * ROWS * 8 * HIDDEN)


def indexer() -> Iterator[Case]:
    context, heads, dim, block, selected, candidates = 131_072, 32, 128, 8, 512, 2048

    def make(rows: int, entries: int, share: float | None, alike: int) -> Callable[[], Any]:
        """Scores of rows of four to a request, each request with blocks of `entries` keys of its own: at 1,024 rows far
        more than fit L2. `share` of the candidate blocks, if any, the same for `alike` rows.
        """
        num_blocks = context // 128
        keys = pack(randn(8192, dim, dtype=torch.float32), INDEX).repeat(rows // 4 * num_blocks * entries // 8192, 1)
        request = torch.arange(rows, device="cuda") // 4
        blocks = request[:, None] * num_blocks + torch.arange(num_blocks, device="cuda")
        plan = TABLE["plan_index"](blocks, entries, torch.full((rows,), num_blocks * entries, device="cuda"))
        iq, weights = TABLE["round_index"](randn(rows, heads, dim)), randn(rows, heads)
        marks = None
        if share is not None:
            marks = torch.rand(rows // alike, num_blocks * entries // block, device="cuda") < share
            marks = marks.repeat_interleave(alike, 0)
        return lambda: TABLE["index_scores"](iq, weights, keys, plan, marks, block)

    some = candidates * block / context
    for rows, entries, share, alike, name in (
        (8, 128, None, 4, "context 131072"),
        (ROWS, 128, None, 4, "context 131072"),
        (ROWS, 64, None, 4, "context 131072, ratio 2"),
        (ROWS, 128, some, 4, "context 131072, 2048 candidate blocks of a request"),
        (ROWS, 128, some, 1, "context 131072, 2048 candidate blocks of each row"),
    ):
        read = rows * context // 128 * entries * (1.0 if share is None else share)
        written = rows * context // 128 * entries * 4
        num_bytes, num_flops = read * 68 / alike + written, 2.0 * read * heads * dim
        yield Case("index_scores", f"{rows} rows, {name}", [make(rows, entries, share, alike)], num_bytes, num_flops)
    for rows in (8, ROWS):
        scores = [randn(rows, context, dtype=torch.float32) for _ in range(2)]
        visible = torch.full((rows,), context, device="cuda")
        select = [partial(TABLE["select_entries"], row_scores, selected) for row_scores in scores]
        mark = [partial(TABLE["candidate_blocks"], row_scores, visible, block, candidates) for row_scores in scores]
        torches = [partial(torch.topk, row_scores, selected, 1) for row_scores in scores]
        yield Case("select_entries", f"{selected} of {rows}x{context}", select, 4 * rows * context, peer=torches)
        yield Case("candidate_blocks", f"{candidates} of {rows}x{context // block}", mark, 4 * rows * context)


def main() -> None:
    """Time every case and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default="", help="operations to time, separated by commas")
    arguments = parser.parse_args()
    wanted = set(filter(None, arguments.only.split(",")))
    limits, timings = ceilings(), []
    for part in (cache_writes, norms_and_streams, attention, indexer, products, coded_products, experts):
        for case in part():
            if wanted and case.op not in wanted:
                continue
            seconds = graph_time(case.calls)
            bandwidth, rate = case.num_bytes / seconds / 1e12, case.num_flops / seconds / 1e12
            shares = bandwidth / limits["copy_TB_s"], rate / limits["bf16_TFLOP_s"]
            peer = None if case.peer is None else graph_time(case.peer) * 1e6
            timings.append(Timing(case.op, case.shape, seconds * 1e6, bandwidth, rate, *shares, peer))
            print(
                f"{case.op:18} {case.shape:42} {seconds * 1e6:9.1f} us {bandwidth:6.2f} TB/s {rate:7.1f} TFLOP/s",
                flush=True,
            )
    write_report(arguments.out, ceilings=limits, timings=[asdict(timing) for timing in timings])


if __name__ == "__main__":
    main()
