"""mHC against an evaluation of its formulas (docs/model.md: Residual streams) in float64, line by line."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.kernels.reference.mhc import mhc_collapse, mhc_expand, mhc_mix, mhc_next, sinkhorn


def sinkhorn_by_definition(c: Tensor, iterations: int, eps: float) -> Tensor:
    c = c.double() + eps
    c = c / (c.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(1, keepdim=True) + eps)
        c = c / (c.sum(0, keepdim=True) + eps)
    return c


def test_sinkhorn_follows_the_definition_to_the_number_of_iterations() -> None:
    c = torch.softmax(torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0)) * 3, -1)
    for iterations in (1, 2, 20):
        expected = torch.stack([sinkhorn_by_definition(matrix, iterations, 1e-6) for matrix in c])
        assert (sinkhorn(c, iterations, 1e-6) - expected).abs().max().item() < 2e-6
    one_less = torch.stack([sinkhorn_by_definition(matrix, 2, 1e-6) for matrix in c])
    assert (sinkhorn(c, 3, 1e-6) - one_less).abs().max().item() > 1e-4


def test_columns_sum_to_one_after_the_last_step() -> None:
    c = torch.softmax(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1)), -1)
    sums = sinkhorn(c, 20, 1e-6).sum(1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)


def test_the_source_index_is_summed() -> None:
    streams = torch.zeros(1, 4, 8)
    streams[0, 2] = 1.0
    c = torch.zeros(1, 4, 4)
    c[0, 2, 3] = 1.0  # source 2 -> destination 3
    out = mhc_expand(streams, torch.zeros(1, 8), torch.zeros(1, 4), c)
    assert out[0, 3].tolist() == [1.0] * 8
    assert not out[0, :3].any()


def test_mixes_have_the_definitions_shapes_and_ranges() -> None:
    g = torch.Generator().manual_seed(2)
    streams = torch.randn(3, 4, 32, generator=g)
    pre, post, c = mhc_mix(
        streams,
        torch.randn(128, 24, generator=g),
        torch.randn(24, generator=g),
        torch.ones(24),
        iterations=20,
        norm_eps=1e-20,
        eps=1e-6,
    )
    assert pre.shape == post.shape == (3, 4)
    assert c.shape == (3, 4, 4)
    assert pre.min().item() > 1e-6
    assert pre.max().item() <= 1 + 2e-6
    assert 0 <= post.min().item() <= post.max().item() <= 2
    u = mhc_collapse(streams, pre)
    assert torch.allclose(u, (pre[:, :, None] * streams).sum(1), atol=1e-5)


def test_the_next_sublayers_input_is_the_norm_of_the_mixed_streams() -> None:
    g = torch.Generator().manual_seed(3)
    streams, y, weight = (torch.randn(*shape, generator=g) for shape in ((3, 4, 32), (3, 32), (32,)))
    post, pre, c = (torch.rand(*shape, generator=g) for shape in ((3, 4), (3, 4), (3, 4, 4)))
    after, x = mhc_next(streams, y, post, c, pre, weight, 1e-20)
    expected = post.double()[:, :, None] * y[:, None] + torch.einsum("rij,rid->rjd", c.double(), streams.double())
    mixed = torch.einsum("rj,rjd->rd", pre.double(), expected)
    normalized = weight * mixed / mixed.square().mean(1, keepdim=True).sqrt()
    torch.testing.assert_close(after.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.double(), normalized, atol=1e-5, rtol=1e-5)
