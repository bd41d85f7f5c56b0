"""Drawing from few ids and from all gives the same tokens; rows that cannot draw are found either way."""

from __future__ import annotations

import pytest
import torch

from deepinfer_core.sampling.draw import draw_token
from deepinfer_core.sampling.philox import gumbel_noise

INF = float("inf")


@pytest.mark.parametrize("left", [1, 2, 12, 13, 99, 100])
def test_the_token_does_not_depend_on_how_the_noise_was_made(left: int) -> None:
    generator = torch.Generator().manual_seed(left)
    logits = torch.full((50, 100), -INF)
    for row in logits:
        ids = torch.randperm(100, generator=generator)[:left]
        row[ids] = torch.randn(left, generator=generator)
    logits[::3] = torch.randn(17, 100, generator=generator)  # rows with all ids among the others
    seed, position = torch.arange(50), torch.arange(50) + 7
    token, failed = draw_token(logits, seed, position)
    assert token.tolist() == (logits + gumbel_noise(seed, position, 100)).argmax(1).tolist()
    assert not failed.any()


def test_rows_without_a_finite_logit_fail() -> None:
    logits = torch.full((4, 100), -INF)
    logits[0, 3] = 1.0
    logits[1, 3] = float("nan")
    logits[2] = float("nan")
    token, failed = draw_token(logits, torch.arange(4), torch.arange(4))
    assert failed.tolist() == [False, True, True, True]
    assert int(token[0]) == 3
