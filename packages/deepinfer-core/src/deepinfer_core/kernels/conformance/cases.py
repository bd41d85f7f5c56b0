"""Inputs for every operation of the contract; those of sampling stand in `sampling_cases`.

Shapes cover the release's head sizes, the tiny checkpoints', one row, a number of rows that is no multiple of a tile,
rows that see nothing, ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from deepinfer_core.kernels.conformance.case import CacheContent, Case, Inputs
from deepinfer_core.kernels.conformance.sampling_cases import sampling_cases
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference.coded import code_columns
from deepinfer_core.kernels.reference.packed import FP4_ROWS, FP8_ROWS, pack_columns
from deepinfer_core.kernels.reference.records import COMPRESSED, INDEX, WINDOW, RecordFormat
from deepinfer_core.kernels.reference.rounding import round_index

__all__ = ["CacheContent", "Case", "Inputs", "all_cases"]

_CODED_UNIT = 32  # the coded weights of a model have rows of whole units


def all_cases() -> Iterator[Case]:
    """Every case; each operation of the contract occurs at least once."""
    yield from _products()
    yield from _norms_and_rope()
    yield from _streams()
    yield from _cache_writes()
    yield from _attention()
    yield from _indexer()
    yield from _experts()
    yield from _engram_and_draft()
    yield from sampling_cases()


def _randn(g: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=g) * scale


def _randint(g: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=g)


def _products() -> Iterator[Case]:
    for k, n in ((128, 64), (512, 24), (1280, 96), (5120, 40), (33, 7)):

        def make(rows: int, g: torch.Generator, k: int = k, n: int = n) -> tuple[Inputs, Inputs]:
            return {"x": _randn(g, rows, k)}, {"w": _randn(g, k, n, scale=k**-0.5)}

        yield Case("linear", f"{k}x{n}", make, lambda o, r, s: (o.linear(r["x"], s["w"]),))
        if k % _CODED_UNIT == 0:

            def coded(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
                return (o.linear(r["x"], code_columns(s["w"])),)

            yield Case("linear", f"{k}x{n}-coded", make, coded, coded=True)
            for form in (FP4_ROWS, FP8_ROWS):
                name = f"{k}x{n}-fp{form.value_bits}"
                yield Case("linear", name, make, partial(_packed_linear, form), packed=True)
    for k, n in ((128, 384), (5120, 1000)):

        def make_head(rows: int, g: torch.Generator, k: int = k, n: int = n) -> tuple[Inputs, Inputs]:
            return {"x": _randn(g, rows, k)}, {"w": _randn(g, k, n, scale=k**-0.5)}

        yield Case("head_logits", f"{k}x{n}", make_head, lambda o, r, s: (o.head_logits(r["x"], s["w"]),))
    for groups, k, n in ((2, 128, 32), (8, 4096, 16)):

        def make_grouped(
            rows: int, g: torch.Generator, groups: int = groups, k: int = k, n: int = n
        ) -> tuple[Inputs, Inputs]:
            return {"x": _randn(g, rows, groups, k)}, {"w": _randn(g, groups, k, n, scale=k**-0.5)}

        yield Case(
            "grouped_linear", f"{groups}x{k}x{n}", make_grouped, lambda o, r, s: (o.grouped_linear(r["x"], s["w"]),)
        )


def _norms_and_rope() -> Iterator[Case]:
    for dim in (64, 512, 5120):

        def make(rows: int, g: torch.Generator, dim: int = dim) -> tuple[Inputs, Inputs]:
            x = _randn(g, rows, dim)
            x[0] = 0.0  # an all-zero row gives zero, not NaN
            return {"x": x}, {"w": _randn(g, dim)}

        yield Case("rms_norm", str(dim), make, lambda o, r, s: (o.rms_norm(r["x"], s["w"], 1e-20),))

    def make_table(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        return {"position": _randint(g, 0, 100_000, rows)}, {"f": 10_000.0 ** (-torch.arange(0, 1, 1 / 8))}

    yield Case("rope_table", "16", make_table, lambda o, r, s: (o.rope_table(r["position"], s["f"]),))
    for shape, inverse in (((64,), False), ((4, 64), False), ((8, 512), True)):

        def make_rope(rows: int, g: torch.Generator, shape: tuple[int, ...] = shape) -> tuple[Inputs, Inputs]:
            angle = _randn(g, rows, 8).repeat_interleave(2, 1)
            sign = torch.tensor([-1.0, 1.0]).repeat(8)
            return {"x": _randn(g, rows, *shape), "table": torch.stack([angle.cos(), angle.sin() * sign], 1)}, {}

        def run_rope(o: Kernels, r: Inputs, s: Inputs, inverse: bool = inverse) -> tuple[Tensor, ...]:
            return (o.apply_rope(r["x"], r["table"], inverse=inverse),)

        yield Case("apply_rope", f"{shape}-{'inverse' if inverse else 'forward'}", make_rope, run_rope)


def _streams() -> Iterator[Case]:
    for streams, dim in ((4, 128), (4, 5120), (2, 96)):
        mixes = streams * (streams + 2)

        def make(
            rows: int, g: torch.Generator, streams: int = streams, dim: int = dim, mixes: int = mixes
        ) -> tuple[Inputs, Inputs]:
            row = {
                "x": _randn(g, rows, streams, dim),
                "y": _randn(g, rows, dim),
                "pre": torch.rand(rows, streams, generator=g),
                "post": torch.rand(rows, streams, generator=g),
                "c": torch.rand(rows, streams, streams, generator=g),
            }
            shared = {
                "fn": _randn(g, streams * dim, mixes, scale=(streams * dim) ** -0.5),
                "base": _randn(g, mixes),
                "scale": _randn(g, mixes),
                "norm": _randn(g, dim),
            }
            return row, shared

        def mix(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
            return o.mhc_mix(r["x"], s["fn"], s["base"], s["scale"], iterations=20, norm_eps=1e-20, eps=1e-6)

        yield Case("mhc_mix", f"{streams}x{dim}", make, mix)
        yield Case("mhc_collapse", f"{streams}x{dim}", make, lambda o, r, s: (o.mhc_collapse(r["x"], r["pre"]),))
        yield Case(
            "mhc_expand", f"{streams}x{dim}", make, lambda o, r, s: (o.mhc_expand(r["x"], r["y"], r["post"], r["c"]),)
        )

        def to_next(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
            return o.mhc_next(r["x"], r["y"], r["post"], r["c"], r["pre"], s["norm"], 1e-20)

        yield Case("mhc_next", f"{streams}x{dim}", make, to_next)


def _cache_writes() -> Iterator[Case]:
    for op, fmt, dim in (
        ("write_window", WINDOW, 64),
        ("write_window", WINDOW, 512),
        ("write_entries", COMPRESSED, 64),
        ("write_entries", COMPRESSED, 512),
        ("write_index_keys", INDEX, 32),
        ("write_index_keys", INDEX, 128),
    ):

        def make(rows: int, g: torch.Generator, fmt: RecordFormat = fmt, dim: int = dim) -> tuple[Inputs, Inputs]:
            values = _randn(g, rows, dim) * torch.exp(_randn(g, rows, 1) * 4)
            values[0] = 0.0
            empty = CacheContent(torch.zeros(2 * rows, dim), fmt)
            return {"values": values}, {"cache_rows": torch.randperm(2 * rows, generator=g)[:rows], "cache": empty}

        def write(o: Kernels, r: Inputs, s: Inputs, op: str = op) -> tuple[Tensor, ...]:
            cache = s["cache"].clone()
            getattr(o, op)(cache, s["cache_rows"], r["values"])
            return (cache,)

        yield Case(op, str(dim), make, write, by_row=False)

    def make_copy(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        order = torch.randperm(3 * rows, generator=g)
        return {"cache": _randn(g, 3 * rows, 32)}, {"to": order[:rows], "from": order[rows : 2 * rows]}

    def copy(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
        cache = r["cache"].clone()
        o.copy_rows(cache, s["to"], s["from"])
        return (cache,)

    yield Case("copy_rows", "32", make_copy, copy, by_row=False)

    def make_queries(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        return {"x": _randn(g, rows, 16, 128)}, {}

    yield Case("round_index", "16x128", make_queries, lambda o, r, s: (o.round_index(r["x"]),))

    def make_pairs(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        return {"first": _randn(g, rows, 2, 512), "second": _randn(g, rows, 2, 512)}, {}

    yield Case("pool_pairs", "512", make_pairs, lambda o, r, s: (o.pool_pairs(r["first"], r["second"]),))


def _attention() -> Iterator[Case]:
    for heads, dim, window, entries in ((4, 64, 8, 6), (8, 64, 128, 64), (64, 512, 128, 512), (4, 64, 16, 0)):

        def make(
            rows: int,
            g: torch.Generator,
            heads: int = heads,
            dim: int = dim,
            window: int = window,
            entries: int = entries,
        ) -> tuple[Inputs, Inputs]:
            row = {"q": _randn(g, rows, heads, dim), "window_rows": _randint(g, -1, 300, rows, window)}
            row["window_rows"][0] = -1  # a row that sees nothing
            if entries:
                row["entry_rows"] = _randint(g, -1, 300, rows, entries)
                row["entry_rows"][0] = -1
            shared = {"window": CacheContent(_randn(g, 300, dim), WINDOW), "sink": _randn(g, heads)}
            return row, shared | {"entries": CacheContent(_randn(g, 300, dim), COMPRESSED)}

        def attend(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
            window = o.plan_keys(r["window_rows"])
            if "entry_rows" not in r:
                return (o.attend(r["q"], s["window"], window, None, None, s["sink"]),)
            return (o.attend(r["q"], s["window"], window, s["entries"], o.plan_keys(r["entry_rows"]), s["sink"]),)

        yield Case("attend", f"{heads}x{dim}-{window}+{entries}", make, attend)
        yield Case("plan_keys", f"{heads}x{dim}-{window}+{entries}", make, attend)


def _indexer() -> Iterator[Case]:
    for heads, dim, per_block in ((16, 32, 64), (32, 128, 128)):

        def make(
            rows: int, g: torch.Generator, heads: int = heads, dim: int = dim, per_block: int = per_block
        ) -> tuple[Inputs, Inputs]:
            visible = _randint(g, 0, 4 * per_block, rows)
            visible[0] = 0
            row = {
                "iq": round_index(_randn(g, rows, heads, dim)),
                "w": _randn(g, rows, heads),
                "blocks": _randint(g, 0, 9, rows, 4),
                "visible": visible,
                "candidates": torch.rand(rows, per_block // 2, generator=g) < 0.5,
            }
            return row, {"cache": CacheContent(_randn(g, 9 * per_block, dim), INDEX), "per_block": per_block}

        def score(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
            plan = o.plan_index(r["blocks"], s["per_block"], r["visible"])
            free = o.index_scores(r["iq"], r["w"], s["cache"], plan, None, 8)
            return free, o.index_scores(r["iq"], r["w"], s["cache"], plan, r["candidates"], 8)

        yield Case("index_scores", f"{heads}x{dim}-{per_block}", make, score)
        yield Case("plan_index", f"{heads}x{dim}-{per_block}", make, score)

    def make_scores(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        scores = torch.round(_randn(g, rows, 333) * 4) / 4  # many ties
        visible = _randint(g, 0, 334, rows)
        visible[0] = 0
        return {
            "scores": scores.masked_fill(torch.arange(333) >= visible[:, None], float("-inf")),
            "visible": visible,
        }, {}

    yield Case(
        "candidate_blocks", "333", make_scores, lambda o, r, s: (o.candidate_blocks(r["scores"], r["visible"], 8, 9),)
    )
    yield Case("select_entries", "333", make_scores, lambda o, r, s: (o.select_entries(r["scores"], 64),))


def _experts() -> Iterator[Case]:
    for dim, width, experts, chosen in ((128, 64, 16, 4), (96, 32, 6, 2), (512, 256, 12, 6)):

        def make(
            rows: int,
            g: torch.Generator,
            dim: int = dim,
            width: int = width,
            experts: int = experts,
            chosen: int = chosen,
        ) -> tuple[Inputs, Inputs]:
            ids = torch.rand(rows, experts, generator=g).topk(chosen, 1).indices.sort(1).values
            row = {
                "x": _randn(g, rows, dim),
                "ids": ids,
                "weights": torch.rand(rows, chosen, generator=g),
                "pairs": _randn(g, rows, chosen, dim),
                "shared": _randn(g, rows, dim),
            }
            shared = {
                "gate": _randn(g, dim, experts, scale=dim**-0.5),
                "bias": _randn(g, experts, scale=0.1),
                "k": chosen,
                "w13": _randn(g, experts, dim, 2 * width, scale=dim**-0.5),
                "w2": _randn(g, experts, width, dim, scale=width**-0.5),
            }
            return row, shared

        def route(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
            return o.route(r["x"], s["gate"], s["bias"], s["k"], 1.5)

        def run(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
            plan = o.plan_experts(r["ids"], s["w13"].shape[0])
            return (o.run_experts(r["x"], r["weights"], plan, s["w13"], s["w2"], 1.5),)

        name = f"{dim}x{width}-{chosen}/{experts}"
        yield Case("route", name, make, route)
        yield Case("plan_experts", name, make, run)
        yield Case("run_experts", name, make, run)
        yield Case(
            "shared_expert", name, make, lambda o, r, s: (o.shared_expert(r["x"], s["w13"][0], s["w2"][0], 1.5),)
        )
        if dim % _CODED_UNIT == width % _CODED_UNIT == 0:
            yield Case("run_experts", f"{name}-coded", make, _run_coded_experts, coded=True)
            yield Case("shared_expert", f"{name}-coded", make, _run_coded_shared_expert, coded=True)
            yield Case("run_experts", f"{name}-packed", make, _run_packed_experts, packed=True)
            yield Case("shared_expert", f"{name}-packed", make, _run_packed_shared_expert, packed=True)
        yield Case("combine_experts", name, make, lambda o, r, s: (o.combine_experts(r["pairs"], r["shared"]),))


def _run_coded_experts(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
    plan = o.plan_experts(r["ids"], s["w13"].shape[0])
    return (o.run_experts(r["x"], r["weights"], plan, code_columns(s["w13"]), code_columns(s["w2"]), 1.5),)


def _packed_linear(form: RecordFormat, o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
    return (o.linear(r["x"], pack_columns(s["w"], form)),)


def _run_packed_experts(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
    plan = o.plan_experts(r["ids"], s["w13"].shape[0])
    w13, w2 = pack_columns(s["w13"], FP4_ROWS), pack_columns(s["w2"], FP4_ROWS)
    return (o.run_experts(r["x"], r["weights"], plan, w13, w2, 1.5),)


def _run_packed_shared_expert(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
    w13, w2 = pack_columns(s["w13"][0], FP8_ROWS), pack_columns(s["w2"][0], FP8_ROWS)
    return (o.shared_expert(r["x"], w13, w2, 1.5),)


def _run_coded_shared_expert(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
    return (o.shared_expert(r["x"], code_columns(s["w13"][0]), code_columns(s["w2"][0]), 1.5),)


def _engram_and_draft() -> Iterator[Case]:
    def make(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        primes = torch.tensor([97, 101, 103, 107, 109, 113])
        row = {
            "history": _randint(g, -1, 321, rows, 4),
            "streams": _randn(g, rows, 4, 128),
            "key_value": _randn(g, rows, 640),
            "dead": torch.rand(rows, generator=g) < 0.2,
        }
        shared = {
            "multipliers": _randint(g, 1, 2**53, 4) * 2 + 1,
            "primes": primes,
            "offsets": primes.cumsum(0) - primes,
            "q": _randn(g, 4, 128),
            "k": _randn(g, 4, 128),
        }
        return row, shared

    def table_rows(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
        return (o.engram_rows(r["history"], s["multipliers"], s["primes"], s["offsets"], 7, 2),)

    def gate(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
        return (o.engram_gate(r["streams"], r["key_value"], s["q"], s["k"], r["dead"], 1e-20),)

    yield Case("engram_rows", "3x2", make, table_rows)
    yield Case("engram_gate", "4x128", make, gate)

    def make_draft(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        row = {"base": _randn(g, rows, 384), "hidden": _randn(g, rows, 128), "previous": _randint(g, 0, 384, rows)}
        return row, {"embed": _randn(g, 384, 32), "head": _randn(g, 32, 384), "confidence": _randn(g, 160, 1)}

    def markov(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
        return o.markov_step(r["base"], r["hidden"], r["previous"], s["embed"], s["head"], s["confidence"])

    yield Case("markov_step", "384", make_draft, markov)
