"""Logits of a bfloat16 run beside those of float32: what rounding moves, and what an expert chosen by a hair's breadth.

On the CPU with the reference; with a CUDA device with our kernels, too. benchmarks/gpu/logits.py reports more of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.choices import Choices, forcing, recording
from benchmarks.gpu.rounding import POINTS, rounding_table
from benchmarks.gpu.subjects import Agreement, Subject, lost_positions, subjects
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.registry import build_kernels, choose_provider

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ACCELERATORS = ["cpu", pytest.param("nvidia", marks=NEEDS_GPU)]


@dataclass(frozen=True)
class Known:
    """One model, its float32 logits, and the choices behind them."""

    subject: Subject
    reference: Tensor  # [R, V]
    choices: Choices

    def bfloat16(self, accelerator: str, *, same_experts: bool, entries: bool = False) -> Tensor:
        choice = choose_provider(accelerator)
        kernels, _ = build_kernels(choice, self.subject.config, torch.bfloat16)
        form = "plain" if choice.provider is None else choice.provider.cache_form
        table = forcing(kernels, self.choices, entries=entries) if same_experts else kernels
        return self.subject.logits(self.subject.params(torch.bfloat16, choice.device), table, form)


@pytest.fixture(scope="module", params=["tiny-a", pytest.param("tiny", marks=NEEDS_GPU)])
def known(request: pytest.FixtureRequest) -> Known:
    subject, choices = next(subjects((request.param,))), Choices()
    reference = subject.logits(subject.params(torch.float32), recording(REFERENCE, choices))
    return Known(subject, reference, choices)


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_with_the_experts_of_the_reference_every_clear_argmax_is_its_own(known: Known, accelerator: str) -> None:
    run = Agreement.of(known.reference, known.bfloat16(accelerator, same_experts=True))
    assert run.clear > 200
    assert run.other_argmax == 0
    assert 0 < run.median < 0.1


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_choices_move_the_logits_more_than_rounding_does(known: Known, accelerator: str) -> None:
    free = Agreement.of(known.reference, known.bfloat16(accelerator, same_experts=False))
    forced = Agreement.of(known.reference, known.bfloat16(accelerator, same_experts=True, entries=True))
    assert forced.median < 0.7 * free.median


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_bfloat16_run_is_as_near_as_the_reference_with_the_same_rounding_points(
    known: Known, accelerator: str
) -> None:
    exact = known.subject.params(torch.float32)
    orders = [known.subject.logits(exact, rounding_table(POINTS, order)) for order in range(2)]
    run = known.bfloat16(accelerator, same_experts=False)
    # The order of the sums alone moves the median by 1 to 2 %.
    assert Agreement.of(known.reference, run).median <= 1.03 * max(
        Agreement.of(known.reference, o).median for o in orders
    )
    lost_by_some = torch.stack([lost_positions(known.reference, order) for order in orders]).any(0)
    assert int((lost_positions(known.reference, run) & ~lost_by_some).sum()) <= 1


def test_without_roundings_the_order_of_the_sums_loses_no_clear_argmax(known: Known) -> None:
    exact = known.subject.params(torch.float32)
    run = Agreement.of(known.reference, known.subject.logits(exact, rounding_table((), 1)))
    assert run.other_argmax == 0
    assert run.median < 1e-3


def test_a_rounding_point_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no rounding points: sums"):
        rounding_table(("sums",))
