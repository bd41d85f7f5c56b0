"""The draft budget: optimal, monotone in its inputs, and not swayed by the drafts it decides on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.scheduling.budget import causal_lengths, choose_budget, fill_budget, survivals

SETTINGS = settings(max_examples=150, deadline=None)


def prefix_choices(caps: np.ndarray) -> itertools.product:
    return itertools.product(*[range(cap + 1) for cap in caps.tolist()])


def tokens_of(survival: np.ndarray, lengths: tuple[int, ...], samplers: int) -> float:
    return samplers + sum(float(survival[:length, r].sum()) for r, length in enumerate(lengths))


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    depth, requests = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    values = draw(
        st.lists(st.sampled_from([0.05, 0.3, 0.5, 0.5, 0.8, 1.0]), min_size=depth * requests, max_size=depth * requests)
    )
    confidences = np.array(values, np.float32).reshape(depth, requests)
    caps = np.array(draw(st.lists(st.integers(0, depth), min_size=requests, max_size=requests)), np.int64)
    steps = draw(
        st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]), min_size=depth * requests, max_size=depth * requests)
    )
    seconds = np.cumsum([1.0, *steps])
    return survivals(confidences, np.full(requests, depth)), caps, seconds


@SETTINGS
@given(cases())
def test_budget_and_filling_reach_the_exhaustive_optimum(case: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    survival, caps, seconds = case
    samplers = len(caps)
    lengths = fill_budget(choose_budget(survival, caps, seconds, samplers).num_drafts, survival, caps)
    rate = tokens_of(survival, tuple(lengths.tolist()), samplers) / seconds[int(lengths.sum())]
    best = max(tokens_of(survival, choice, samplers) / seconds[sum(choice)] for choice in prefix_choices(caps))
    assert rate == pytest.approx(best, rel=1e-6)
    promised = choose_budget(survival, caps, seconds, samplers).expected
    assert promised + samplers == pytest.approx(tokens_of(survival, tuple(lengths.tolist()), samplers), rel=1e-6)
    assert (lengths <= caps).all()


@SETTINGS
@given(cases(), st.integers(0, 16))
def test_filling_takes_the_largest_survivals_with_ties_by_position_then_request(
    case: tuple[np.ndarray, np.ndarray, np.ndarray], budget: int
) -> None:
    survival, caps, _ = case
    order = sorted(
        (-float(survival[j, r]), j, r) for r in range(len(caps)) for j in range(int(caps[r])) if survival[j, r] >= 1e-6
    )
    expected = np.zeros(len(caps), np.int64)
    for _, _, r in order[:budget]:
        expected[r] += 1
    assert fill_budget(budget, survival, caps).tolist() == expected.tolist()


@SETTINGS
@given(cases())
def test_the_causal_rule_admits_in_order_and_stops_at_the_first_loss(
    case: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    survival, caps, seconds = case
    lengths = causal_lengths(survival, caps, seconds, len(caps))
    budget = int(lengths.sum())
    assert lengths.tolist() == fill_budget(budget, survival, caps).tolist()
    rates = []
    for k in range(budget + 2):
        filled = fill_budget(k, survival, caps)
        if k < len(seconds) and filled.sum() == k:
            rates.append(tokens_of(survival, tuple(filled.tolist()), len(caps)) / seconds[k])
    assert all(later > earlier * (1 - 1e-6) for earlier, later in itertools.pairwise(rates[: budget + 1]))
    assert budget + 1 >= len(rates) or rates[budget + 1] <= rates[budget] * (1 + 1e-6)


def test_a_staircase_is_climbed_over_its_local_optima() -> None:
    # Steps are padded to 4 rows: the third draft is worth nothing alone but free once the step has grown.
    survival = np.array([[0.5], [0.45], [0.4], [0.35]], np.float32)
    seconds = np.array([1.0, 1.6, 1.6, 1.6, 1.6])
    assert choose_budget(survival, np.array([4]), seconds, 1).num_drafts == 4
    assert causal_lengths(survival, np.array([4]), seconds, 1).tolist() == [0]


# The DSpark paper's example: one request, two drafts, vocabulary {A, B}, steps a second 1, 0.5, 0.45,
# target (0.7, 0.3), drafter (0.5, 0.5). The first draft survives with 1 - TV = 0.8; the second is certain after A and
# hopeless after B.
PAPER_SECONDS = np.array([1.0, 1 / 0.5, 1 / 0.45])
TARGET, DRAFTER = np.array([0.7, 0.3]), np.array([0.5, 0.5])


def paper_survival(first_draft: int) -> np.ndarray:
    return survivals(np.array([[0.8], [1.0 if first_draft == 0 else 0.0]], np.float32), np.array([2]))


def first_token_distribution(length_after: list[int]) -> np.ndarray:
    """Of the first token under ratio verification, if `length_after[x]` drafts are verified when x is drafted."""
    output = np.zeros(2)
    for draft in range(2):
        if length_after[draft] == 0:
            output += DRAFTER[draft] * TARGET
            continue
        accept = min(1.0, TARGET[draft] / DRAFTER[draft])
        residual = np.maximum(TARGET - DRAFTER, 0.0)
        output[draft] += DRAFTER[draft] * accept
        output += DRAFTER[draft] * (1 - accept) * residual / residual.sum()
    return output


def test_a_search_over_current_confidences_biases_the_paper_example() -> None:
    lengths = [choose_budget(paper_survival(x), np.array([2]), PAPER_SECONDS, 1).num_drafts for x in range(2)]
    assert lengths == [2, 0]
    assert first_token_distribution(lengths) == pytest.approx([0.85, 0.15])


def test_the_causal_rule_keeps_the_target_distribution_in_the_paper_example() -> None:
    lengths = [int(causal_lengths(paper_survival(x), np.array([2]), PAPER_SECONDS, 1)[0]) for x in range(2)]
    assert first_token_distribution(lengths) == pytest.approx(TARGET)


@pytest.mark.parametrize("stale_draft", [0, 1])
def test_a_stale_budget_keeps_the_target_distribution_in_the_paper_example(stale_draft: int) -> None:
    budget = choose_budget(paper_survival(stale_draft), np.array([2]), PAPER_SECONDS, 1).num_drafts
    lengths = [int(fill_budget(budget, paper_survival(x), np.array([2]))[0]) for x in range(2)]
    # Whether the first draft is verified is decided by the stale block alone.
    assert min(lengths[0], 1) == min(lengths[1], 1)
    assert first_token_distribution([min(length, 1) for length in lengths]) == pytest.approx(TARGET)


def test_a_tie_between_a_draft_and_its_successor_goes_to_the_earlier_position() -> None:
    # The second request's first draft ties with the first request's second: position decides, so that a saturated
    # confidence of a successor cannot pull its own predecessor in.
    survival = np.array([[1.0, 1.0], [1.0, 0.2]], np.float32)
    assert fill_budget(2, survival, np.array([2, 2])).tolist() == [1, 1]


def test_broken_confidences_count_as_hopeless() -> None:
    survival = survivals(np.array([[np.nan, 2.0, 0.5], [0.5, 0.5, 0.5]], np.float32), np.array([2, 2, 1]))
    assert survival.tolist() == [[0.0, 1.0, 0.5], [0.0, 0.5, 0.0]]
    assert fill_budget(9, survival, np.array([2, 2, 2])).tolist() == [0, 2, 1]


def test_no_draft_is_chosen_when_the_step_has_no_room() -> None:
    survival = np.ones((3, 2), np.float32)
    assert choose_budget(survival, np.array([3, 3]), np.array([1.0]), 2).num_drafts == 0
    assert fill_budget(0, survival, np.array([3, 3])).tolist() == [0, 0]
