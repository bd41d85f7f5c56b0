"""Every operation of the chosen provider against the reference; see the package docstring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.conformance.cases import Case, Inputs, all_cases
from deepinfer_core.kernels.conformance.subject import ConformanceSubject, find_subject, make_inputs, with_weights
from deepinfer_core.kernels.contract import CODED_RMS, OPS
from deepinfer_core.kernels.reference import REFERENCE

_CASES = list(all_cases())
_ROW_COUNTS = (1, 13, 40)


@pytest.fixture(scope="session")
def provider_name(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--provider"))


@pytest.fixture(scope="session")
def provider(request: pytest.FixtureRequest, provider_name: str) -> ConformanceSubject:
    """The provider under test; where there is none the session ends: each of some hundred cases would say the same."""
    named = request.config.getoption("--provider-dtype")
    dtype = None if named is None else {"float32": torch.float32, "bfloat16": torch.bfloat16}[named]
    try:
        return find_subject(provider_name, dtype)
    except KernelError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture(scope="session")
def dtype(provider: ConformanceSubject) -> torch.dtype:
    return provider.dtype


def test_every_operation_has_a_case() -> None:
    assert {case.op for case in _CASES} == set(OPS)


@pytest.mark.parametrize("rows", _ROW_COUNTS)
@pytest.mark.parametrize("case", _CASES, ids=lambda case: f"{case.op}-{case.name}")
def test_operation_equals_the_reference(
    case: Case, rows: int, provider: ConformanceSubject, dtype: torch.dtype
) -> None:
    if (reason := provider.skips(case)) is not None:
        pytest.skip(reason)
    row_inputs, shared = make_inputs(case, rows, provider.device, provider.cache_form, dtype)
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
def test_a_row_does_not_depend_on_the_other_rows(case: Case, provider: ConformanceSubject, dtype: torch.dtype) -> None:
    if (reason := provider.skips(case)) is not None:
        pytest.skip(reason)
    if not OPS[case.op].row_invariant:
        pytest.skip(f"{case.op} promises nothing about the other rows")
    rows = 48
    row_inputs, shared = make_inputs(case, rows, provider.device, provider.cache_form, dtype)
    together = case.run(provider.table, row_inputs, shared)
    for start, count in ((0, 1), (5, 1), (0, 3), (7, 8), (16, 17), (1, 40)):
        part = {name: value[start : start + count].clone() for name, value in row_inputs.items()}
        for got, want in zip(case.run(provider.table, part, shared), together, strict=True):
            assert torch.equal(got, want[start : start + count]), (
                f"rows {start}..{start + count - 1} changed with their company"
            )


@pytest.mark.parametrize("rows", _ROW_COUNTS)
@pytest.mark.parametrize("case", [case for case in _CASES if case.packed], ids=lambda case: f"{case.op}-{case.name}")
def test_packed_weights_give_the_bits_of_decoded_ones(
    case: Case, rows: int, provider: ConformanceSubject, dtype: torch.dtype
) -> None:
    if (reason := provider.skips(case)) is not None:
        pytest.skip(reason)
    inputs = make_inputs(case, rows, provider.device, provider.cache_form, dtype)
    decoded = with_weights(provider.table, lambda weight, halves: weight.decoded(weight.dtype))
    for got, want in zip(case.run(provider.table, *inputs), case.run(decoded, *inputs), strict=True):
        assert torch.equal(got, want)


def _in_float32(inputs: Inputs) -> Inputs:
    return {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
