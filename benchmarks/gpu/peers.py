"""How fast are our kernels beside what exists for the same job on SM90, in one run on one machine?

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/peers.py --out $OUT/peers.json [--only attend,linear]
        --flash-mla _C_legacy.abi3.so   library of sgl-flash-mla 1.0.0 with SM90 kernels; left out without it
        --tile-kernels FOLDER           unpacked wheel of tile-kernels 2.1.0; likewise

Both sides get the same values and are timed in CUDA graphs as in `ops.py`. `difference` is the largest difference of
the two results over the largest result: it shows that they compute the same thing. The attention keys are values of
e2m1 with a six in every group, which all four cache formats hold exactly:

    ours     window 528 B (e4m3, a scale for 32), selected 288 B (e2m1, a scale for 16)
    theirs   decode 584 B (448 e4m3 with a scale for 64, then 64 bf16; scales behind each page); prefill rows of bf16

A peer that fails is recorded with its error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.ops import (
    CACHE_ROWS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    ROWS,
    SELECTED,
    STREAMS,
    WINDOW_KEYS,
    ceilings,
    randn,
)
from benchmarks.gpu.timing import graph_time, write_report
from deepinfer_core.kernels.reference.coded import code_columns
from deepinfer_core.kernels.reference.records import COMPRESSED, WINDOW, pack
from deepinfer_kernels_nvidia.ops import TABLE

type Call = Callable[[], Any]

_aten: Any = torch.ops.aten

_FLASH_MLA, _TILE_KERNELS = "sgl-flash-mla 1.0.0 (legacy)", "tile-kernels 2.1.0"
_PAGE, _PLAIN, _ROTARY = 64, 448, 64  # of the 584-byte format: keys a page, e4m3 values, bf16 values
_PAGE_UNIT = 576  # bytes that a page is a multiple of
_SETS = 2  # inputs that a graph rotates over, so that L2 holds none of them for the next call


def as_float32(result: Tensor) -> Tensor:
    return result.float()


@dataclass(frozen=True)
class Case:
    """One operation and one peer. `make` builds fresh inputs; returns our call and the peer's."""

    op: str
    shape: str
    peer: str
    make: Callable[[], tuple[Call, Call]]
    note: str = ""
    view: Callable[[Any], Tensor] | None = as_float32  # what is compared of a result; None = it cannot be


@dataclass(frozen=True)
class Comparison:
    """Result of a case; times in microseconds."""

    op: str
    shape: str
    peer: str
    note: str
    ours_us: float | None = None
    peer_us: float | None = None
    ratio: float | None = None  # ours / peer
    difference: float | None = None
    failed: str | None = None


def compare(case: Case) -> Comparison:
    """Check both sides against each other, then time them."""
    try:
        calls = [case.make() for _ in range(_SETS)]
        difference = None
        if case.view is not None:
            ours, theirs = (case.view(call()) for call in calls[0])
            difference = float((ours - theirs).abs().max() / theirs.abs().max())
        ours_us, peer_us = (graph_time([pair[side] for pair in calls]) * 1e6 for side in (0, 1))
    except Exception as error:  # a peer is another project's build; its failure is a result
        return Comparison(case.op, case.shape, case.peer, case.note, failed=f"{type(error).__name__}: {error}"[:300])
    return Comparison(case.op, case.shape, case.peer, case.note, ours_us, peer_us, ours_us / peer_us, difference)


# ---- attention -------------------------------------------------------------------------------------------------------


def exact_keys(rows: int) -> Tensor:
    """[rows, HEAD_DIM] bf16 values of e2m1, a six in every group of 16."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cuda")
    keys = magnitudes[torch.randint(0, 8, (rows, HEAD_DIM), device="cuda")]
    keys[:, ::16] = 6.0
    return (keys * (torch.randint(0, 2, keys.shape, device="cuda") * 2 - 1)).bfloat16()


def paged_584(keys: Tensor) -> Tensor:
    """keys [rows, HEAD_DIM] of `exact_keys` -> uint8 [pages, _PAGE, 1, 584]: values of a page, then its scales."""
    pages, token_bytes = len(keys) // _PAGE, _PLAIN + 2 * _ROTARY
    page_bytes = -(-_PAGE * (token_bytes + 8) // _PAGE_UNIT) * _PAGE_UNIT
    out = torch.zeros(pages, page_bytes, dtype=torch.uint8, device="cuda")
    values = out[:, : _PAGE * token_bytes].unflatten(1, (_PAGE, token_bytes))
    paged = keys.unflatten(0, (pages, _PAGE))
    values[..., :_PLAIN] = paged[..., :_PLAIN].to(torch.float8_e4m3fn).view(torch.uint8)
    values[..., _PLAIN:] = paged[..., _PLAIN:].contiguous().view(torch.uint8)
    out[:, _PAGE * token_bytes : _PAGE * (token_bytes + 8)] = 127  # a scale of one
    return out.as_strided((pages, _PAGE, 1, token_bytes + 8), (page_bytes, token_bytes + 8, token_bytes + 8, 1))


def attention_inputs(rows: int) -> tuple[Call, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Our call, and q, sink, window keys, selected keys, and the rows of both that each query row sees."""
    keys, selected = exact_keys(CACHE_ROWS), exact_keys(CACHE_ROWS)
    window, entries = pack(keys, WINDOW), pack(selected, COMPRESSED)
    near = torch.randint(0, CACHE_ROWS, (rows, WINDOW_KEYS), device="cuda")
    far = torch.randint(0, CACHE_ROWS, (rows, SELECTED), device="cuda").sort(1).values
    plans = TABLE["plan_keys"](near), TABLE["plan_keys"](far)
    q, sink = 0.3 * randn(rows, HEADS, HEAD_DIM), randn(HEADS, dtype=torch.float32)
    return (lambda: TABLE["attend"](q, window, plans[0], entries, plans[1], sink)), q, sink, keys, selected, near, far


def attention(flash_mla: bool) -> Iterator[Case]:
    if not flash_mla:
        return
    library: Any = torch.ops.flash_mla_legacy

    def decode(rows: int) -> tuple[Call, Call]:
        ours, q, sink, keys, selected, near, far = attention_inputs(rows)
        paged, paged_selected = paged_584(keys), paged_584(selected)
        by_request = (rows // 4, 4)
        queries = q.unflatten(0, by_request)
        lists, extra = (which.int().unflatten(0, by_request) for which in (near, far))

        def theirs(schedule: Any = None, splits: Any = None) -> Any:
            return library.sparse_decode_fwd(
                queries, paged, lists, None, sink, schedule, splits, paged_selected, extra, None, HEAD_DIM,
                HEAD_DIM**-0.5, "V4",
            )  # fmt: skip

        _, _, schedule, splits = theirs()  # the schedule is made at the first call
        return ours, lambda: theirs(schedule, splits)[0].flatten(0, 1)

    def prefill(rows: int) -> tuple[Call, Call]:
        ours, q, sink, keys, selected, near, far = attention_inputs(rows)
        both = torch.cat([keys, selected])[:, None]
        lists = torch.cat([near, far + CACHE_ROWS], 1).int()[:, None].contiguous()
        return ours, lambda: library.sparse_prefill_fwd(q, both, lists, HEAD_DIM**-0.5, HEAD_DIM, sink)[0]

    keys = f"{WINDOW_KEYS} + {SELECTED} keys"
    for rows in (256, ROWS):
        yield Case("attend", f"{rows} rows, {keys}", _FLASH_MLA, partial(decode, rows), "decode, 584-byte records")
    for rows in (ROWS, 4096):
        yield Case("attend", f"{rows} rows, {keys}", _FLASH_MLA, partial(prefill, rows), "prefill, bf16 rows")


# ---- products --------------------------------------------------------------------------------------------------------


def plain(rows: int, k: int, n: int) -> tuple[Call, Call]:
    x, w = randn(rows, k), randn(k, n)
    return lambda: TABLE["linear"](x, w), lambda: x @ w


def coded(rows: int, k: int, n: int) -> tuple[Call, Call]:
    x, weight = randn(rows, k), code_columns(randn(k, n))
    row = code_columns(x.t())  # codes [rows, k], one power of two a row
    scales = row.scale[:, None].contiguous(), weight.scale[None].contiguous()
    return lambda: TABLE["linear"](x, weight), lambda: _aten._scaled_mm(
        row.codes, weight.codes.t(), *scales, None, None, torch.bfloat16
    )


def products() -> Iterator[Case]:
    shapes = [("wq_a + wkv", 5120, 1792), ("wq_b", 1280, 32_768), ("wo_b", 8192, 5120)]
    for op, peer, make, note in (
        ("linear", "torch.mm (cuBLAS)", plain, ""),
        ("linear (coded)", "torch._scaled_mm", coded, "ours also codes the rows"),
    ):
        for name, k, n in shapes:
            for rows in (32, ROWS):
                yield Case(op, f"{name}: {rows}x{k}x{n}", peer, partial(make, rows, k, n), note)

    def head() -> tuple[Call, Call]:
        x, w = randn(ROWS, HIDDEN), randn(HIDDEN, 129_280)
        return lambda: TABLE["head_logits"](x, w), lambda: torch.mm(x, w, out_dtype=torch.float32)

    def groups() -> tuple[Call, Call]:
        x, w = randn(ROWS, 8, 4096), randn(8, 4096, 1024)
        return lambda: TABLE["grouped_linear"](x, w), lambda: torch.bmm(x.transpose(0, 1), w).transpose(0, 1)

    yield Case("head_logits", f"{ROWS}x{HIDDEN}x129280", "torch.mm (cuBLAS)", head, "float32 sums out")
    yield Case("grouped_linear", f"wo_a: {ROWS}x8x4096x1024", "torch.bmm (cuBLAS)", groups, "theirs is left transposed")


def experts() -> Iterator[Case]:
    width, local = 2304, 6

    def activation(hidden: Tensor) -> Tensor:
        gate, up = hidden.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)).bfloat16()

    def routed(rows: int) -> tuple[Call, Call]:
        x, ids = randn(rows, HIDDEN), torch.arange(local, device="cuda").expand(rows, -1).contiguous()
        w13, w2 = 0.02 * randn(local, HIDDEN, 2 * width), 0.02 * randn(local, width, HIDDEN)
        scale, plan = torch.ones(rows, local, device="cuda"), TABLE["plan_experts"](ids, local)
        gathered = x.repeat(local, 1)
        ends = torch.arange(1, local + 1, device="cuda", dtype=torch.int32) * rows

        def theirs() -> Tensor:
            hidden = activation(_aten._grouped_mm(gathered, w13, ends))
            return _aten._grouped_mm(hidden, w2, ends).unflatten(0, (local, rows)).transpose(0, 1)

        return lambda: TABLE["run_experts"](x, scale, plan, w13, w2, 10.0), theirs

    def shared() -> tuple[Call, Call]:
        x, w13, w2 = randn(ROWS, HIDDEN), 0.02 * randn(HIDDEN, 2 * width), 0.02 * randn(width, HIDDEN)
        return lambda: TABLE["shared_expert"](x, w13, w2, 10.0), lambda: activation(x @ w13) @ w2

    for rows in (32, ROWS):
        shape = f"{local} experts, {rows} rows each"
        yield Case(
            "run_experts", shape, "torch._grouped_mm", partial(routed, rows), "activation by torch, rows gathered"
        )
    yield Case("shared_expert", f"{ROWS} rows", "torch.mm (cuBLAS)", shared, "activation by torch")


def selection() -> Iterator[Case]:
    context = 131_072
    for dtype, rows in ((torch.float32, ROWS), (torch.bfloat16, ROWS), (torch.float32, 32)):

        def make(dtype: torch.dtype = dtype, rows: int = rows) -> tuple[Call, Call]:
            # Distinct scores, so that both take the same entries; in bf16 they are not distinct.
            scores = torch.rand(rows, context, device="cuda").argsort(1).float() / context
            theirs = scores.to(dtype)
            return lambda: TABLE["select_entries"](scores, SELECTED), lambda: theirs.topk(SELECTED, 1).indices

        peer = f"torch.topk ({str(dtype).removeprefix('torch.')})"
        exact = dtype == torch.float32
        note = "theirs ordered by value" if exact else "theirs reads half the bytes"
        view = (lambda ids: ids.sort(1).values.float()) if exact else None
        yield Case("select_entries", f"{SELECTED} of {rows}x{context}", peer, make, note, view)


# ---- rows ------------------------------------------------------------------------------------------------------------


def norms() -> Iterator[Case]:
    def make() -> tuple[Call, Call]:
        x, w = randn(ROWS, HIDDEN), randn(HIDDEN)
        return lambda: TABLE["rms_norm"](x, w, 1e-20), lambda: torch.nn.functional.rms_norm(x, (HIDDEN,), w, 1e-20)

    yield Case("rms_norm", f"{ROWS}x{HIDDEN}", "torch rms_norm", make)


def tile_kernels() -> Iterator[Case]:
    from importlib import import_module

    mhc, quant, rotary, moe, engram = (
        import_module(f"tile_kernels.{name}") for name in ("mhc", "quant", "transform", "moe", "engram")
    )

    def norm() -> tuple[Call, Call]:
        x, w = randn(ROWS, HIDDEN), randn(HIDDEN)
        return lambda: TABLE["rms_norm"](x, w, 1e-20), lambda: quant.norm_forward(x, w, 1e-20)[0]

    def rope() -> tuple[Call, Call]:
        x = randn(ROWS, HEADS, HEAD_DIM)
        same = x.clone()
        table = TABLE["rope_table"](torch.arange(ROWS, device="cuda"), torch.rand(_ROTARY // 2, device="cuda"))
        halves = torch.cat([table[:, 0, ::2], table[:, 1, 1::2]], 1).contiguous()

        def theirs() -> Tensor:
            rotary.apply_rotary(same[..., -_ROTARY:], halves, interleaved=True)
            return same

        return lambda: TABLE["apply_rope"](x, table, in_place=True), theirs

    def collapse() -> tuple[Call, Call]:
        x, mix, out = randn(ROWS, STREAMS, HIDDEN), torch.rand(ROWS, STREAMS, device="cuda"), randn(ROWS, HIDDEN)

        def theirs() -> Tensor:
            mhc.mhc_pre_apply_mix_fwd(x, mix, out)
            return out

        return lambda: TABLE["mhc_collapse"](x, mix), theirs

    def expand() -> tuple[Call, Call]:
        x, y = randn(ROWS, STREAMS, HIDDEN), randn(ROWS, HIDDEN)
        post, mix = torch.rand(ROWS, STREAMS, device="cuda"), torch.rand(ROWS, STREAMS, STREAMS, device="cuda")
        return lambda: TABLE["mhc_expand"](x, y, post, mix), lambda: mhc.mhc_post_fwd(
            y[None], x[None], post[None, ..., None], mix[None]
        )[0]

    def following() -> tuple[Call, Call]:
        x, y, w = randn(ROWS, STREAMS, HIDDEN), randn(ROWS, HIDDEN), randn(HIDDEN)
        post, pre = torch.rand(2, ROWS, STREAMS, device="cuda").unbind()
        mix, out = torch.rand(ROWS, STREAMS, STREAMS, device="cuda"), torch.empty_like(y)

        def theirs() -> Tensor:
            streams = mhc.mhc_post_fwd(y[None], x[None], post[None, ..., None], mix[None])[0]
            mhc.mhc_pre_apply_mix_fwd(streams, pre, out)
            return quant.norm_forward(out, w, 1e-20)[0]

        return lambda: TABLE["mhc_next"](x, y, post, mix, pre, w, 1e-20)[1], theirs

    def route() -> tuple[Call, Call]:
        x, gate, bias = randn(ROWS, HIDDEN), 0.02 * randn(HIDDEN, 384).float(), randn(384, dtype=torch.float32)

        return lambda: TABLE["route"](x, gate, bias, 6, 1.5), lambda: moe.moe_topk_gate_forward(
            x.float() @ gate, 6, False, 0, 1.5, 0, bias=bias
        )

    def dense(routed: tuple[Tensor, Tensor]) -> Tensor:
        return torch.zeros(ROWS, 384, device="cuda").scatter_(1, *routed)

    def gate() -> tuple[Call, Call]:
        x, both = randn(ROWS, STREAMS, HIDDEN), randn(ROWS, (STREAMS + 1) * HIDDEN)
        weight, one = torch.rand(STREAMS, HIDDEN, device="cuda"), torch.ones(STREAMS, HIDDEN, device="cuda")
        alive = torch.zeros(ROWS, dtype=torch.bool, device="cuda")
        return lambda: TABLE["engram_gate"](x, both, weight, one, alive, 1e-20), lambda: engram.engram_gate_fwd(
            x, both.unflatten(1, (STREAMS + 1, HIDDEN)), weight, 1e-20, 1e-6, save_for_backward=False
        )[0]

    streams = f"{ROWS}x{STREAMS}x{HIDDEN}"
    yield Case("rms_norm", f"{ROWS}x{HIDDEN}", _TILE_KERNELS, norm)
    yield Case("apply_rope", f"{ROWS}x{HEADS}x{HEAD_DIM}", _TILE_KERNELS, rope, "64 dims in place")
    yield Case("mhc_collapse", streams, _TILE_KERNELS, collapse)
    yield Case("mhc_expand", streams, _TILE_KERNELS, expand)
    yield Case("mhc_next", streams, _TILE_KERNELS, following, "post, pre mix and norm, three kernels")
    yield Case("route", f"{ROWS}x{HIDDEN}x384", _TILE_KERNELS, route, "logits by cuBLAS in float32", dense)
    yield Case("engram_gate", streams, _TILE_KERNELS, gate)


def main() -> None:
    """Compare every case and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default="", help="operations to compare, separated by commas")
    parser.add_argument("--flash-mla", type=Path, help="_C_legacy.abi3.so of sgl-flash-mla 1.0.0")
    parser.add_argument("--tile-kernels", type=Path, help="wheel of tile-kernels 2.1.0")
    arguments = parser.parse_args()
    if arguments.flash_mla is not None:
        torch.ops.load_library(arguments.flash_mla)
    if arguments.tile_kernels is not None:
        sys.path.insert(0, str(arguments.tile_kernels))
    wanted = set(filter(None, arguments.only.split(",")))
    parts = [attention(arguments.flash_mla is not None), products(), experts(), selection(), norms()]
    if arguments.tile_kernels is not None:
        parts.append(tile_kernels())
    limits, results = ceilings(), []
    for case in (case for part in parts for case in part):
        if wanted and case.op not in wanted:
            continue
        results.append(compare(case))
        torch.cuda.empty_cache()
        print(results[-1], flush=True)
    write_report(arguments.out, ceilings=limits, comparisons=[asdict(result) for result in results])


if __name__ == "__main__":
    main()
