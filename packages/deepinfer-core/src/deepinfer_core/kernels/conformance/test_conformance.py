"""Every operation of the chosen provider against the reference; see the package docstring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from deepinfer_core.kernels.conformance.cases import CacheContent, Case, Inputs, all_cases
from deepinfer_core.kernels.contract import CODED_OPS, CODED_RMS, OPS, Capability, Kernels
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.registry import native_status, provider_statuses


@dataclass(frozen=True)
class _Provider:
    table: Kernels
    own: frozenset[str]
    coded: frozenset[str]
    device: str
    cache_form: str


_CASES = list(all_cases())
_ROW_COUNTS = (1, 13, 40)
# What the model keeps in float32 whatever its compute dtype: mHC, router, sinks, rope tables, scores, confidence head.
_ALWAYS_FLOAT32 = frozenset(
    ("fn", "base", "scale", "pre", "post", "c", "gate", "bias", "weights", "sink", "table", "confidence", "scores")
)


@pytest.fixture(scope="session")
def provider_name(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--provider"))


@pytest.fixture(scope="session")
def provider(provider_name: str) -> _Provider:
    """The provider's table, the operations that are its own, its device and cache form."""
    if provider_name == "reference":
        return _Provider(REFERENCE, frozenset(OPS), CODED_OPS, "cpu", "plain")
    found = {status.name: status for status in [*provider_statuses(), native_status()]}
    if provider_name not in found:
        _give_up(f"provider {provider_name!r} is not installed; installed: {', '.join(found) or 'none'}")
    status = found[provider_name]
    if status.provider is None or not isinstance(status.result, Capability):
        _give_up(f"provider {provider_name} cannot run here: {status.result}")
    own = status.provider.load()
    table, plugin = replace(REFERENCE, **own), status.provider
    return _Provider(table, frozenset(own), plugin.coded_ops, status.result.device, plugin.cache_form)


def _give_up(reason: str) -> NoReturn:
    """End the session: otherwise each of some hundred cases would say the same."""
    pytest.exit(reason, returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture(scope="session")
def dtype(request: pytest.FixtureRequest, provider: _Provider) -> torch.dtype:
    named = request.config.getoption("--provider-dtype")
    default = torch.float32 if provider.device == "cpu" else torch.bfloat16
    return default if named is None else {"float32": torch.float32, "bfloat16": torch.bfloat16}[named]


def test_every_operation_has_a_case() -> None:
    assert {case.op for case in _CASES} == set(OPS)


@pytest.mark.parametrize("rows", _ROW_COUNTS)
@pytest.mark.parametrize("case", _CASES, ids=lambda case: f"{case.op}-{case.name}")
def test_operation_equals_the_reference(case: Case, rows: int, provider: _Provider, dtype: torch.dtype) -> None:
    if case.op not in provider.own:
        pytest.skip(f"{case.op} comes from the reference")
    if case.coded and case.op not in provider.coded:
        pytest.skip(f"{case.op} takes no coded weights here")
    row_inputs, shared = _inputs(case, rows, provider, dtype)
    contract = OPS[case.op]
    exact = contract.exact and not case.op.startswith("plan_")  # a plan is seen through the operation that takes it
    # Where rounding is free, the oracle computes in float32 on the same, already rounded inputs.
    oracle_inputs = (row_inputs, shared) if exact else (_in_float32(row_inputs), _in_float32(shared))
    expected = case.run(REFERENCE, *oracle_inputs)
    actual = case.run(provider.table, row_inputs, shared)
    tolerance = contract.float32_tolerance if dtype == torch.float32 else contract.bfloat16_tolerance
    if case.coded:
        tolerance = contract.coded_tolerance
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        if exact:
            assert torch.equal(got, want), f"{case.op} must be exact"
            continue
        assert torch.equal(got.isinf(), want.isinf())
        finite = want.isfinite()
        error = (got.float() - want.float()).abs()[finite]
        allowed = tolerance * (1.0 + want.float().abs()[finite])
        if case.coded:
            rms = float((error / (1.0 + want.float().abs()[finite])).square().mean().sqrt())
            assert rms <= CODED_RMS, f"root mean square of the errors is {rms:.3g}"
        wrong = int((error > allowed).sum())
        assert wrong <= 0.001 * error.numel(), (
            f"{wrong} of {error.numel()} elements, largest error {error.max().item():.3g}"
        )


@pytest.mark.parametrize("case", [case for case in _CASES if case.by_row], ids=lambda case: f"{case.op}-{case.name}")
def test_a_row_does_not_depend_on_the_other_rows(case: Case, provider: _Provider, dtype: torch.dtype) -> None:
    if case.op not in (provider.coded if case.coded else provider.own) or not OPS[case.op].row_invariant:
        pytest.skip(f"{case.op} is not promised by this provider")
    rows = 48
    row_inputs, shared = _inputs(case, rows, provider, dtype)
    together = case.run(provider.table, row_inputs, shared)
    for start, count in ((0, 1), (5, 1), (0, 3), (7, 8), (16, 17), (1, 40)):
        part = {name: value[start : start + count].clone() for name, value in row_inputs.items()}
        for got, want in zip(case.run(provider.table, part, shared), together, strict=True):
            assert torch.equal(got, want[start : start + count]), (
                f"rows {start}..{start + count - 1} changed with their company"
            )


def _inputs(case: Case, rows: int, provider: _Provider, dtype: torch.dtype) -> tuple[Inputs, Inputs]:
    generator = torch.Generator().manual_seed(len(case.name) * 1009 + rows)
    row_inputs, shared = case.make(rows, generator)
    return _move(row_inputs, provider, dtype), _move(shared, provider, dtype)


def _in_float32(inputs: Inputs) -> Inputs:
    return {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def _move(inputs: Inputs, provider: _Provider, dtype: torch.dtype) -> Inputs:
    def move(value: object) -> object:
        if isinstance(value, CacheContent):
            return value.stored(provider.cache_form, dtype, provider.device)
        if not isinstance(value, Tensor):
            return value
        return value.to(provider.device, dtype if value.dtype == torch.float32 else value.dtype)

    kept = {name: value.to(provider.device) for name, value in inputs.items() if name in _ALWAYS_FLOAT32}
    return {name: move(value) for name, value in inputs.items()} | kept
