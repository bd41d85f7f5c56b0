"""Drafts under verification: coupled gives the tokens of no drafts at all, ratio gives the target's distribution."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.sampling import Sampler
from tests.core.sampling import oracle
from tests.core.sampling.helpers import EOS, admission, make_sampler, rows_of, single_rows

NUM_IDS = 12


def table_logits(token: torch.Tensor, scale: float = 2.0, salt: int = 0) -> torch.Tensor:
    """A model whose logits depend on the last token alone: [R, NUM_IDS]."""
    table = torch.randn(NUM_IDS, NUM_IDS, generator=torch.Generator().manual_seed(salt)) * scale
    return table[token]


def generate(params: SamplingParams, drafts: list[list[int]], count: int) -> list[int]:
    """`count` tokens of the table model; step i verifies drafts[i] (then none)."""
    sampler = Sampler(NUM_IDS, 1, "cpu", mask_from=NUM_IDS, eos_token_id=EOS)
    sampler.admit(admission(0, params, [5]))
    tokens, step = [5], 0
    while len(tokens) <= count:
        block = [tokens[-1], *(drafts[step] if step < len(drafts) else [])]
        position = range(len(tokens) - 1, len(tokens) - 1 + len(block))
        rows = rows_of(table_logits(torch.tensor(block)), position, block, [0, len(block)], [0])
        batch = sampler.sample(rows)
        tokens += batch.tokens[0, : int(batch.num_tokens[0])].tolist()
        step += 1
    return tokens[1 : count + 1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=5),
        SamplingParams(seed=6, top_k=4, top_p=0.9),
        SamplingParams(seed=7, repetition_penalty=1.5, frequency_penalty=0.6),
        SamplingParams(temperature=0, presence_penalty=1.5),
    ],
)
def test_coupled_tokens_do_not_depend_on_the_drafts(params: SamplingParams) -> None:
    alone = generate(params, [], 30)
    rng = np.random.default_rng(1)
    guesses = [rng.integers(0, NUM_IDS, rng.integers(0, 5)).tolist() for _ in range(30)]
    right = [alone[i : i + 4] for i in range(0, 30, 5)]
    half_right = [[*alone[i : i + 2], 0] for i in range(0, 30, 3)]
    for drafts in (guesses, right, half_right):
        assert generate(params, drafts, 30) == alone


def test_segments_keep_their_own_prefix_of_drafts() -> None:
    """Greedy on a table that always continues with token + 1."""
    own = [3, 4, 9, 9, 7, 1, 2, 3, 4]
    logits = torch.nn.functional.one_hot((torch.tensor(own) + 1) % NUM_IDS, NUM_IDS).float()
    rows = rows_of(logits, [0, 1, 2, 3, 6, 0, 1, 2, 3], own, [0, 4, 5, 9], [0, 1, 2])
    batch = make_sampler(NUM_IDS, [SamplingParams(temperature=0)] * 3).sample(rows)
    assert batch.tokens.tolist() == [[4, 5, -1, -1], [8, -1, -1, -1], [2, 3, 4, 5]]
    assert batch.num_tokens.tolist() == [2, 1, 4]
    assert batch.num_verified.tolist() == [3, 0, 3]


def test_a_token_that_follows_a_segment_is_no_draft_of_it() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([4, 4]), NUM_IDS).float()
    rows = rows_of(logits, [0, 0], [3, 4], [0, 1, 2], [0, 1])
    batch = make_sampler(NUM_IDS, [SamplingParams(temperature=0)] * 2).sample(rows)
    assert batch.num_tokens.tolist() == [1, 1]


def test_logprobs_come_for_emitted_tokens_only() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([4, 7, 7]), NUM_IDS).float()
    rows = rows_of(logits, [0, 1, 2], [3, 4, 5], [0, 3], [0])
    batch = make_sampler(NUM_IDS, [SamplingParams(temperature=0, logprobs=0)]).sample(rows)
    entries = batch.logprobs_on_host()[0]
    assert [entry.token_id for entry in entries] == batch.tokens[0, :2].tolist() == [4, 7]


def test_a_failure_behind_the_last_emitted_token_does_not_count() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([4, 7, 7]), NUM_IDS).float()
    logits[2] = float("nan")
    for tokens, failed in (([3, 4, 5], False), ([3, 4, 7], True)):
        rows = rows_of(logits, [0, 1, 2], tokens, [0, 3], [0])
        sampler = make_sampler(NUM_IDS, [SamplingParams(temperature=0)])
        assert sampler.sample(rows).failed.tolist() == [failed]


def drafter_and_target(params: SamplingParams, mode: str, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Two drafts a block from another model, verified: (tokens [blocks, 3], num_tokens [blocks])."""
    sampler = make_sampler(NUM_IDS, [params], mode=mode)
    slots = np.zeros(blocks, np.int32)
    first = torch.arange(blocks) * 10 + 1
    anchor = torch.full((blocks,), 5)
    noise = sampler.draft_noise(slots, first, 2)
    block, draft_logits = [anchor], []
    for step in range(2):
        draft_logits.append(table_logits(block[-1], 1.5, salt=0) + table_logits(block[-1], 0.7, salt=1))
        block.append(noise.choose(step, draft_logits[-1]))
    token = torch.stack(block, 1).flatten()
    q = torch.stack([*draft_logits, torch.full_like(draft_logits[0], float("nan"))], 1).flatten(0, 1)
    position = (first[:, None] - 1 + torch.arange(3)).flatten()
    starts = range(0, 3 * blocks + 1, 3)
    rows = rows_of(table_logits(token), position.tolist(), token.tolist(), starts, slots, draft_logits=q)
    batch = sampler.sample(rows)
    return batch.tokens.numpy(), batch.num_tokens.numpy()


@pytest.mark.parametrize("params", [SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.8, temperature=0.8)])
def test_ratio_verification_keeps_the_target_distribution(params: SamplingParams) -> None:
    """First token, and second token given the first, over 25,000 blocks; χ² limits at 1 - 1e-6."""
    tokens, num_tokens = drafter_and_target(params, "ratio", 25_000)
    sampled = drafter_and_target(dataclasses.replace(params, seed=77), "coupled", 25_000)[0]  # no drafts matter here
    assert 1.2 < num_tokens.mean() < 2.9
    reach = num_tokens >= 2
    pairs = np.bincount(tokens[reach, 0] * NUM_IDS + tokens[reach, 1], minlength=NUM_IDS**2).reshape(NUM_IDS, NUM_IDS)
    first = np.bincount(tokens[:, 0], minlength=NUM_IDS)
    target = expected_distribution(params, torch.tensor([5]))[0]
    assert first[target == 0].sum() == 0
    assert chi2(first, target) < limit(target)
    assert chi2(np.bincount(sampled[:, 0], minlength=NUM_IDS), target) < limit(target)
    for token in range(NUM_IDS):
        # Given that the first token is an accepted draft, the second must still follow the target.
        if pairs[token].sum() > 500:
            following = expected_distribution(params, torch.tensor([token]))[0]
            assert pairs[token][following == 0].sum() == 0
            assert chi2(pairs[token], following) < limit(following)


def test_ratio_verification_accepts_at_least_as_often_as_coupled() -> None:
    ratio = drafter_and_target(SamplingParams(seed=1), "ratio", 20_000)[1].mean()
    coupled = drafter_and_target(SamplingParams(seed=1), "coupled", 20_000)[1].mean()
    assert coupled < ratio < coupled + 0.5


def test_coupled_acceptance_keeps_its_theoretical_bound() -> None:
    """P(match) >= (1 - TV) / (1 + TV), Daliri, Musco and Suresh, arXiv 2408.07978; at most 1 - TV for any method."""
    _, num_tokens = drafter_and_target(SamplingParams(seed=3), "coupled", 20_000)
    p = table_logits(torch.tensor([5])).softmax(-1)
    q = (table_logits(torch.tensor([5]), 1.5) + table_logits(torch.tensor([5]), 0.7, salt=1)).softmax(-1)
    distance = float((p - q).abs().sum()) / 2
    accepted = float((num_tokens >= 2).mean())
    assert (1 - distance) / (1 + distance) - 0.01 < accepted < 1 - distance + 0.01


def test_greedy_requests_are_verified_by_equality_in_ratio_mode() -> None:
    params = SamplingParams(temperature=0)
    assert np.array_equal(drafter_and_target(params, "ratio", 8)[0], drafter_and_target(params, "coupled", 8)[0])


def test_a_perfect_drafter_is_always_accepted() -> None:
    sampler = make_sampler(NUM_IDS, [SamplingParams(seed=9), SamplingParams(temperature=0)])
    slots = np.array([0, 1], np.int32)
    noise = sampler.draft_noise(slots, torch.tensor([1, 1]), 3)
    block = [torch.tensor([5, 5])]
    for step in range(3):
        block.append(noise.choose(step, table_logits(block[-1])))
    token = torch.stack(block, 1).flatten()
    rows = rows_of(table_logits(token), [0, 1, 2, 3] * 2, token.tolist(), [0, 4, 8], slots)
    assert sampler.sample(rows).num_tokens.tolist() == [4, 4]


@pytest.mark.parametrize("mode", ["coupled", "ratio"])
def test_large_blocks_draw_the_same_drafts_step_by_step(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    sampler = make_sampler(NUM_IDS, [SamplingParams(seed=9), SamplingParams(temperature=0)], mode=mode)
    logits = table_logits(torch.tensor([2, 3]))

    def drafts() -> list[list[int]]:
        noise = sampler.draft_noise(np.array([0, 1], np.int32), torch.tensor([7, 8]), 4)
        return [noise.choose(step, logits).tolist() for step in range(4)]

    at_once = drafts()
    monkeypatch.setattr("deepinfer_core.sampling.draft_noise._SMALL_BLOCK", 0)
    assert drafts() == at_once


def test_ratio_mode_without_draft_logits_is_an_error() -> None:
    sampler = make_sampler(NUM_IDS, [SamplingParams()], mode="ratio")
    with pytest.raises(ValueError, match="draft_logits"):
        sampler.sample(rows_of(torch.zeros(2, NUM_IDS), [0, 1], [3, 4], [0, 2], [0]))
    assert sampler.sample(single_rows(torch.zeros(1, NUM_IDS), [0])).num_tokens.tolist() == [1]


def expected_distribution(params: SamplingParams, token: torch.Tensor) -> np.ndarray:
    return torch.from_numpy(oracle.filtered(table_logits(token)[0].numpy(), params)).double().softmax(-1)[None].numpy()


def chi2(observed: np.ndarray, probability: np.ndarray) -> float:
    inside = probability > 0
    expected = observed.sum() * probability[inside]
    return float(((observed[inside] - expected) ** 2 / expected).sum())


def limit(probability: np.ndarray) -> float:
    """χ² quantile at 1 - 1e-6 by Wilson and Hilferty's approximation."""
    freedom = max(1, int((probability > 0).sum()) - 1)
    return freedom * (1 - 2 / (9 * freedom) + 4.7534 * (2 / (9 * freedom)) ** 0.5) ** 3
