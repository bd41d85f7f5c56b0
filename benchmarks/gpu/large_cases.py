"""Cases for the operations at sizes that the conformance suite, which also runs on CPUs, is too small for.

rows of ids     the release's 129,280: sixteen blocks of threads a row for the draw, 32 steps for filters
rows of scores  more than a block's shared memory holds, with and without ties: bound, gathering, every digit
runs of keys    several blocks of threads a row, ratio 1 and 2, blocks that rows share and blocks of their own
products        more than one tile of every dimension, and a last one that is not full
experts         some with several tiles of rows, one with none
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from deepinfer_core.kernels.conformance.case import CacheContent, Case, Inputs
from deepinfer_core.kernels.conformance.sampling_cases import sampling_cases
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference.coded import code_columns
from deepinfer_core.kernels.reference.packed import FP4_ROWS, FP8_ROWS, pack_columns
from deepinfer_core.kernels.reference.records import INDEX
from deepinfer_core.kernels.reference.rounding import round_index

__all__ = ["large_cases"]

_IDS = 129_280
_CANDIDATE_BLOCK = 8


def large_cases() -> Iterator[Case]:
    """Every case."""
    yield from (case for case in sampling_cases((_IDS,)) if case.op != "accept_drafts")
    yield from chain(_selection(), _indexer(), _products(), _experts())


def _selection() -> Iterator[Case]:
    for num_scores, k, steps in ((20_001, 512, 4), (70_000, 512, 4), (70_000, 2048, 1 << 20)):

        def make(
            rows: int, g: torch.Generator, num_scores: int = num_scores, steps: int = steps
        ) -> tuple[Inputs, Inputs]:
            visible = torch.randint(0, num_scores + 1, (rows,), generator=g)
            visible[-1] = num_scores
            scores = torch.round(torch.randn(rows, num_scores, generator=g) * steps) / steps
            hidden = torch.arange(num_scores) >= visible[:, None]
            return {"scores": scores.masked_fill(hidden, float("-inf")), "visible": visible}, {}

        def select(o: Kernels, r: Inputs, s: Inputs, k: int = k) -> tuple[torch.Tensor, ...]:
            return (o.select_entries(r["scores"], k),)

        def mark(o: Kernels, r: Inputs, s: Inputs, k: int = k) -> tuple[torch.Tensor, ...]:
            return (o.candidate_blocks(r["scores"], r["visible"], _CANDIDATE_BLOCK, k),)

        yield Case("select_entries", f"{k} of {num_scores}, {steps} steps", make, select)
        yield Case("candidate_blocks", f"{k} of {num_scores}, {steps} steps", make, mark)


def _indexer() -> Iterator[Case]:
    heads, dim, num_blocks = 32, 128, 40
    for per_block, alike in ((128, 4), (128, 1), (64, 4)):

        def make(
            rows: int, g: torch.Generator, per_block: int = per_block, alike: int = alike
        ) -> tuple[Inputs, Inputs]:
            visible = torch.randint(0, num_blocks * per_block + 1, (rows,), generator=g)
            visible[0] = 0
            blocks = torch.randint(0, 3 * num_blocks, (-(-rows // alike), num_blocks), generator=g)
            marks = torch.rand(rows, num_blocks * per_block // _CANDIDATE_BLOCK, generator=g) < 0.2
            row = {
                "iq": round_index(torch.randn(rows, heads, dim, generator=g)),
                "w": torch.randn(rows, heads, generator=g),
                "blocks": blocks.repeat_interleave(alike, 0)[:rows],
                "visible": visible,
                "candidates": marks,
            }
            return row, {"cache": CacheContent(torch.randn(3 * num_blocks * per_block, dim, generator=g), INDEX)}

        def score(o: Kernels, r: Inputs, s: Inputs, per_block: int = per_block) -> tuple[torch.Tensor, ...]:
            plan = o.plan_index(r["blocks"], per_block, r["visible"])
            free = o.index_scores(r["iq"], r["w"], s["cache"], plan, None, _CANDIDATE_BLOCK)
            return free, o.index_scores(r["iq"], r["w"], s["cache"], plan, r["candidates"], _CANDIDATE_BLOCK)

        yield Case("index_scores", f"{num_blocks} blocks of {per_block}, {alike} rows alike", make, score)


def _products() -> Iterator[Case]:
    for k, n in ((5120, 1000), (1280, 4128)):

        def make(rows: int, g: torch.Generator, k: int = k, n: int = n) -> tuple[Inputs, Inputs]:
            return {"x": torch.randn(rows, k, generator=g)}, {"w": torch.randn(k, n, generator=g) * k**-0.5}

        def coded(o: Kernels, r: Inputs, s: Inputs) -> tuple[torch.Tensor, ...]:
            return (o.linear(r["x"], code_columns(s["w"])),)

        def packed(o: Kernels, r: Inputs, s: Inputs) -> tuple[torch.Tensor, ...]:
            return (o.linear(r["x"], pack_columns(s["w"], FP8_ROWS)),)

        yield Case("linear", f"{k}x{n}", make, lambda o, r, s: (o.linear(r["x"], s["w"]),))
        yield Case("linear", f"{k}x{n}-coded", make, coded, coded=True)
        yield Case("linear", f"{k}x{n}-packed", make, packed, packed=True)
        yield Case("head_logits", f"{k}x{n}", make, lambda o, r, s: (o.head_logits(r["x"], s["w"]),))


def _experts() -> Iterator[Case]:
    dim, width, experts, chosen = 1280, 640, 24, 6

    def make(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        likely = torch.rand(rows, experts, generator=g) + torch.linspace(0.9, 0.0, experts)
        likely[:, -1] = -1.0  # nobody's
        row = {
            "x": torch.randn(rows, dim, generator=g),
            "ids": likely.topk(chosen, 1).indices.sort(1).values,
            "weights": torch.rand(rows, chosen, generator=g),
        }
        w13 = torch.randn(experts, dim, 2 * width, generator=g) * dim**-0.5
        return row, {"w13": w13, "w2": torch.randn(experts, width, dim, generator=g) * width**-0.5}

    forms: dict[str, Callable[[torch.Tensor], Any]] = {
        "": lambda weight: weight,
        "-coded": code_columns,
        "-packed": lambda weight: pack_columns(weight, FP4_ROWS),
    }
    for form, stored in forms.items():

        def run(
            o: Kernels, r: Inputs, s: Inputs, stored: Callable[[torch.Tensor], Any] = stored
        ) -> tuple[torch.Tensor, ...]:
            plan, w13, w2 = o.plan_experts(r["ids"], experts), stored(s["w13"]), stored(s["w2"])
            return (o.run_experts(r["x"], r["weights"], plan, w13, w2, 1.5),)

        name = f"{dim}x{width}-{chosen}/{experts}{form}"
        yield Case("run_experts", name, make, run, coded=form == "-coded", packed=form == "-packed")
