"""The provider that a conformance run is about, and a case's inputs as that provider takes them.

An operation is the provider's own where it offers one and takes the released model's shapes in the dtype of the run;
with an engine the same operations would run. The rest comes from the reference and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources

import torch
from torch import Tensor

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.conformance.cases import CacheContent, Case, Inputs
from deepinfer_core.kernels.contract import CODED_OPS, OPS, Capability, Kernels, TakesPacked
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.coded import Weight
from deepinfer_core.kernels.reference.packed import PackedWeight
from deepinfer_core.kernels.registry import native_status, provider_statuses

__all__ = ["ConformanceSubject", "find_subject", "make_inputs", "with_weights"]

# What the model keeps in float32 whatever its compute dtype: mHC, bias of the router, sinks, rope tables, scores,
# confidence head.
_ALWAYS_FLOAT32 = frozenset(
    ("fn", "base", "scale", "pre", "post", "c", "bias", "weights", "sink", "table", "confidence", "scores")
)


@dataclass(frozen=True)
class ConformanceSubject:
    """A provider's table, the operations that are its own, those that take coded and packed weights, and where it
    computes. What is packed is arranged on the way to the table.
    """

    table: Kernels
    own: frozenset[str]
    coded: frozenset[str]
    packed: frozenset[str]
    device: str
    cache_form: str
    dtype: torch.dtype

    def skips(self, case: Case) -> str | None:
        """Why a case is not this provider's; None where it is."""
        if case.op not in self.own:
            return f"{case.op} comes from the reference in {str(self.dtype).removeprefix('torch.')}"
        if case.coded and case.op not in self.coded:
            return f"{case.op} takes no coded weights here"
        if case.packed and case.op not in self.packed:
            return f"{case.op} takes no packed weights here"
        return None


def find_subject(name: str, dtype: torch.dtype | None) -> ConformanceSubject:
    """The provider of that entry point, or `reference`. dtype None: float32 on a CPU, else bfloat16. Raises KernelError
    where it is not installed or cannot run here.
    """
    if name == "reference":
        every = frozenset(OPS)
        return ConformanceSubject(REFERENCE, every, CODED_OPS, CODED_OPS, "cpu", "plain", dtype or torch.float32)
    found = {status.name: status for status in [*provider_statuses(), native_status()]}
    if name not in found:
        raise KernelError(f"provider {name!r} is not installed; installed: {', '.join(found) or 'none'}")
    provider, ability = found[name].provider, found[name].result
    if provider is None or not isinstance(ability, Capability):
        raise KernelError(f"provider {name} cannot run here: {ability}")
    dtype = dtype or (torch.float32 if ability.device == "cpu" else torch.bfloat16)
    config = ModelConfig.from_dict(
        json.loads(resources.files("deepinfer_core.config").joinpath("release.json").read_text(encoding="utf-8"))
    )
    offered = provider.load()
    own = frozenset(op for op in offered if provider.unsupported(op, config, dtype) is None)
    # An engine takes coded or packed weights for all of its products or for none.
    coded = provider.coded_ops if provider.coded_ops <= own else frozenset[str]()
    table, packed = replace(REFERENCE, **{op: offered[op] for op in own}), frozenset[str]()
    if isinstance(provider, TakesPacked) and provider.packed_ops <= own:
        table, packed = with_weights(table, provider.arranged), provider.packed_ops
    return ConformanceSubject(table, own, coded, packed, ability.device, provider.cache_form, dtype)


def with_weights(table: Kernels, prepare: Callable[[PackedWeight, bool], Weight]) -> Kernels:
    """`table`, whose packed weights go through `prepare(weight, halves)` first."""

    def made(weight: Weight, halves: bool = False) -> Weight:
        return prepare(weight, halves) if isinstance(weight, PackedWeight) else weight

    return replace(
        table,
        linear=lambda x, weight: table.linear(x, made(weight)),
        run_experts=lambda x, weights, plan, w13, w2, limit: table.run_experts(
            x, weights, plan, made(w13, True), made(w2), limit
        ),
        shared_expert=lambda x, w13, w2, limit: table.shared_expert(x, made(w13, True), made(w2), limit),
    )


def make_inputs(case: Case, rows: int, device: str, cache_form: str, dtype: torch.dtype) -> tuple[Inputs, Inputs]:
    """Row inputs and shared ones of a case, the same in every run."""
    generator = torch.Generator().manual_seed(len(case.name) * 1009 + rows)
    row_inputs, shared = case.make(rows, generator)
    return _placed(row_inputs, device, cache_form, dtype), _placed(shared, device, cache_form, dtype)


def _placed(inputs: Inputs, device: str, cache_form: str, dtype: torch.dtype) -> Inputs:
    def place(value: object) -> object:
        if isinstance(value, CacheContent):
            return value.stored(cache_form, dtype, device)
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.dtype == torch.float32 else value.dtype)

    kept = {name: value.to(device) for name, value in inputs.items() if name in _ALWAYS_FLOAT32}
    return {name: place(value) for name, value in inputs.items()} | kept
