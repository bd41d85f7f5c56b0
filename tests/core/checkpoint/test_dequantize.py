"""Dequantization and its inverse against values worked out number by number in Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer_core.checkpoint.dequantize import dequantize_fp4, dequantize_fp8_blocks, dequantize_rows, e8m0_to_float32
from deepinfer_core.checkpoint.quantize import quantize_fp4, quantize_fp8_blocks, quantize_rows

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def e2m1(nibble: int) -> float:
    return -E2M1[nibble & 7] if nibble & 8 else E2M1[nibble & 7]


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def no_nan(codes: Tensor) -> Tensor:
    return torch.where(codes & 127 == 127, codes & 128, codes)


def test_every_scale_byte_is_its_power_of_two() -> None:
    values = e8m0_to_float32(torch.arange(256, dtype=torch.uint8))
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(values[255])


def test_every_e4m3_code_has_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    values = dequantize_rows(codes, torch.full((8, 1), 127, dtype=torch.uint8)).flatten().tolist()
    for byte, value in enumerate(values):
        assert math.isnan(value) if math.isnan(e4m3(byte)) else value == e4m3(byte)


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (64, 96), (33, 70), (1, 1), (40, 32)])
def test_fp8_blocks_are_scaled_by_the_block_that_holds_them(rows: int, columns: int) -> None:
    codes = no_nan(random_bytes(rows, columns))
    scales = random_bytes(-(-rows // 32), -(-columns // 32), low=100, high=150)
    values = dequantize_fp8_blocks(codes, scales)
    assert values.tolist() == [
        [e4m3(int(codes[i, j])) * 2.0 ** (int(scales[i // 32, j // 32]) - 127) for j in range(columns)]
        for i in range(rows)
    ]


@pytest.mark.parametrize("columns", [32, 64, 36, 2])
def test_fp4_has_the_even_column_in_the_low_nibble(columns: int) -> None:
    packed = random_bytes(5, columns // 2)
    scales = random_bytes(5, -(-columns // 32), low=100, high=150)
    values = dequantize_fp4(packed.view(torch.int8), scales.view(torch.float8_e8m0fnu))
    assert values.tolist() == [
        [
            e2m1(int(packed[i, j // 2]) >> (4 * (j % 2)) & 15) * 2.0 ** (int(scales[i, j // 32]) - 127)
            for j in range(columns)
        ]
        for i in range(5)
    ]


def test_leading_dimensions_are_a_batch() -> None:
    codes, scales = no_nan(random_bytes(3, 2, 40, 70)), random_bytes(3, 2, 2, 3, low=120, high=130)
    values = dequantize_fp8_blocks(codes, scales)
    assert torch.equal(values[2, 1], dequantize_fp8_blocks(codes[2, 1], scales[2, 1]))
    packed, fp4_scales = random_bytes(3, 4, 32), random_bytes(3, 4, 2, low=120, high=130)
    assert torch.equal(dequantize_fp4(packed, fp4_scales)[2], dequantize_fp4(packed[2], fp4_scales[2]))


def test_bfloat16_holds_the_same_values() -> None:
    codes, scales = no_nan(random_bytes(64, 64)), random_bytes(2, 2, low=10, high=240)
    assert torch.equal(
        dequantize_fp8_blocks(codes, scales, torch.bfloat16).float(), dequantize_fp8_blocks(codes, scales)
    )
    packed, row_scales = random_bytes(8, 32), random_bytes(8, 2, low=10, high=240)
    assert torch.equal(dequantize_fp4(packed, row_scales, torch.bfloat16).float(), dequantize_fp4(packed, row_scales))


def test_values_on_the_grid_survive_quantization() -> None:
    fp8 = dequantize_fp8_blocks(no_nan(random_bytes(70, 50)), random_bytes(3, 2, low=100, high=150))
    assert torch.equal(dequantize_fp8_blocks(*quantize_fp8_blocks(fp8)), fp8)
    fp4 = dequantize_fp4(random_bytes(70, 25), random_bytes(70, 2, low=100, high=150))
    assert torch.equal(dequantize_fp4(*quantize_fp4(fp4)), fp4)
    rows = dequantize_rows(no_nan(random_bytes(9, 40)), random_bytes(9, 2, low=100, high=150))
    assert torch.equal(dequantize_rows(*quantize_rows(rows)), rows)


def nearest(value: float, grid: list[float]) -> set[float]:
    distance = min(abs(value - point) for point in grid)
    return {point for point in grid if abs(value - point) == distance}


def test_quantization_takes_the_smallest_scale_that_fits_and_the_nearest_code() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(40, 64, generator=generator) * torch.logspace(-6, 6, 40)[:, None]
    packed, scales = quantize_fp4(values)
    assert packed.dtype == torch.int8
    assert packed.shape == (40, 32)
    back = dequantize_fp4(packed, scales)
    for i in range(40):
        for group in range(2):
            chunk = values[i, group * 32 : group * 32 + 32]
            scale = 2.0 ** math.ceil(math.log2(float(chunk.abs().max()) / 6))
            assert e8m0_to_float32(scales)[i, group] == scale
            for value, result in zip(chunk.tolist(), back[i, group * 32 :].tolist(), strict=False):
                assert abs(result / scale) in nearest(abs(value) / scale, E2M1)


def test_an_fp8_block_has_one_scale_for_32_rows_and_columns() -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    values[32:, 32:] *= 1000
    codes, scales = quantize_fp8_blocks(values)
    assert codes.dtype == torch.float8_e4m3fn
    expected = [
        [2.0 ** math.ceil(math.log2(float(values[i : i + 32, j : j + 32].abs().max()) / 448)) for j in (0, 32)]
        for i in (0, 32)
    ]
    assert e8m0_to_float32(scales).tolist() == expected
    error = (dequantize_fp8_blocks(codes, scales) - values).abs()
    assert (error <= values.abs() * 2.0**-4 + 2.0**-9).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 448.0, -448.0, 1e-30, 1e38])
def test_extreme_blocks_stay_finite_and_keep_their_sign(value: float) -> None:
    block = torch.full((32, 32), value)
    for back in (dequantize_fp8_blocks(*quantize_fp8_blocks(block)), dequantize_fp4(*quantize_fp4(block))):
        assert torch.isfinite(back).all()
        assert torch.equal(torch.signbit(back), torch.signbit(block))


def test_the_inputs_of_quantization_are_left_alone() -> None:
    values = torch.randn(3, 40, 34)
    copy = values.clone()
    for quantize in (quantize_fp8_blocks, quantize_fp4, quantize_rows):
        quantize(values)
    assert torch.equal(values, copy)
