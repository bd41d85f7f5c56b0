"""Reported log-probabilities: values, ranks, ties, raw against processed."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.sampling import prompt_logprobs
from deepinfer_core.sampling.logprobs import token_logprobs
from tests.core.sampling.helpers import make_sampler, single_rows

QUARTERS = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).log()


def test_values_and_ranks_of_a_known_distribution() -> None:
    (entry,) = token_logprobs(QUARTERS + 7, torch.tensor([2]), 2).on_host([2])
    assert (entry.token_id, entry.rank) == (2, 3)
    assert entry.logprob == pytest.approx(math.log(0.125), abs=1e-6)
    assert [token for token, _ in entry.top] == [1, 0]
    assert [value for _, value in entry.top] == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-6)


def test_ties_in_the_top_list_and_in_ranks_go_to_the_lower_id() -> None:
    logits = torch.zeros(5, 5)
    entries = token_logprobs(logits, torch.arange(5), 3).on_host([3] * 5)
    assert [entry.rank for entry in entries] == [1, 2, 3, 4, 5]
    assert all([token for token, _ in entry.top] == [0, 1, 2] for entry in entries)


def test_more_top_entries_than_ids_gives_all_ids() -> None:
    (entry,) = token_logprobs(QUARTERS, torch.tensor([0]), 9).on_host([9])
    assert [token for token, _ in entry.top] == [1, 0, 2, 3]


def test_zero_top_entries_gives_the_own_token_only() -> None:
    (entry,) = token_logprobs(QUARTERS, torch.tensor([0]), 0).on_host([0])
    assert (entry.rank, entry.top) == (2, ())


def test_raw_logprobs_ignore_processors_and_processed_ones_show_them() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 2)
    options = {"seed": 1, "temperature": 0.5, "top_k": 2, "logit_bias": {0: -3.0}, "logprobs": 4}
    requests = [SamplingParams(logprobs_mode=mode, **options) for mode in ("raw", "processed")]
    found = make_sampler(4, requests).sample(single_rows(logits, [3, 3])).logprobs_on_host()
    raw, processed = dict(found[0][0].top), dict(found[1][0].top)
    assert [raw[v] for v in range(4)] == pytest.approx(logits[0].log_softmax(0).tolist(), abs=1e-6)
    # After the bias [-1, 1, 0, -1], the two largest are ids 1 and 2, and T = 0.5 doubles their distance.
    assert processed[1] == pytest.approx(-math.log(1 + math.exp(-2)), abs=1e-6)
    assert processed[2] == pytest.approx(-2 - math.log(1 + math.exp(-2)), abs=1e-6)
    assert processed[0] == processed[3] == -math.inf


def test_processed_logprobs_of_greedy_rows_have_no_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    params = SamplingParams(temperature=0, logprobs=3, logprobs_mode="processed", logit_bias={2: 5.0})
    found = make_sampler(3, [params]).sample(single_rows(logits, [3])).logprobs_on_host()
    expected = torch.tensor([2.0, 1.0, 5.0]).log_softmax(0)
    assert dict(found[0][0].top) == pytest.approx({v: float(expected[v]) for v in range(3)}, abs=1e-6)


def test_the_engine_setting_decides_where_the_request_does_not() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    params = SamplingParams(temperature=0, logprobs=1, logit_bias={2: 5.0})
    found = make_sampler(3, [params], logprobs_mode="processed").sample(single_rows(logits, [3])).logprobs_on_host()
    assert found[0][0].rank == 1


def test_only_requests_that_ask_get_logprobs() -> None:
    requests = [SamplingParams(), SamplingParams(logprobs=2), SamplingParams(logprobs=0)]
    found = make_sampler(4, requests).sample(single_rows(QUARTERS.expand(3, 4), [3] * 3)).logprobs_on_host()
    assert {segment: [len(entry.top) for entry in entries] for segment, entries in found.items()} == {1: [2], 2: [0]}


def test_prompt_logprobs_are_those_of_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(3))
    target = torch.arange(9) % 6
    whole = prompt_logprobs(logits, target, 2).on_host()
    monkeypatch.setattr("deepinfer_core.sampling.logprobs._TILE_LOGITS", 12)
    assert prompt_logprobs(logits, target, 2).on_host() == whole
    expected = logits.double().log_softmax(-1)
    for row, entry in enumerate(whole):
        assert entry.logprob == pytest.approx(float(expected[row, target[row]]), abs=1e-5)
        assert [token for token, _ in entry.top] == expected[row].argsort(descending=True)[:2].tolist()
