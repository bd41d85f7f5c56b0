"""The building blocks of row invariance: elementwise functions, tiles, the two forms of the expert product."""

from __future__ import annotations

import pytest
import torch

from deepinfer_core.kernels.reference import elementwise, moe
from deepinfer_core.kernels.reference.linear import linear


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_elementwise_bits_do_not_depend_on_the_place_in_the_buffer(name: str) -> None:
    fn = getattr(elementwise, name)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(3)) * 5
    whole = fn(x)
    for length in range(1, 70):
        assert torch.equal(fn(x[7 : 7 + length].clone()), whole[7 : 7 + length])
    reference = getattr(torch.nn.functional, name)(x.double())
    assert torch.allclose(whole.double(), reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("k", "n"), [(64, 1), (160, 1), (1024, 24), (2048, 64), (256, 320)])
def test_a_lone_tile_equals_the_same_tile_in_company(k: int, n: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        g = torch.Generator().manual_seed(k + n)
        weight, x = torch.randn(k, n, generator=g), torch.randn(200, k, generator=g)
        whole = linear(x, weight)
        for start, stop in ((8, 16), (0, 1), (3, 4), (9, 33)):
            assert torch.equal(linear(x[start:stop], weight), whole[start:stop])
    finally:
        torch.set_num_threads(before)


def test_gathered_and_looped_expert_products_have_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(4)
    x, w13, w2 = (
        torch.randn(50, 96, generator=g),
        torch.randn(9, 96, 64, generator=g),
        torch.randn(9, 32, 96, generator=g),
    )
    ids = torch.rand(50, 9, generator=g).topk(3, 1).indices.sort(1).values
    weights = torch.rand(50, 3, generator=g)
    tiles = moe.plan_tiles(ids, 9)
    gathered = moe.run_experts(x, weights, tiles, w13, w2, 1.5)
    monkeypatch.setattr(moe, "_GATHER_LIMIT_BYTES", 0)
    assert torch.equal(moe.run_experts(x, weights, tiles, w13, w2, 1.5), gathered)


def test_experts_compute_the_definition() -> None:
    g = torch.Generator().manual_seed(6)
    x, w13, w2 = (
        torch.randn(11, 32, generator=g),
        torch.randn(4, 32, 64, generator=g),
        torch.randn(4, 32, 32, generator=g),
    )
    ids = torch.tensor([[0, 3], [1, 2], [2, 3]] * 3 + [[0, 1], [0, 2]])
    weights = torch.rand(11, 2, generator=g)
    pairs = moe.run_experts(x, weights, moe.plan_tiles(ids, 4), w13, w2, 1.0)
    for row in range(11):
        for choice in range(2):
            gate, up = (x[row].double() @ w13[ids[row, choice]].double()).chunk(2)
            act = torch.nn.functional.silu(gate.clamp(max=1.0)) * up.clamp(-1, 1) * weights[row, choice].double()
            assert torch.allclose(pairs[row, choice].double(), act @ w2[ids[row, choice]].double(), atol=1e-4)
