"""Filters and penalties on cases worked out by hand: ties, borders, order, and independence of rows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.kernels.reference.filters import RowFilters, filter_logits
from deepinfer_core.sampling import processors
from tests.core.sampling import oracle

INF = float("inf")


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


def keep_top_k(logits: torch.Tensor, *k: int) -> list[list[int]]:
    return kept(processors.keep_top_k(logits, torch.tensor(k), max(k)))


def keep_top_p(logits: torch.Tensor, *p: float) -> list[list[int]]:
    return kept(processors.keep_top_p(logits, torch.tensor(p, dtype=torch.float64)))


def test_rows_that_ask_for_nothing_are_not_copied() -> None:
    logits, ones = torch.randn(2, 9), np.ones(2, np.float32)
    nothing = RowFilters(ones, np.zeros(2, np.int64), np.ones(2), np.zeros(2))
    assert filter_logits(logits, nothing) is logits
    warmer = filter_logits(logits, dataclasses.replace(nothing, temperature=2 * ones))
    assert torch.equal(warmer, logits / 2)


def test_top_k_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 3.0, 2.0]])
    assert keep_top_k(logits, 1) == [[1]]
    assert keep_top_k(logits, 3) == [[1, 2, 4]]
    assert keep_top_k(logits, 4) == [[1, 2, 3, 4]]


def test_top_k_rows_have_their_own_k() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0], [5.0, -INF, 4.0]])
    assert keep_top_k(logits, 1, 2, 3) == [[2], [0, 1], [0, 2]]


def test_top_p_keeps_the_token_that_crosses_the_border() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert keep_top_p(logits, 0.4) == [[0]]
    assert keep_top_p(logits, 0.51) == [[0, 1]]
    assert keep_top_p(logits, 0.8) == [[0, 1, 2]]


def test_top_p_ends_where_the_sum_is_reached_exactly() -> None:
    # Equal logits: every weight is exactly 1, the sums are whole numbers.
    assert keep_top_p(torch.zeros(1, 8), 0.5) == [[0, 1, 2, 3]]
    assert keep_top_p(torch.zeros(1, 8), 0.5 + 1e-12) == [[0, 1, 2, 3, 4]]


def test_top_p_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]])
    p = math.e / (2 * math.e + 3)
    assert keep_top_p(logits, p - 1e-6) == [[1]]
    assert keep_top_p(logits, p + 1e-6) == [[1, 3]]
    assert keep_top_p(logits, 2 * p + 1e-6) == [[0, 1, 3]]


def test_a_tiny_top_p_keeps_the_first_of_the_largest() -> None:
    assert keep_top_p(torch.tensor([[1.0, 2.0, 2.0]]), 1e-12) == [[1]]


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
def test_top_p_agrees_with_the_definition_on_large_vocabularies_with_many_ties(spread: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(4, 3_000) * spread).round(decimals=2)  # many ties
    got = keep_top_p(logits, 0.01, 0.3, 0.9, 0.999)
    for row, top_p in enumerate((0.01, 0.3, 0.9, 0.999)):
        expected = oracle.filtered(logits[row].numpy(), SamplingParams(top_p=top_p))
        assert got[row] == np.flatnonzero(np.isfinite(expected)).tolist()


def test_min_p_is_relative_to_the_largest_and_keeps_the_border() -> None:
    logits = torch.tensor([[0.0, math.log(0.5), math.log(0.25), -INF]], dtype=torch.float64).float()
    assert kept(processors.keep_min_p(logits, torch.tensor([0.3], dtype=torch.float64))) == [[0, 1]]
    assert kept(processors.keep_min_p(torch.zeros(1, 3), torch.tensor([1.0], dtype=torch.float64))) == [[0, 1, 2]]


def test_penalties_divide_positive_and_multiply_negative_logits() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0]])
    seen = torch.tensor([[True, True, False, False, False]])
    count = torch.tensor([[0, 0, 3, 0, 0]], dtype=torch.int32)
    args = [torch.tensor([x]) for x in (2.0, 0.5, 0.25)]
    got = processors.apply_penalties(logits, seen, count, *args)
    assert got.tolist() == [[1.0, -4.0, 1.0 - 0.5 - 0.75, -2.0, 0.0]]


def test_penalties_leave_masked_entries_masked() -> None:
    args = [torch.tensor([x]) for x in (0.5, -2.0, -2.0)]
    count = torch.ones(1, 2, dtype=torch.int32)
    got = processors.apply_penalties(torch.tensor([[-INF, 1.0]]), torch.ones(1, 2) > 0, count, *args)
    assert got.tolist() == [[-INF, 2.0 + 4.0]]


def test_grammar_bits_allow_exactly_their_ids() -> None:
    logits = torch.zeros(2, 70)
    words = np.array([[0b101, 1 << 31, 0b100000]], np.uint32)
    processors.apply_bit_masks(logits, torch.tensor([1]), torch.from_numpy(words.view(np.int32)))
    assert kept(logits) == [list(range(70)), [0, 2, 63, 69]]


@pytest.mark.parametrize("num_ids", [37, 3_072])
def test_a_row_is_filtered_as_if_it_were_alone(num_ids: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(9, num_ids) * 3
    k = torch.randint(1, 30, (9,))
    p = torch.rand(9, dtype=torch.float64).clamp(min=0.01)
    together = (
        processors.keep_top_k(logits, k, 30),
        processors.keep_top_p(logits, p),
        processors.keep_min_p(logits, p / 10),
    )
    for row in range(9):
        one = slice(row, row + 1)
        alone = (
            processors.keep_top_k(logits[one], k[one], int(k[row])),
            processors.keep_top_p(logits[one], p[one]),
            processors.keep_min_p(logits[one], p[one] / 10),
        )
        assert all(torch.equal(a[0], t[row]) for a, t in zip(alone, together, strict=True))
