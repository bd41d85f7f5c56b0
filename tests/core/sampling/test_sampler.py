"""The sampler against the oracle, row by row, and the promise that a row does not know its company."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.sampling import Sampler
from deepinfer_core.scheduling.plan import Release
from tests.core.sampling import oracle
from tests.core.sampling.helpers import EOS, admission, make_sampler, rows_of, single_rows

NUM_IDS = 41

MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(seed=3),
    SamplingParams(seed=2**64 - 1, temperature=0.3),
    SamplingParams(seed=4, top_k=5),
    SamplingParams(seed=5, top_p=0.7, temperature=1.5),
    SamplingParams(seed=6, min_p=0.2),
    SamplingParams(seed=7, top_k=12, top_p=0.8, min_p=0.05, temperature=0.9),
    SamplingParams(seed=8, repetition_penalty=1.7),
    SamplingParams(seed=9, presence_penalty=1.1, frequency_penalty=-0.7, top_k=20),
    SamplingParams(temperature=0, repetition_penalty=0.6, frequency_penalty=0.9),
    SamplingParams(seed=10, logit_bias={3: 5.0, 7: -100.0}),
    SamplingParams(temperature=0, logit_bias={11: 30.0}),
    SamplingParams(seed=11, logit_bias={2: 2.5}, repetition_penalty=1.2, top_p=0.9, top_k=0, min_p=0.01),
]


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return torch.randn(len(MIXED), NUM_IDS, generator=torch.Generator().manual_seed(0)) * 2


def history(slot: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(slot)
    return rng.integers(0, NUM_IDS, 9).tolist(), rng.integers(0, NUM_IDS, 6).tolist()


def sampler_of(requests: list[SamplingParams]) -> Sampler:
    """Every request with a prompt and some output, as after a preemption."""
    sampler = Sampler(NUM_IDS, len(requests), "cpu", mask_from=NUM_IDS, eos_token_id=EOS)
    for slot, params in enumerate(requests):
        prompt, output = history(slot)
        sampler.admit(admission(slot, params, prompt + output, len(prompt)))
    return sampler


def test_every_row_draws_what_the_definition_says(logits: torch.Tensor) -> None:
    for position in (14, 2**32 + 5):
        batch = sampler_of(MIXED).sample(single_rows(logits, [position] * len(MIXED)))
        expected = [
            oracle.draw(logits[slot].numpy(), params, *history(slot), params.seed or 0, position + 1)
            for slot, params in enumerate(MIXED)
        ]
        assert batch.tokens[:, 0].tolist() == expected
        assert batch.num_tokens.tolist() == [1] * len(MIXED)
        assert not batch.failed.any()


@pytest.mark.parametrize("num_ids", [NUM_IDS, 2_500])
def test_a_row_does_not_know_its_company(num_ids: int) -> None:
    torch.manual_seed(2)
    logits = torch.randn(len(MIXED), num_ids) * 4
    requests = [
        dataclasses.replace(params, logprobs=3, logprobs_mode=mode)
        for params, mode in zip(MIXED, ["raw", "processed"] * len(MIXED), strict=False)
    ]
    together = make_sampler(num_ids, requests).sample(single_rows(logits, [8] * len(MIXED)))
    reported = together.logprobs_on_host()
    for slot, params in enumerate(requests):
        alone = make_sampler(num_ids, [params]).sample(single_rows(logits[slot : slot + 1], [8]))
        assert torch.equal(alone.tokens[0], together.tokens[slot])
        assert alone.logprobs_on_host()[0] == reported[slot]


def test_the_order_of_rows_does_not_matter(logits: torch.Tensor) -> None:
    order = np.random.default_rng(0).permutation(len(MIXED))
    straight = sampler_of(MIXED).sample(single_rows(logits, [9] * len(MIXED)))
    shuffled = sampler_of(MIXED).sample(single_rows(logits[order], [9] * len(MIXED), order))
    assert torch.equal(shuffled.tokens, straight.tokens[order])


def test_equal_logits_are_won_by_the_lowest_id_at_temperature_zero() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0]])
    assert make_sampler(4, [SamplingParams(temperature=0)]).sample(single_rows(logits, [3])).tokens.tolist() == [[1]]


def test_ids_without_a_token_are_never_drawn() -> None:
    logits = torch.zeros(2, 10)
    logits[:, 6:] = 1e4
    sampler = make_sampler(10, [SamplingParams(temperature=0), SamplingParams()], mask_from=6)
    assert int(sampler.sample(single_rows(logits, [3, 3])).tokens.max()) < 6


def test_the_input_logits_are_left_alone(logits: torch.Tensor) -> None:
    before = logits.clone()
    sampler_of(MIXED).sample(single_rows(logits, [9] * len(MIXED)))
    assert torch.equal(logits, before)


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, 8)
    logits[0, EOS], logits[0, 6], logits[0, 3] = 9.0, 8.0, 1.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[6])
    sampler = Sampler(8, 1, "cpu", mask_from=8, eos_token_id=EOS)
    sampler.admit(admission(0, params, [5, 5, 5]))
    drawn = [int(sampler.sample(single_rows(logits, [position])).tokens[0, 0]) for position in (2, 3, 4)]
    assert drawn == [3, 3, EOS]


def test_a_bias_on_an_end_token_holds_once_min_tokens_are_reached() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, logit_bias={EOS: 9.0})
    sampler = make_sampler(8, [params])
    drawn = [int(sampler.sample(single_rows(torch.zeros(1, 8), [position])).tokens[0, 0]) for position in (0, 1, 2)]
    assert drawn == [0, 0, EOS]


def test_an_ignored_end_token_may_be_drawn_before_min_tokens() -> None:
    logits = torch.zeros(1, 8)
    logits[0, EOS] = 9.0
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    assert make_sampler(8, [params]).sample(single_rows(logits, [0])).tokens.tolist() == [[EOS]]


def test_a_grammar_mask_limits_the_draw() -> None:
    logits = torch.zeros(2, 40)
    logits[:, 0] = 50.0
    rows = rows_of(logits, [3, 3], [5, 5], [0, 1, 2], [0, 1], grammar_masks={1: np.array([0, 0b10], np.uint32)})
    assert make_sampler(40, [SamplingParams(), SamplingParams()]).sample(rows).tokens.tolist() == [[0], [33]]


def test_a_row_with_nothing_to_draw_is_reported_and_spares_the_others() -> None:
    logits = torch.zeros(4, 40)
    logits[1] = float("nan")
    logits[2] = float("-inf")
    masks = {3: np.zeros(2, np.uint32)}
    rows = rows_of(logits, [3] * 4, [5] * 4, range(5), range(4), grammar_masks=masks)
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5, top_k=3)):
        assert make_sampler(40, [params] * 4).sample(rows).failed.tolist() == [False, True, True, True]


def test_penalties_count_what_was_emitted() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.8, 0.0]])
    sampler = Sampler(4, 1, "cpu", mask_from=4, eos_token_id=3)
    sampler.admit(admission(0, SamplingParams(temperature=0, frequency_penalty=0.15), [3]))
    drawn = [int(sampler.sample(single_rows(logits, [position])).tokens[0, 0]) for position in range(6)]
    assert drawn == [0, 1, 0, 2, 1, 0]  # 1, .9, .85, .8, .75, .7 beside .8 - .15 = .65


def test_a_slot_forgets_its_last_request() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    params = SamplingParams(temperature=0, presence_penalty=1.0, logit_bias={2: 0.1})
    sampler = Sampler(3, 1, "cpu", mask_from=3, eos_token_id=2)
    sampler.admit(admission(0, params, [2]))
    assert sampler.sample(single_rows(logits, [0])).tokens.tolist() == [[0]]
    sampler.release(Release(0, 0))
    sampler.admit(admission(0, params, [2], generation=1))
    assert sampler.sample(single_rows(logits, [0])).tokens.tolist() == [[0]]
    sampler.release(Release(0, 0))  # a late release of the first request
    assert sampler.sample(single_rows(logits, [1])).tokens.tolist() == [[1]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=4),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(min_p=0.15),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """χ² over 20,000 positions of one seed, so the outcome is fixed; the limit is the quantile at 1 - 1e-6."""
    draws = 20_000
    logits = torch.tensor([1.0, 0.5, 0.0, 2.0, -1.0, 0.5])
    sampler = make_sampler(6, [dataclasses.replace(params, seed=42)])
    batch = sampler.sample(single_rows(logits.expand(draws, 6), range(draws), [0] * draws))
    observed = np.bincount(batch.tokens[:, 0].numpy(), minlength=6)
    probability = torch.from_numpy(oracle.filtered(logits.numpy(), params)).softmax(0).numpy()
    assert observed[probability == 0].sum() == 0
    inside = probability > 0
    expected = draws * probability[inside]
    assert float(((observed[inside] - expected) ** 2 / expected).sum()) < 35.9  # χ²(5) at 1 - 1e-6


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    sampler = make_sampler(2, [SamplingParams(seed=seed) for seed in range(64)])
    logits = torch.zeros(64, 2)
    drawn = torch.stack([sampler.sample(single_rows(logits, [p] * 64)).tokens[:, 0] for p in range(64)]).double() - 0.5
    # Sums of 64 x 63 products of fair signs (/4): standard deviation 63.5 / 4 = 15.9.
    assert abs(float((drawn[1:] * drawn[:-1]).sum())) < 80
    assert abs(float((drawn[:, 1:] * drawn[:, :-1]).sum())) < 80
