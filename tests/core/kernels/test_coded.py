"""Coded weights: what they keep of the released ones, and what a product with them is."""

from __future__ import annotations

import pytest
import torch

from deepinfer_core.checkpoint.dequantize import dequantize_fp4, dequantize_fp8_blocks
from deepinfer_core.checkpoint.quantize import quantize_fp4, quantize_fp8_blocks
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.conformance.cases import Case, all_cases
from deepinfer_core.kernels.contract import CODED_RMS
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.coded import CodedWeight, code_columns, round_rows
from deepinfer_core.model.params import build_params
from tests.core.harness import TinyModel


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_the_released_formats_are_kept_exactly(form: str) -> None:
    """Their scales are powers of two as well, so codes only move by binades, of which e4m3 has enough."""
    values = matrix(96, 128) * 0.05
    fp4 = dequantize_fp4(*quantize_fp4(values))
    released = fp4 if form == "fp4" else dequantize_fp8_blocks(*quantize_fp8_blocks(values))
    weight = code_columns(released.T)
    assert weight.shape == (128, 96)
    kept = weight.decoded(torch.float32)
    # What is lost is below 2^-10 of the smallest normal code: nothing of FP4, and of FP8 only the smallest values.
    lost = (kept - released.T).abs().amax(0)
    assert (lost <= weight.scale * 2.0**-10).all()
    assert form == "fp8" or torch.equal(kept, released.T)
    assert torch.equal(weight.decoded(torch.bfloat16).float(), kept)


def test_rows_are_rounded_to_four_significant_bits_of_a_scale_that_fits_their_largest_value() -> None:
    x = torch.tensor([[1.0, 448.0, -3.0, 0.1], [0.0, 0.0, 0.0, 0.0], [1e-3, 2e-3, -5e-4, 0.0]])
    rounded = round_rows(x)
    assert rounded[0].tolist() == [1.0, 448.0, -3.0, 0.1015625]
    assert rounded[1].tolist() == [0.0] * 4
    assert torch.allclose(rounded[2], x[2], rtol=2**-4)
    alone = torch.cat([round_rows(row[None]) for row in matrix(5, 64)])
    assert torch.equal(round_rows(matrix(5, 64)), alone)


def test_products_with_coded_weights_are_those_of_rounded_rows_and_decoded_weights() -> None:
    x, w = matrix(11, 64), code_columns(matrix(64, 40, seed=1))
    expected = round_rows(x).double() @ w.decoded(torch.float32).double()
    assert torch.allclose(REFERENCE.linear(x, w).double(), expected, atol=1e-4)


def test_a_model_with_coded_weights_computes_nearly_the_same(tiny_a: TinyModel) -> None:
    config: ModelConfig = tiny_a.config
    coded = build_params(tiny_a.weights, config, coded=True)
    for layer in coded.layers:
        for weight in (layer.attn.query_proj, layer.attn.wo_b, layer.ffn.w13, layer.ffn.shared_w2):
            assert isinstance(weight, CodedWeight)
        assert isinstance(layer.attn.wo_a, torch.Tensor)  # bfloat16 in the original, too
    plain = tiny_a.params.layers[0].ffn
    x, ids = matrix(6, config.hidden_size), torch.arange(12).view(6, 2) % config.n_routed_experts
    weights = torch.full((6, 2), 0.5)
    plan = REFERENCE.plan_experts(ids, config.n_routed_experts)
    outputs = [
        REFERENCE.run_experts(x, weights, plan, ffn.w13, ffn.w2, config.swiglu_limit)
        for ffn in (plain, coded.layers[0].ffn)
    ]
    difference = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    assert 0 < difference < 0.06  # three roundings to four bits, of rows that are summed


@pytest.mark.parametrize(
    "case", [case for case in all_cases() if case.coded], ids=lambda case: f"{case.op}-{case.name}"
)
def test_the_bound_of_coded_products_leaves_room_for_flipped_codes_and_for_nothing_else(case: Case) -> None:
    rows, shared = case.make(40, torch.Generator().manual_seed(7))

    def run(dtype: torch.dtype, factor: float = 1.0) -> torch.Tensor:
        inputs = {
            name: value.bfloat16().to(dtype) * factor
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in rows.items()
        }
        return torch.cat([one.float().flatten() for one in case.run(REFERENCE, inputs, shared)])

    want = run(torch.float32)

    def rms(got: torch.Tensor) -> float:
        return float(((got - want) / (1 + want.abs())).square().mean().sqrt())

    assert rms(run(torch.bfloat16)) < CODED_RMS
    assert rms(run(torch.float32, 0.9)) > CODED_RMS
