"""Rope frequencies against the release's ramp and a direct evaluation of the formula."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_core.config.model import YarnConfig
from deepinfer_core.kernels.reference.norm_rope import apply_rope, rms_norm, rope_frequencies, rope_table

RELEASE_YARN = YarnConfig(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)


def test_the_release_ramps_between_pairs_15_and_25() -> None:
    plain = rope_frequencies(64, 160000.0, None)
    scaled = rope_frequencies(64, 160000.0, RELEASE_YARN)
    ratio = (scaled / plain).tolist()
    assert all(abs(r - 1) < 1e-12 for r in ratio[:16])
    assert all(abs(r - 1 / 16) < 1e-12 for r in ratio[25:])
    assert all(1 / 16 < r < 1 for r in ratio[16:25])
    assert ratio[20] == pytest.approx(0.5 + 0.5 / 16)  # half way up the ramp


def test_frequencies_fall_geometrically() -> None:
    f = rope_frequencies(16, 10000.0, None).tolist()
    assert f == pytest.approx([10000.0 ** (-2 * k / 16) for k in range(8)])


def test_a_short_ramp_is_guarded() -> None:
    yarn = YarnConfig(factor=16, beta_fast=1, beta_slow=1, original_max_position_embeddings=64)
    assert rope_frequencies(16, 160000.0, yarn).isfinite().all()


def test_rope_turns_adjacent_pairs_and_back() -> None:
    x = torch.arange(8, dtype=torch.float32).view(1, 8)
    table = rope_table(torch.tensor([3]), torch.tensor([0.5, 0.25]))
    turned = apply_rope(x, table)
    a, b = 1.5, 0.75
    expected = [
        4 * math.cos(a) - 5 * math.sin(a),
        5 * math.cos(a) + 4 * math.sin(a),
        6 * math.cos(b) - 7 * math.sin(b),
        7 * math.cos(b) + 6 * math.sin(b),
    ]
    assert turned[0, :4].tolist() == [0, 1, 2, 3]
    assert turned[0, 4:].tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(apply_rope(turned, table, inverse=True), x, atol=1e-5)


def test_an_all_zero_row_normalizes_to_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-20), torch.zeros(1, 8))
