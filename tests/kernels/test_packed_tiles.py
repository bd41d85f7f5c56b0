"""Packed weights arranged for the tensor core: what each thread's registers hold once it has decoded its words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.kernels.reference.packed import FP4_ROWS, FP8_ROWS, ArrangedWeight, PackedWeight, pack_columns
from deepinfer_core.kernels.reference.records import RecordFormat

WORD = (1 << 32) - 1
FORMS = pytest.mark.parametrize("form", [FP4_ROWS, FP8_ROWS], ids=["FP4", "FP8"])


@pytest.fixture(scope="module")
def tiles() -> Any:
    pytest.importorskip("tilelang")
    from deepinfer_kernels_nvidia.ops import packed_tiles

    return packed_tiles


def random_weight(form: RecordFormat, *shape: int) -> PackedWeight:
    """Any codes but NaN, scales of 2^-27 .. 2^0."""
    *outer, k, n = shape
    generator = torch.Generator().manual_seed(k + n)
    codes = torch.randint(0, 256, (*outer, n, k * form.value_bits // 8), dtype=torch.uint8, generator=generator)
    if form is FP8_ROWS:
        codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)
    scales = torch.randint(100, 128, (*outer, n, k // 32), dtype=torch.uint8, generator=generator)
    return PackedWeight(torch.cat([codes, scales], -1), form, torch.bfloat16)


def registers_of(form: RecordFormat, words: Tensor) -> list[Tensor]:
    """The shifts and masks of the kernel, in the order of a thread's registers."""
    if form is FP4_ROWS:
        return [
            words & 0x81C081C0,
            words << 3 & 0x81C081C0,
            words << 6 & 0x01C001C0 | words << 1 & 0x80008000,
            words >> 3 & 0x01C001C0 | words << 2 & 0x80008000,
        ]
    return [words & 0x87F087F0, words << 4 & 0x80F080F0 | words >> 4 & 0x07000700]


def decoded(form: RecordFormat, tiles: Tensor) -> Tensor:
    """[tiles, steps, words] -> [64 tiles, 64 steps] float64, by the rule that a product's operand is laid out by."""
    bits = form.value_bits
    words = tiles.long() & WORD
    scales = words[..., -32:]  # [.., warp and octet]
    own = 64 * 64 * bits // 32 // 128
    codes = words[..., :-32].unflatten(-1, (own // 4, 128, 4)).transpose(-3, -2).flatten(-2)  # [.., thread, word]
    registers = torch.stack(registers_of(form, codes), -1).flatten(-2)  # [.., thread, 16]
    out = torch.empty(*tiles.shape[:2], 64, 64, dtype=torch.float64)
    for thread in range(128):
        warp, octet, lane = thread // 32, thread % 32 // 4, thread % 4
        for register in range(16):
            step, half, side = register // 4, register // 2 % 2, register % 2
            power = 2.0 ** ((scales[..., thread // 4] >> 8 * (2 * (step // 2) + side) & 0xFF) - 127.0)
            for which in range(2):
                pattern = registers[..., thread, register] >> 16 * which & 0xFFFF
                value = (pattern << 16).int().view(torch.float32).double()
                column, k = 16 * warp + 8 * side + octet, 16 * step + 8 * half + 2 * lane + which
                out[..., column, k] = value * power
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


@FORMS
def test_a_thread_finds_the_values_of_its_registers(tiles: Any, form: RecordFormat) -> None:
    weight = random_weight(form, 128, 72)
    made = tiles.arranged(weight, False)
    assert isinstance(made, ArrangedWeight)
    assert made.shape == weight.shape
    values = decoded(form, made.tiles)
    assert torch.equal(values[:72], weight.decoded(torch.float32).T.double())
    assert not values[72:].any()


@FORMS
def test_gate_and_up_columns_stand_octet_by_octet_in_turn(tiles: Any, form: RecordFormat) -> None:
    weight = random_weight(form, 2, 64, 80)
    made = tiles.arranged(weight, True)
    for expert in range(2):
        values = decoded(form, made.tiles[expert]).unflatten(0, (-1, 2, 8))  # [octets, gate or up, 8, K]
        both = values.transpose(0, 1).flatten(1, 2)[:, :40]
        assert torch.equal(both, weight.decoded(torch.float32)[expert].T.unflatten(0, (2, 40)).double())


@FORMS
@pytest.mark.parametrize("change", ["scale", "columns"])
def test_a_weight_that_the_kernels_cannot_take_is_decoded(tiles: Any, form: RecordFormat, change: str) -> None:
    weight = random_weight(form, 64, 30 if change == "columns" else 32)
    if change == "scale":
        weight.scales[3, 1] = 140
    made = tiles.arranged(weight, False)
    assert torch.equal(made, weight.decoded(torch.bfloat16))


def test_no_experts_are_no_tiles(tiles: Any) -> None:
    made = tiles.arranged(pack_columns(torch.zeros(0, 64, 32), FP4_ROWS), True)
    assert made.shape == (0, 64, 32)
    assert len(made.tiles) == 0
