"""The provider that a conformance run is about, and a case's inputs as that provider takes them.

An operation is the provider's own where it offers one and takes the released model's shapes in the dtype of the run;
with an engine the same operations would run. The rest comes from the reference and is left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import resources

import torch
from torch import Tensor

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.conformance.cases import CacheContent, Case, Inputs
from deepinfer_core.kernels.contract import CODED_OPS, OPS, Capability, Kernels
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.registry import native_status, provider_statuses

__all__ = ["ConformanceSubject", "find_subject", "make_inputs"]

# What the model keeps in float32 whatever its compute dtype: mHC, bias of the router, sinks, rope tables, scores,
# confidence head.
_ALWAYS_FLOAT32 = frozenset(
    ("fn", "base", "scale", "pre", "post", "c", "bias", "weights", "sink", "table", "confidence", "scores")
)


@dataclass(frozen=True)
class ConformanceSubject:
    """A provider's table, the operations that are its own, those that take coded weights, and where it computes."""

    table: Kernels
    own: frozenset[str]
    coded: frozenset[str]
    device: str
    cache_form: str
    dtype: torch.dtype

    def skips(self, case: Case) -> str | None:
        """Why a case is not this provider's; None where it is."""
        if case.op not in self.own:
            return f"{case.op} comes from the reference in {str(self.dtype).removeprefix('torch.')}"
        if case.coded and case.op not in self.coded:
            return f"{case.op} takes no coded weights here"
        return None


def find_subject(name: str, dtype: torch.dtype | None) -> ConformanceSubject:
    """The provider of that entry point, or `reference`. dtype None: float32 on a CPU, else bfloat16. Raises KernelError
    where it is not installed or cannot run here.
    """
    if name == "reference":
        return ConformanceSubject(REFERENCE, frozenset(OPS), CODED_OPS, "cpu", "plain", dtype or torch.float32)
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
    # An engine takes coded weights for all of its products or for none.
    coded = provider.coded_ops if provider.coded_ops <= own else frozenset[str]()
    table = replace(REFERENCE, **{op: offered[op] for op in own})
    return ConformanceSubject(table, own, coded, ability.device, provider.cache_form, dtype)


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
