"""`decoder_prefill`: rows below the cut skip the decoder half."""

from __future__ import annotations

import pytest
import torch

from tests.core.harness import Chunk, TinyModel, plan_of

PROMPT = 150


@pytest.fixture(scope="module")
def prompt(tiny_a: TinyModel) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, tiny_a.config.vocab_size, (PROMPT,), generator=generator).tolist()


def test_exact_rows_equal_a_full_pass_bit_for_bit(tiny_a: TinyModel, prompt: list[int]) -> None:
    rows = tiny_a.config.exact_decoder_rows
    exact = tiny_a.step(tiny_a.state(), plan_of([Chunk(0, 0, prompt, PROMPT - rows)], sample="last")).logits
    full = tiny_a.step(tiny_a.state(), plan_of([Chunk(0, 0, prompt)], sample="last")).logits
    assert exact is not None
    assert full is not None
    assert torch.equal(exact, full)


def test_one_row_less_than_exact_is_not_exact(tiny_a: TinyModel, prompt: list[int]) -> None:
    rows = tiny_a.config.exact_decoder_rows // 2
    fewer = tiny_a.step(tiny_a.state(), plan_of([Chunk(0, 0, prompt, PROMPT - rows)], sample="last")).logits
    full = tiny_a.step(tiny_a.state(), plan_of([Chunk(0, 0, prompt)], sample="last")).logits
    assert fewer is not None
    assert full is not None
    assert not torch.equal(fewer, full)


@pytest.mark.parametrize("keep", [8, 20, 149, 150])
def test_mask_equals_compact_and_goes_on_alike(tiny_a: TinyModel, prompt: list[int], keep: int) -> None:
    cut = PROMPT - keep
    results = []
    for mask in (False, True):
        state = tiny_a.state()
        first = tiny_a.step(state, plan_of([Chunk(0, 0, prompt, cut)], sample="last"), mask=mask)
        then = tiny_a.step(state, plan_of([Chunk(0, PROMPT, [3, 1, 4], cut)]), mask=mask)
        results.append((first.logits, then.logits))
    for compact, masked in zip(results[0], results[1], strict=True):
        assert compact is not None
        assert masked is not None
        assert torch.equal(compact, masked)


def test_compact_skips_the_rows_it_says(tiny_a: TinyModel, prompt: list[int]) -> None:
    cut_layer, layers = tiny_a.config.decoder_start, tiny_a.config.num_hidden_layers
    out = tiny_a.step(tiny_a.state(), plan_of([Chunk(0, 0, prompt, PROMPT - 20)], sample="last"))
    assert out.rows_per_layer == (PROMPT,) * cut_layer + (20,) * (layers - cut_layer)


def test_a_chunk_below_the_cut_has_no_logits_and_no_decoder_rows(tiny_a: TinyModel, prompt: list[int]) -> None:
    state = tiny_a.state()
    out = tiny_a.step(state, plan_of([Chunk(0, 0, prompt[:100], 130)], sample="last"))
    assert out.logits is None
    assert out.rows_per_layer[tiny_a.config.decoder_start :] == (0,) * (
        tiny_a.config.num_hidden_layers - tiny_a.config.decoder_start
    )
    rest = tiny_a.step(state, plan_of([Chunk(0, 100, prompt[100:], 130)], sample="last")).logits
    whole = tiny_a.step(tiny_a.state(), plan_of([Chunk(0, 0, prompt, 130)], sample="last")).logits
    assert rest is not None
    assert whole is not None
    assert torch.equal(rest, whole)
