"""Every top-k: value descending, then lower index; invisible entries never enter; padding changes nothing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.kernels.reference.indexer import candidate_blocks
from deepinfer_core.kernels.reference.topk import top_k, top_k_set

INF = float("inf")
scores = st.lists(st.sampled_from([-INF, -3.5, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 7.0, INF]), min_size=1, max_size=40)


def by_definition(row: list[float], k: int) -> list[int]:
    order = sorted((i for i, x in enumerate(row) if x > -INF), key=lambda i: (-row[i], i))
    return order[:k] + [-1] * (k - len(order[:k]))


@given(row=scores, k=st.integers(1, 45))
def test_order_is_value_then_index(row: list[float], k: int) -> None:
    assert top_k(torch.tensor([row]), k)[0].tolist() == by_definition(row, k)


@given(row=scores, k=st.integers(1, 20), padding=st.integers(0, 50))
def test_padding_changes_nothing(row: list[float], k: int, padding: int) -> None:
    padded = torch.tensor([row + [-INF] * padding])
    assert torch.equal(top_k(padded, k), top_k(torch.tensor([row]), k))


@given(row=scores, k=st.integers(1, 20))
def test_a_set_ascends_with_the_missing_last(row: list[float], k: int) -> None:
    chosen = sorted(i for i in by_definition(row, k) if i >= 0)
    assert top_k_set(torch.tensor([row]), k)[0].tolist() == chosen + [-1] * (k - len(chosen))


def test_negative_zero_ties_with_zero() -> None:
    assert top_k(torch.tensor([[-0.0, 0.0]]), 1)[0].tolist() == [0]


def test_nothing_visible_selects_no_candidate_block() -> None:
    assert not candidate_blocks(torch.full((1, 9), -INF), torch.tensor([0]), 4, 2).any()


def test_the_newest_block_is_forced_and_counts() -> None:
    row = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, -9.0, -INF, -INF]])
    chosen = candidate_blocks(row, torch.tensor([6]), 2, 2)
    assert chosen[0].tolist() == [True, False, True, False]
