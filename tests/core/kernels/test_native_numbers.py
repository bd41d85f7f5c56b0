"""Numbers of the native kernels: threads and blocking leave the bits alone, functions are accurate, roundings are those
of the reference on every binade.
"""

from __future__ import annotations

import pytest
import torch

from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.native.compiler import default_cache_dir
from deepinfer_core.kernels.native.library import Library, load_library
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.philox import gumbel_noise
from tests.core.harness import FIXTURES, TinyModel, load_tiny
from tests.core.kernels.native_library import needs_compiler
from tests.core.model.test_batch_invariance import run_in_company, sequences

pytestmark = needs_compiler


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def native_a(native_kernels: Kernels) -> TinyModel:
    return load_tiny(FIXTURES / "tiny-a", native_kernels)


# ---- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n"), [(1, 1), (7, 15), (64, 16), (129, 48), (256, 49), (1024, 24), (300, 1100)])
def test_a_product_has_the_same_bits_for_any_number_of_rows(native_kernels: Kernels, k: int, n: int) -> None:
    x, weight = randn(70, k), randn(k, n, seed=1)
    whole = native_kernels.linear(x, weight)
    assert torch.allclose(whole.double(), x.double() @ weight.double(), rtol=1e-4, atol=1e-4)
    for rows in (*range(1, 34), 69):
        assert torch.equal(native_kernels.linear(x[3 : 3 + rows], weight), whole[3 : 3 + rows]), rows


def test_an_input_with_gaps_between_rows_has_the_bits_of_a_dense_one(native_kernels: Kernels) -> None:
    wide, weight, norm = randn(9, 100), randn(40, 33, seed=1), randn(40, seed=2)
    part = wide[:, 30:70]
    assert torch.equal(native_kernels.linear(part, weight), native_kernels.linear(part.contiguous(), weight))
    assert torch.equal(
        native_kernels.rms_norm(part, norm, 1e-6), native_kernels.rms_norm(part.contiguous(), norm, 1e-6)
    )


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_leave_the_bits_alone(native_a: TinyModel, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = sequences(native_a, 150)[0]
    alone = native_a.logits(tokens)
    calls: list[int] = []

    def always(_: Library, operations: int) -> int:
        calls.append(operations)
        return threads

    monkeypatch.setattr(Library, "threads_for", always)
    assert torch.equal(native_a.logits(tokens), alone)
    assert torch.equal(run_in_company(native_a, [tokens], seed=threads)[0], alone)
    assert calls


@pytest.mark.parametrize("seed", range(4))
def test_chunks_and_company_leave_the_bits_alone(native_a: TinyModel, seed: int) -> None:
    requests = sequences(native_a, 1, 37, 150)
    alone = [native_a.logits(tokens) for tokens in requests]
    for one, other in zip(alone, run_in_company(native_a, requests, seed), strict=True):
        assert torch.equal(one, other)


def test_chunks_leave_the_kept_rows_of_a_compact_prefill_alone(native_a: TinyModel) -> None:
    requests = sequences(native_a, 60, 150)
    cuts = [39, 120]
    alone = [
        run_in_company(native_a, [tokens], 0, decoder_from=[cut])[0] for tokens, cut in zip(requests, cuts, strict=True)
    ]
    for one, other in zip(alone, run_in_company(native_a, requests, 5, decoder_from=cuts), strict=True):
        assert torch.equal(one, other)


def test_few_operations_take_one_thread() -> None:
    library = load_library(default_cache_dir())
    assert library.threads_for(1000) == 1
    assert library.threads_for(10**12) == library.num_threads


# ---- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["write_window", "write_entries", "write_index_keys"])
def test_roundings_equal_the_reference_on_every_binade_and_at_midpoints(native_kernels: Kernels, op: str) -> None:
    steps = torch.arange(-4096, 4096) / 512.0  # multiples of 2^-9: grid points and midpoints of e4m3 and e2m1
    scales = torch.exp2(torch.arange(-40, 40).float()) * 1.0625
    values = (scales[:, None] * steps.view(-1, 64)[:, None].flatten(1)[torch.arange(80) % 128]).contiguous()
    values = torch.cat([values, steps.view(-1, 64), -steps.view(-1, 64), randn(50, 64) * 1e-3, torch.zeros(1, 64)])
    rows = torch.arange(len(values))
    got, want = torch.full_like(values, 7.0), torch.full_like(values, 7.0)
    getattr(native_kernels, op)(got, rows, values)
    getattr(REFERENCE, op)(want, rows, values)
    assert torch.equal(got, want)
    assert torch.equal(got.signbit(), want.signbit())


@pytest.mark.parametrize("largest", [1.0, 30.0, 200.0])
def test_gates_are_accurate_over_the_range_of_their_inputs(native_kernels: Kernels, largest: float) -> None:
    """The router's sqrt(softplus) through a product with the identity; relative to float64."""
    x = torch.linspace(-largest, largest, 64)[None]
    ids, weights = native_kernels.route(x, torch.eye(64), torch.zeros(64), 64, 1.0)
    scores = torch.nn.functional.softplus(x.double(), threshold=1000)[0].sqrt()
    expected = scores / scores.sum()
    assert torch.equal(ids[0], torch.arange(64))
    visible = expected > 1e-12
    assert torch.allclose(weights[0].double()[visible], expected[visible], rtol=3e-6, atol=0)


def test_angles_of_the_longest_context_are_reduced_accurately(native_kernels: Kernels) -> None:
    positions, frequencies = torch.tensor([0, 1, 77, 65_535, 1_048_575]), torch.tensor([1.0, 0.1, 3.3e-4])
    table = native_kernels.rope_table(positions, frequencies)
    angle = (positions.float()[:, None] * frequencies).double()
    assert torch.allclose(table[:, 0, ::2].double(), angle.cos(), rtol=0, atol=1e-7)
    assert torch.allclose(table[:, 1, 1::2].double(), angle.sin(), rtol=0, atol=1e-7)
    assert torch.equal(table[:, 1, ::2], -table[:, 1, 1::2])


def test_attention_survives_extreme_logits(native_kernels: Kernels) -> None:
    cache = torch.cat([torch.full((1, 64), 40.0), torch.full((1, 64), -40.0), randn(1, 64)])
    q, plan = torch.full((1, 2, 64), 40.0), torch.tensor([[0, 1, 2, -1]])
    for sink in (-1e30, 0.0, 1e5):
        sinks = torch.full((2,), sink)
        got = native_kernels.attend(q, cache, plan, None, None, sinks)
        want = REFERENCE.attend(q, cache, REFERENCE.plan_keys(plan), None, None, sinks)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["ascending", "descending", "equal", "two values", "minus infinity"])
def test_selection_of_ordered_scores_equals_the_reference(native_kernels: Kernels, order: str) -> None:
    n = 3000
    scores = {
        "ascending": torch.arange(n).float(),
        "descending": -torch.arange(n).float(),
        "equal": torch.zeros(n),
        "two values": (torch.arange(n) % 2).float() - 0.5,
        "minus infinity": torch.full((n,), float("-inf")),
    }[order][None]
    for k in (1, 7, 512, n, n + 5):
        assert torch.equal(native_kernels.select_entries(scores, k), REFERENCE.select_entries(scores, k)), k


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0], ids=["level", "natural", "peaked"])
@pytest.mark.parametrize("num_ids", [1, 63, 64, 65, 2000])
def test_ids_that_are_passed_over_could_not_have_won(native_kernels: Kernels, num_ids: int, spread: float) -> None:
    """Noise is made for few ids; the token is that of noise made for all."""
    scores = randn(300, num_ids + 3)[:, :num_ids] * spread  # rows with gaps between them
    scores[::5, 1::2] = float("-inf")
    seed, position = torch.arange(300) * 0x9E3779B97F4A7C15 % 2**63, torch.arange(300) + 2**33
    token, failed = native_kernels.draw_token(scores, seed, position)
    assert not failed.any()
    assert torch.equal(token, (scores + gumbel_noise(seed, position, num_ids)).argmax(1))
