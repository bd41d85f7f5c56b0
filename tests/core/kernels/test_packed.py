"""Packed weights: the bytes of a checkpoint, kept as they are, stand for the values that loading would decode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.coded import Weight
from deepinfer_core.kernels.reference.packed import (
    FP4_ROWS,
    FP8_ROWS,
    ArrangedWeight,
    PackedWeight,
    join_columns,
    pack_columns,
)
from deepinfer_core.kernels.reference.records import RecordFormat
from deepinfer_core.model.params import ModelParams, build_params

TINY = Path(__file__).parents[3] / "packages" / "deepinfer-core" / "src" / "deepinfer_core" / "models" / "tiny"


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(params: ModelParams) -> dict[str, Weight]:
    """Every product that may be packed, by its place."""
    found: dict[str, Weight] = {}
    for index, layer in enumerate((*params.layers, *(params.draft.stages if params.draft else ()))):
        for owner, name in (
            *((layer.attn, name) for name in ("query_proj", "index_query_proj", "wo_b")),
            *((layer.ffn, name) for name in ("w13", "w2", "shared_w13", "shared_w2")),
        ):
            if getattr(owner, name) is not None:
                found[f"{index}.{name}"] = getattr(owner, name)
    return found


def test_e2m1_pairs_and_scales_are_read_as_the_format_says() -> None:
    # Two columns of 32: all codes from the lowest nibble on, by 2^0 and by 2^-3.
    codes = bytes(16 * high + low for high, low in zip(range(1, 16, 2), range(0, 16, 2), strict=True)) * 2
    weight = PackedWeight(torch.tensor([[*codes, 127], [*codes, 124]], dtype=torch.uint8), FP4_ROWS, torch.float32)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    row = torch.tensor([*magnitudes, *(-value for value in magnitudes)] * 2)
    assert weight.shape == (32, 2)
    assert torch.equal(weight.decoded(torch.float32), torch.stack([row, row / 8], 1))


@pytest.mark.parametrize("form", [FP4_ROWS, FP8_ROWS], ids=["FP4", "FP8"])
def test_a_product_with_a_packed_weight_is_one_with_its_values(form: RecordFormat) -> None:
    packed = pack_columns(drawn(64, 24), form)
    x = drawn(5, 64, seed=1)
    assert torch.equal(REFERENCE.linear(x, packed), REFERENCE.linear(x, packed.decoded(torch.float32)))
    both = join_columns(packed, packed)
    assert torch.equal(both.decoded(torch.float32), packed.decoded(torch.float32).repeat(1, 2))


def test_the_bundled_checkpoint_kept_packed_decodes_to_the_same_weights() -> None:
    config = ModelConfig.from_folder(TINY)
    plain = load_model_weights(TINY, config, dtype=torch.bfloat16, progress=False)
    packed = load_model_weights(TINY, config, dtype=torch.bfloat16, packed="products", progress=False)
    assert isinstance(packed.layers[0].ffn.w1, PackedWeight)
    assert isinstance(packed.layers[0].attn.wo_b, PackedWeight)
    gated: list[tuple[int, ...]] = []

    def arrange(weight: PackedWeight, halves: bool) -> Weight:
        if halves:
            gated.append(weight.shape)
        return ArrangedWeight(weight.decoded(weight.dtype), weight.form, weight.shape, weight.dtype)

    want = weights_of(build_params(plain, config))
    decoded = weights_of(build_params(packed, config))
    arranged = weights_of(build_params(packed, config, arrange=arrange))
    assert want.keys() == decoded.keys() == arranged.keys()
    for name, weight in want.items():
        laid_out = arranged[name]
        assert isinstance(weight, Tensor)
        assert isinstance(decoded[name], Tensor)
        assert isinstance(laid_out, ArrangedWeight)
        assert torch.equal(weight, decoded[name]), name
        assert torch.equal(weight, laid_out.tiles), name
        assert laid_out.shape == weight.shape
    assert gated == [weight.shape for name, weight in want.items() if name.endswith("w13")]


def test_experts_alone_may_stay_packed() -> None:
    config = ModelConfig.from_folder(TINY)
    want = weights_of(build_params(load_model_weights(TINY, config, dtype=torch.bfloat16, progress=False), config))
    packed = load_model_weights(TINY, config, dtype=torch.bfloat16, packed="experts", progress=False)
    found = weights_of(build_params(packed, config, arrange=lambda weight, _: weight))  # type: ignore[arg-type]  # as they are
    assert want.keys() == found.keys()
    for name, weight in found.items():
        is_packed = isinstance(weight, PackedWeight)
        assert is_packed == name.endswith((".w13", ".w2")), name
        assert torch.equal(want[name], weight.decoded(torch.bfloat16) if is_packed else weight), name


def test_an_expert_has_both_weights_arranged_or_neither(caplog: pytest.LogCaptureFixture) -> None:
    config = ModelConfig.from_folder(TINY)
    packed = load_model_weights(TINY, config, dtype=torch.bfloat16, packed="products", progress=False)

    def arrange(weight: PackedWeight, halves: bool) -> Weight:
        if halves:  # as if a scale were too large
            return weight.decoded(weight.dtype)
        return ArrangedWeight(weight.records, weight.form, weight.shape, weight.dtype)

    params = build_params(packed, config, arrange=arrange)
    assert params.draft is not None
    experts = len((*params.layers, *params.draft.stages))
    assert f"{experts * 2 * 2} packed weights were decoded" in caplog.text  # routed and shared, both weights
    for layer in params.layers:
        assert isinstance(layer.ffn.w13, Tensor)
        assert isinstance(layer.ffn.w2, Tensor)
        assert isinstance(layer.attn.wo_b, ArrangedWeight)


@pytest.mark.bad_input
def test_columns_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(KernelError, match="K is 33"):
        pack_columns(drawn(33, 8), FP4_ROWS)


@pytest.mark.bad_input
def test_the_reference_refuses_what_a_provider_arranged() -> None:
    weight = ArrangedWeight(torch.zeros(1), FP4_ROWS, (32, 8), torch.float32)
    with pytest.raises(KernelError, match="arranged"):
        REFERENCE.linear(drawn(1, 32), weight)
