"""What moves the logits of a bfloat16 run: which rounding point, and how much the order of the sums alone. CPU only.

    python benchmarks/gpu/rounding.py --out rounding.json [--orders 8] [--models tiny,tiny-a]

The kernels of the NVIDIA package accumulate in float32 and round what they hand on. That is computed here on the CPU:
float32 tensors, each operation of the reference followed by a rounding of its result to bfloat16 (`POINTS` below).

all         every point, as the kernels have them; repeated with other orders of the products' sums (K permuted): all
            are valid runs of one definition, and what lies between them is chance
            .. same experts: with the router's choices of the float32 run (choices.py)
only X      one point alone              without X      every point but this one
bfloat16    the reference's own bfloat16 run, which has more points: logits of attention, both halves of the gated unit
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.choices import Choices, forcing, recording
from benchmarks.gpu.subjects import Agreement, Subject, subjects
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.cache_ops import KeyPlan
from deepinfer_core.kernels.reference.coded import CodedWeight, Weight, plain_weight, round_rows
from deepinfer_core.kernels.reference.mhc import next_of
from deepinfer_core.kernels.reference.records import COMPRESSED, WINDOW, read_rows

# Rounding points: name -> what is rounded to bfloat16.
POINTS = {
    "products": "results of linear, grouped_linear and both products of an expert",
    "activations": "an expert's activation between its two products",
    "norms": "results of rms_norm",
    "rope": "turned queries, keys and outputs",
    "probabilities": "exp(l - max) before it weighs the keys; their sum stays float32",
    "attention": "the result of attend",
    "sublayer inputs": "the collapsed streams",
    "sublayer outputs": "the sum over the experts",
    "streams": "the residual streams after each sublayer and Engram",
    "pooled": "a pooled pair of the compressor",
}
_ROWS_PER_PASS = 128  # bounds the gathered keys


def rounded(x: Tensor) -> Tensor:
    """The nearest bfloat16, as float32."""
    return x.bfloat16().float()


def rounding_table(points: Iterable[str], order: int = 0) -> Kernels:
    """The reference in float32 with roundings at `points`; order 0: sums as they come, else K permuted by that seed."""
    chosen = frozenset(points)
    if unknown := chosen - POINTS.keys():
        raise ValueError(f"no rounding points: {', '.join(sorted(unknown))}; there are {', '.join(POINTS)}")

    def at(point: str) -> Callable[[Tensor], Tensor]:
        return rounded if point in chosen else lambda x: x

    def linear(x: Tensor, weight: Weight) -> Tensor:
        """In another order of the sum over K."""
        if isinstance(weight, CodedWeight):
            x = round_rows(x)
        weight = plain_weight(weight, x.dtype)
        if order:
            turn = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(order))
            x, weight = x[:, turn], weight[turn]
        return REFERENCE.linear(x, weight)

    def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
        return torch.stack([linear(x[:, group], weight[group]) for group in range(len(weight))], 1)

    def attend(
        q: Tensor, window: Tensor, near: KeyPlan, entries: Tensor | None, far: KeyPlan | None, sink: Tensor
    ) -> Tensor:
        parts = range(0, len(q), _ROWS_PER_PASS)
        return torch.cat([_attend(q, window, near, entries, far, sink, slice(i, i + _ROWS_PER_PASS)) for i in parts])

    def _attend(
        q: Tensor, window: Tensor, near: KeyPlan, entries: Tensor | None, far: KeyPlan | None, sink: Tensor, part: slice
    ) -> Tensor:
        keys, bias = read_rows(window, near.rows[part], WINDOW, q.dtype), near.bias[part]
        if entries is not None and far is not None:
            keys = torch.cat([keys, read_rows(entries, far.rows[part], COMPRESSED, q.dtype)], 1)
            bias = torch.cat([bias, far.bias[part]], 1)
        logits = torch.bmm(q[part], keys.transpose(1, 2)) * q.shape[2] ** -0.5 + bias[:, None]  # [r, H, K]
        peak = torch.maximum(logits.amax(-1, keepdim=True), sink[:, None])
        weight = torch.exp(logits - peak)
        total = weight.sum(-1, keepdim=True) + torch.exp(sink[:, None] - peak)
        return at("attention")(torch.bmm(at("probabilities")(weight), keys) / total)

    def plan_experts(ids: Tensor, experts: int) -> tuple[Tensor, Any]:
        return ids, REFERENCE.plan_experts(ids, experts)

    def run_experts(
        x: Tensor, weights: Tensor, plan: tuple[Tensor, Any], w13: Weight, w2: Weight, limit: float
    ) -> Tensor:
        ids, tiles = plan
        experts, width, _ = w2.shape
        whole = torch.eye(width).expand(experts, -1, -1)  # a second product that changes nothing
        act = at("activations")(REFERENCE.run_experts(x, weights, tiles, w13, whole, limit))
        out = x.new_zeros(*ids.shape, x.shape[1])
        for expert in range(experts):
            mine = ids == expert
            out[mine] = linear(act[mine], _of_expert(w2, expert))
        return at("products")(out)

    def shared_expert(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
        act = at("activations")(REFERENCE.shared_expert(x, w13, torch.eye(w2.shape[0]), limit))
        return at("products")(linear(act, w2))

    def after(name: str, point: str) -> Callable[..., Tensor]:
        run, change = getattr(REFERENCE, name), at(point)
        return lambda *args, **named: change(run(*args, **named))

    collapse, expand = after("mhc_collapse", "sublayer inputs"), after("mhc_expand", "streams")
    norm = after("rms_norm", "norms")
    return replace(
        REFERENCE,
        linear=lambda x, weight: at("products")(linear(x, weight)),
        grouped_linear=lambda x, weight: at("products")(grouped_linear(x, weight)),
        rms_norm=norm,
        apply_rope=after("apply_rope", "rope"),
        attend=attend,
        plan_experts=plan_experts,
        run_experts=run_experts,
        shared_expert=shared_expert,
        combine_experts=after("combine_experts", "sublayer outputs"),
        mhc_collapse=collapse,
        mhc_expand=expand,
        mhc_next=next_of(expand, collapse, norm),
        engram_gate=after("engram_gate", "streams"),
        pool_pairs=after("pool_pairs", "pooled"),
        index_scores=lambda iq, weights, *rest: REFERENCE.index_scores(iq, at("products")(weights), *rest),
    )


def _of_expert(weight: Weight, expert: int) -> Weight:
    if isinstance(weight, CodedWeight):
        return CodedWeight(weight.codes[expert], weight.scale[expert], weight.dtype)
    return plain_weight(weight, weight.dtype)[expert]


def runs(orders: int, single_points: bool) -> Iterator[tuple[str, frozenset[str], int]]:
    """(name, rounding points, order of the sums) of every run."""
    everything = frozenset(POINTS)
    for order in range(orders):
        yield f"all, order {order}", everything, order
    yield "none, order 1", frozenset(), 1
    for point in POINTS if single_points else ():
        yield f"only {point}", frozenset((point,)), 0
        yield f"without {point}", everything - {point}, 0


def examine(subject: Subject, orders: int, single_points: bool) -> dict[str, dict[str, Any]]:
    """Agreement of every run with the reference in float32."""
    params, choices = subject.params(torch.float32), Choices()
    reference = subject.logits(params, recording(REFERENCE, choices))
    found: dict[str, dict[str, Any]] = {}

    def note(name: str, logits: Tensor) -> None:
        found[name] = asdict(Agreement.of(reference, logits))
        print(subject.name, name, json.dumps(found[name]), flush=True)

    note("bfloat16", subject.logits(subject.params(torch.bfloat16), REFERENCE))
    for name, points, order in runs(orders, single_points):
        note(name, subject.logits(params, rounding_table(points, order)))
    for order in range(orders):
        table = forcing(rounding_table(POINTS, order), choices, entries=False)
        note(f"all, same experts, order {order}", subject.logits(params, table))
    return found


def main() -> int:
    """Run it for the models that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--orders", type=int, default=8, help="orders of the sums with all points (8)")
    parser.add_argument("--models", default="", help="names of subjects, separated by commas; all when empty")
    parser.add_argument("--orders-only", action="store_true", help="leave out the runs of single points")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "models": {}}
    for subject in subjects(tuple(filter(None, arguments.models.split(",")))):
        report["models"][subject.name] = examine(subject, arguments.orders, not arguments.orders_only)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
