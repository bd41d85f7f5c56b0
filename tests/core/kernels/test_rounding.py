"""Cache roundings against values worked out by hand or with exact rational arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from deepinfer_core.kernels.reference.records import COMPRESSED, INDEX, WINDOW, RecordFormat, pack, unpack
from deepinfer_core.kernels.reference.rounding import (
    ceil_power_of_two,
    round_compressed,
    round_e2m1,
    round_e4m3,
    round_index,
    round_window,
)

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def e4m3_values() -> list[Fraction]:
    """The 127 non-negative finite values by definition: exponent bias 7, 3 bits of mantissa, S.1111.111 = NaN."""
    subnormal = [Fraction(m, 8 * 64) for m in range(8)]
    normal = [
        Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if not (e == 15 and m == 7)
    ]
    return subnormal + normal


def nearest(grid: list[Fraction], x: float) -> float:
    """Nearest value, ties to the even code; grid in code order."""
    best = min(range(len(grid)), key=lambda code: (abs(grid[code] - Fraction(abs(x))), code % 2))
    return math.copysign(float(grid[best]), x)


@pytest.mark.parametrize(
    ("x", "expected"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0), (5.1, 6.0), (7.0, 6.0)],
)
def test_e2m1_ties_go_to_the_even_code(x: float, expected: float) -> None:
    assert round_e2m1(torch.tensor([x, -x])).tolist() == [expected, -expected]


def test_e2m1_is_the_nearest_value_everywhere() -> None:
    xs = torch.linspace(-8, 8, 4097)
    assert round_e2m1(xs).tolist() == [nearest(E2M1, min(abs(x), 6.0) * (1 if x >= 0 else -1)) for x in xs.tolist()]


def test_e4m3_is_the_nearest_value_and_saturates() -> None:
    grid = e4m3_values()
    xs = torch.cat([torch.logspace(-4, 2.7, 800), -torch.logspace(-4, 2.7, 800), torch.tensor([448.0, 464.0, 1e9])])
    expected = [nearest(grid, max(-448.0, min(448.0, x))) for x in xs.tolist()]
    assert round_e4m3(xs).tolist() == expected


def test_the_scale_is_the_next_power_of_two_for_every_mantissa_near_one() -> None:
    ones = torch.arange(2**12, dtype=torch.int32) + 0x3F800000 - 2**11  # floats around 1.0
    x = ones.view(torch.float32)
    assert ceil_power_of_two(x).tolist() == [1.0 if value <= 1.0 else 2.0 for value in x.tolist()]


@pytest.mark.parametrize("exponent", [-120, -30, -1, 0, 1, 60, 120])
def test_powers_of_two_are_their_own_scale(exponent: int) -> None:
    x = torch.tensor([2.0**exponent])
    assert ceil_power_of_two(x).item() == 2.0**exponent
    assert ceil_power_of_two(x * (1 + 2**-23)).item() == 2.0 ** (exponent + 1)


def test_window_groups_have_their_own_scales() -> None:
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1], x[0, 40] = 448.0, 1.0, 3.0
    rounded = round_window(x)
    assert rounded[0, 0].item() == 448.0  # scale 1
    assert rounded[0, 1].item() == 1.0
    assert rounded[0, 40].item() == 3.0  # scale 2^-7: 384 is on the grid
    assert torch.count_nonzero(rounded).item() == 3


def test_compressed_scale_is_a_division_by_six_in_e4m3() -> None:
    x = torch.zeros(1, 16)
    x[0, 0] = 7.0  # 7 / 6 = 1.1667 -> e4m3 1.125; 7 / 1.125 = 6.2 -> 6
    x[0, 1] = 1.0  # 0.888 -> 1.0
    assert round_compressed(x)[0, :2].tolist() == [6.75, 1.125]


def test_index_scale_is_a_power_of_two() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 7.0, 2.6  # scale 2: 3.5 -> 4, 1.3 -> 1.5
    assert round_index(x)[0, :2].tolist() == [8.0, 3.0]


@pytest.mark.parametrize(("fmt", "fn"), [(WINDOW, round_window), (COMPRESSED, round_compressed), (INDEX, round_index)])
def test_packed_records_hold_exactly_the_rounded_values(fmt: RecordFormat, fn: Callable[[Tensor], Tensor]) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(200, 512, generator=g) * torch.exp(torch.randn(200, 1, generator=g) * 5)
    x[0] = 0.0
    x[1] = 1e-30
    records = pack(x, fmt)
    assert records.shape[1] == fmt.num_bytes(512)
    assert torch.equal(unpack(records, fmt), fn(x))
    assert torch.equal(fn(x), fn(x).to(torch.bfloat16).float())  # exact in bfloat16


@pytest.mark.parametrize(("fmt", "dim", "size"), [(WINDOW, 512, 528), (COMPRESSED, 512, 288), (INDEX, 128, 68)])
def test_records_have_the_released_sizes(fmt: RecordFormat, dim: int, size: int) -> None:
    assert fmt.num_bytes(dim) == size
    assert pack(torch.ones(1, dim), fmt).shape == (1, size)


def test_the_even_value_sits_in_the_low_nibble() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 6.0, -0.5  # scale 1: codes 7 and 9
    assert pack(x, INDEX)[0, 0].item() == 7 | (9 << 4)
