"""Programs of the NVIDIA package without tensor cores, as lowered, on the host against the reference (cuda_host)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer_core.kernels.conformance import test_conformance as conformance
from deepinfer_core.kernels.conformance.case import Case
from deepinfer_core.kernels.conformance.cases import all_cases
from deepinfer_core.kernels.conformance.subject import ConformanceSubject
from deepinfer_core.kernels.contract import SAMPLING_OPS
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.filters import RowFilters
from deepinfer_core.kernels.reference.philox import gumbel
from tests.kernels.cuda_host import HostPrograms

OPS = SAMPLING_OPS | {"engram_rows"}
CASES = [case for case in all_cases() if case.op in OPS]


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConformanceSubject]:
    """The package's functions, whose programs run on the host."""
    jit, ops = (import_module(f"deepinfer_kernels_nvidia.{name}") for name in ("jit", "ops"))
    programs = HostPrograms(tmp_path_factory.mktemp("cuda"))
    own = {op: ops.TABLE[op] for op in OPS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.Program, "__call__", lambda self, *parameters: programs.launch_of(self, parameters))
        yield ConformanceSubject(
            replace(REFERENCE, **own), frozenset(own), frozenset(), frozenset(), "cpu", "packed", torch.bfloat16
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.name}")
def test_the_lowered_source_equals_the_reference(case: Case, subject: ConformanceSubject) -> None:
    conformance.test_operation_equals_the_reference(case, 13, subject, torch.bfloat16)


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf")])
def test_a_row_that_cannot_be_drawn_from_stays_one_when_it_is_filtered(
    subject: ConformanceSubject, value: float
) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    logits[1, 30] = value
    filters = RowFilters(np.ones(2, np.float32), np.array([3, 3]), np.full(2, 0.5), np.zeros(2))
    token, failed = subject.table.draw_token(
        subject.table.filter_logits(logits, filters), torch.zeros(2, dtype=torch.int64), torch.arange(2), 0
    )
    assert failed.tolist() == [False, True]
    assert logits[0, token[0]] in logits[0].topk(3).values


def test_the_noise_that_picks_candidates_is_near_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words at both ends, around the change of formula, and all over; the fast logarithm of a GPU adds 1e-5 at most."""
    draw = import_module("deepinfer_kernels_nvidia.ops.draw")
    numpy = SimpleNamespace(
        float32=np.float32, cast=lambda value, dtype: np.asarray(value).astype(dtype), if_then_else=np.where
    )
    monkeypatch.setattr(numpy, "__log", np.log, raising=False)
    monkeypatch.setattr(draw, "T", numpy)
    edge = round((1 - draw._NEAR_ONE) * 2**32)
    around = [np.arange(low, low + 2000) for low in (0, edge - 1000, 2**32 - 2000)]
    words = np.concatenate([*around, np.arange(0, 2**32, 9973)]).astype(np.uint32)
    with np.errstate(divide="ignore"):  # of the formula that is not taken
        found = draw.nearly_gumbel(words)
    true = gumbel(torch.from_numpy(words.astype(np.int64))).numpy()
    assert np.abs(found - true).max() < 1e-5
