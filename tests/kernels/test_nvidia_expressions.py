"""The expressions that the TileLang programs are made of, evaluated in numpy instead of compiled.

They are ordinary Python functions over a language object; here that object is numpy, whose unsigned words wrap and
shift as a GPU's do.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_core.kernels.reference.records import COMPRESSED, INDEX, RecordFormat, pack

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])


def byte_permute(low: Any, high: Any, selector: Any) -> Any:
    """CUDA's __byte_perm without the sign replication, which the programs never ask for."""
    octets = np.stack([(word >> np.uint32(8 * i)) & np.uint32(255) for word in (low, high) for i in range(4)], -1)
    picks = [(selector >> np.uint32(4 * i)) & np.uint32(15) for i in range(4)]
    assert all((pick < 8).all() for pick in picks)
    chosen = [np.take_along_axis(octets, pick[..., None].astype(int), -1)[..., 0] for pick in picks]
    return sum((byte << np.uint32(8 * i) for i, byte in enumerate(chosen)), np.zeros_like(chosen[0]))


def call_extern(dtype: str, name: str, *operands: Any) -> Any:
    assert (dtype, name) == ("uint32", "__byte_perm")
    return byte_permute(*np.broadcast_arrays(*(np.asarray(operand, np.uint32) for operand in operands)))


NUMPY = SimpleNamespace(
    uint32=np.uint32,
    float32=np.float32,
    int32=np.int32,
    if_then_else=np.where,
    cast=lambda value, dtype: np.asarray(value).astype(dtype),
    reinterpret=lambda value, dtype: np.ascontiguousarray(value).view(dtype),
    call_extern=call_extern,
)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the operations, with numpy in TileLang's place."""
    # Names of operations hide those of some modules in the package.
    names = ("cache_write", "fp4", "fp8", "indexer", "select")
    modules = SimpleNamespace(**{name: import_module(f"deepinfer_kernels_nvidia.ops.{name}") for name in names})
    for module in vars(modules).values():
        monkeypatch.setattr(module, "T", NUMPY)
    return modules


def code_words() -> np.ndarray:
    """Words of eight codes in which every code stands in every place."""
    return np.random.default_rng(1).integers(0, 2**32, 4096, dtype=np.uint32)


def codes_of(words: np.ndarray) -> np.ndarray:
    return np.stack([(words >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)], -1)


def test_eight_codes_become_bf16_in_their_order(ops: SimpleNamespace) -> None:
    words = code_words()
    pairs = np.stack(ops.fp4.bf16_of_codes(words), -1)  # [n, 4]
    halves = np.stack([pairs & np.uint32(0xFFFF), pairs >> np.uint32(16)], -1).reshape(len(words), 8)
    values = (halves << np.uint32(16)).view(np.float32)
    np.testing.assert_array_equal(values, VALUES[codes_of(words)])


@pytest.mark.parametrize("exponent", [2, 0, -5, -13, -14, -15])
def test_eight_codes_become_e5m2_with_a_power_of_two(ops: SimpleNamespace, exponent: int) -> None:
    words = code_words()
    low, high = ops.fp4.e5m2_table(exponent)
    found = np.stack(ops.fp4.octets_of_codes(words, np.uint32(low), np.uint32(high)), -1)  # [n, 2]
    values = torch.from_numpy(found.view(np.uint8)).view(torch.float8_e5m2).float().numpy()
    np.testing.assert_array_equal(values, VALUES[codes_of(words)] * np.float32(2.0**exponent))


def test_a_power_that_e5m2_cannot_hold_counts_as_zero(ops: SimpleNamespace) -> None:
    tables = {below: (low, high) for below, low, high in ops.indexer.TABLES}
    assert sorted(tables) == list(range(len(tables)))
    last = max(tables)
    assert tables[last] == (0, 0)
    halves = [first >> 8 & 0xFF for first, _ in tables.values()]  # bytes of the least magnitude
    assert halves[last - 1] == 1  # e5m2's smallest number
    assert halves == sorted(halves, reverse=True)
    assert len(set(halves)) == len(halves)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160, 256, 512])
def test_no_dot_product_of_encoded_vectors_leaves_f16(dim: int) -> None:
    from deepinfer_kernels_nvidia.ops.index_queries import query_headroom

    largest_key = max(
        torch.tensor([first, second], dtype=torch.uint32).view(torch.float8_e5m2).float().max().item()
        for _, first, second in import_module("deepinfer_kernels_nvidia.ops.indexer").TABLES
    )
    assert dim * largest_key * 2.0 ** (query_headroom(dim) + 1) <= torch.finfo(torch.float16).max


@pytest.mark.parametrize("dim", [32, 96, 128])
def test_queries_lie_as_a_lane_decodes_its_words_of_a_key(dim: int) -> None:
    """mma's 8-bit operand: register h of a step has bytes 16 h + 4 t + i of its 32 in lane t (PTX, m16n8k32)."""
    from deepinfer_kernels_nvidia.ops.index_queries import value_at

    words_of_lanes = np.arange(dim).reshape(4, -1, 2, 4)  # [lane, word, register, byte]: each lane a run of the codes
    operand = words_of_lanes.transpose(1, 2, 0, 3).ravel()  # [step, register, lane, byte]
    assert [value_at(place, dim) for place in range(dim)] == operand.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("fmt", "group"), [(COMPRESSED, 16), (INDEX, 32)])
def test_comparing_words_finds_the_codes(
    ops: SimpleNamespace, fmt: RecordFormat, group: int, dtype: torch.dtype
) -> None:
    """Values on, beside and between the midpoints, for many scales; the oracle is the reference's `pack`."""
    generator = torch.Generator().manual_seed(2)
    powers = torch.randint(-12, 12, (4000, 1), generator=generator)
    x = torch.randn(4000, group, generator=generator) * torch.exp2(powers)
    x[:2000, :7] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x[:2000, 7] = 6.0
    x[:2000, 8:] = x[:2000, 8:].clamp(-6, 6)
    x[:1000] *= torch.exp2(powers[:1000] // 2)
    x[3] = 0
    x = x.to(dtype)
    records = pack(x.float(), fmt)
    scale = records[:, group // 2 :].view(torch.float8_e4m3fn if fmt is COMPRESSED else torch.float8_e8m0fnu).float()
    name = str(dtype).removeprefix("torch.")
    word = x.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).numpy().view(np.uint32)
    nibbles = ops.cache_write._nibbles(word, ops.cache_write._thresholds(scale.numpy(), name), name)
    if dtype == torch.bfloat16:
        nibbles = np.stack([nibbles << np.uint32(16), nibbles], -1).reshape(len(x), group)
    codes = (nibbles >> np.uint32(28)).astype(np.uint8)
    np.testing.assert_array_equal(codes[:, ::2] | codes[:, 1::2] << 4, records[:, : group // 2].numpy())


def bf16_pairs(words: Any) -> np.ndarray:
    """[n] words of two bf16 -> [n, 2] float32."""
    words = np.asarray(words, np.uint32)
    return np.stack([words << np.uint32(16), words & np.uint32(0xFFFF0000)], -1).view(np.float32)


def e4m3_values() -> np.ndarray:
    """The values of the 256 bytes; NaN for two of them, which no record holds."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def test_four_e4m3_become_bf16_in_their_order(ops: SimpleNamespace) -> None:
    octets = np.setdiff1d(np.arange(256), (0x7F, 0xFF)).astype(np.uint8)
    octets = np.stack([np.roll(octets, i) for i in range(4)], -1)
    words = np.ascontiguousarray(octets).view(np.uint32)[:, 0]
    found = np.concatenate([bf16_pairs(pair) for pair in ops.fp8.bf16_of_e4m3(words)], -1)
    np.testing.assert_array_equal(found * np.float32(2.0**120), e4m3_values()[octets])


@pytest.mark.parametrize("place", [0, 1])
def test_a_scale_becomes_two_equal_bf16(ops: SimpleNamespace, place: int) -> None:
    scales = np.arange(127, dtype=np.uint32)
    other = np.uint32(0x5A << 8 * (1 - place))
    found = bf16_pairs(ops.fp8.bf16_of_scale(scales << np.uint32(8 * place) | other, place))
    np.testing.assert_array_equal(found * np.float32(2.0**120), np.repeat(e4m3_values()[:127, None], 2, 1))


def test_the_exponent_of_a_power_becomes_two_equal_bf16(ops: SimpleNamespace) -> None:
    exponents = np.arange(1, 255, dtype=np.uint32)
    found = bf16_pairs(ops.fp8.pair_of_power(exponents))
    np.testing.assert_array_equal(found, np.repeat(np.ldexp(np.float32(1), exponents.astype(int) - 127)[:, None], 2, 1))


def test_the_bits_of_a_score_order_as_the_score_does(ops: SimpleNamespace) -> None:
    scores = np.array([-np.inf, -1e30, -1.0, -1e-45, 0.0, 1e-45, 0.5, 1.0, 3e38, np.inf], np.float32)
    bits = ops.select.ordered_bits(scores)
    assert (np.diff(bits.astype(np.int64)) > 0).all()
    assert ops.select.ordered_bits(np.array([-0.0], np.float32)) == ops.select.ordered_bits(np.array([0.0], np.float32))
    assert bits[0] == ops.select.HIDDEN
