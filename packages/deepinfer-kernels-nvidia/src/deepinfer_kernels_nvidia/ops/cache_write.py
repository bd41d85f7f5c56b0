# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Quantise keys into packed cache records, byte for byte as the reference packs them (docs/model.md: Cache records).

    window      | D e4m3 codes                     | D / 32 e8m0 scales |   2^ceil(log2(max(amax, 1e-4) / 448))
    compressed  | D / 2 bytes of two e2m1 codes    | D / 16 e4m3 scales |   e4m3(max(amax, 6 * 2^-9) / 6)
    index       | D / 2 bytes of two e2m1 codes    | D / 32 e8m0 scales |   2^ceil(log2(max(amax, 6 * 2^-126) / 6))

One thread owns one group of values that share a scale (64 bytes of bf16 at most): no value crosses a thread, so there
is no reduction and no barrier, and a row's bytes depend on nothing else.

Rounding to e2m1 compares |v| with the seven midpoints of the grid times the scale: both factors are exact, so this
equals comparing v / scale with the midpoints, without the division. Magnitudes compare as integers do, so a word of two
bf16 (or one float32) is compared at once: with the sign bits set, a difference keeps them exactly where the magnitude
is not below. Ties go to the even code: of every second midpoint the next integer is the threshold.

    word          | 1 magnitude | 1 magnitude |  -  | 0 threshold | 0 threshold |   ->  sign bits: at or above it
    thermometer   t1 .. t7      bits of the code   t4;   t2 ^ t4 ^ t6;   t1 ^ t2 ^ .. ^ t7
"""

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program
from deepinfer_kernels_nvidia.ops.fp4 import HALF_BIAS, byte_permute, half_of_code

_THREADS = 128
_BLOCKS = 12  # of threads on a multiprocessor: the reads of many rows have to be under way
_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000
_MIDPOINTS = ((0.25, 1), (0.75, 0), (1.25, 1), (1.75, 0), (2.5, 1), (3.5, 0), (5.0, 1))  # 1: a value on it goes down
# dtype -> (values of a 32-bit word, their sign bits, their lowest bits, the bytes of a float32 that fill the word)
_WORDS = {"bfloat16": (2, 0x80008000, 0x00010001, 0x3232), "float32": (1, 0x80000000, 1, 0x3210)}
# kind -> (values that share a scale, bits of a value)
FORMATS = {"window": (32, 8), "compressed": (16, 4), "index": (32, 4)}


def _power_bits(x: Any) -> Any:
    """Bits of the smallest power of two >= x, a positive normal float."""
    return (T.reinterpret(x, "int32") + _MANTISSA) & _EXPONENT


def _thresholds(scale: Any, dtype: str) -> list[Any]:
    """Smallest magnitude that is not below each midpoint times the scale, in every place of a word."""
    _, _, ones, places = _WORDS[dtype]
    bits = [T.reinterpret(T.float32(midpoint) * scale, "uint32") for midpoint, _ in _MIDPOINTS]
    return [
        byte_permute(own, own, places) + T.uint32(ones * down) for own, (_, down) in zip(bits, _MIDPOINTS, strict=True)
    ]


def _nibbles(word: Any, thresholds: list[Any], dtype: str) -> Any:
    """e2m1 codes of the values of a word, in the top four bits of their places; other bits are undefined."""
    signs = _WORDS[dtype][1]
    above = word | T.uint32(signs)
    t1, t2, t3, t4, t5, t6, t7 = (above - threshold for threshold in thresholds)
    middle = t2 ^ t4 ^ t6
    low = middle ^ t1 ^ t3 ^ t5 ^ t7
    magnitude = ((t4 & T.uint32(signs)) >> 1) | ((middle & T.uint32(signs)) >> 2) | ((low & T.uint32(signs)) >> 3)
    return (word & T.uint32(signs)) | magnitude


@program
def write_records_program(kind: str, dim: int, dtype: str):
    """x [rows, dim] -> cache[where] of records."""
    rows, cache_rows = T.dynamic("rows"), T.dynamic("cache_rows")
    group, bits = FORMATS[kind]
    groups, group_bytes = dim // group, group * bits // 8
    value_bytes = groups * group_bytes
    in_word = _WORDS[dtype][0]

    @T.prim_func
    def write_records(
        x: T.Tensor((rows, dim), dtype),
        where: T.Tensor((rows,), "int64"),
        cache: T.Tensor((cache_rows, value_bytes + groups), "uint8"),
    ):
        with T.Kernel(T.ceildiv(rows * groups, _THREADS), threads=_THREADS) as block:
            T.annotate_min_blocks_per_sm(_BLOCKS)
            unit = block * _THREADS + T.get_thread_binding()
            row, g = unit // groups, unit % groups
            held = T.alloc_local((group,), dtype)
            word = T.view(held, (group // in_word,), "uint32")
            code = T.alloc_local((group_bytes,), "uint8")
            amax = T.alloc_var("float32")
            scale = T.alloc_var("float32")
            inverse = T.alloc_var("float32")
            scale_byte = T.alloc_var("uint8")
            if row < rows:
                for i in T.vectorized(group):
                    held[i] = x[row, g * group + i]
                amax = 0.0
                for i in T.unroll(group):
                    amax = T.max(amax, T.abs(T.cast(held[i], "float32")))
                if kind == "window":
                    power = _power_bits(T.max(amax, T.float32(1e-4)) * T.float32(1.0 / 448.0))
                    scale_byte = T.cast(power >> 23, "uint8")
                    inverse = T.reinterpret((254 << 23) - power, "float32")  # a power of two: exact
                    for i in T.unroll(group):
                        small = T.min(T.max(T.cast(held[i], "float32") * inverse, T.float32(-448.0)), T.float32(448.0))
                        code[i] = T.reinterpret(T.cast(small, "float8_e4m3fn"), "uint8")
                elif kind == "compressed":
                    rounded = T.cast(T.max(amax, T.float32(6.0 * 2.0**-9)) / T.float32(6.0), "float8_e4m3fn")
                    scale_byte = T.reinterpret(rounded, "uint8")
                    scale = T.cast(rounded, "float32")
                else:
                    power = _power_bits(T.max(amax, T.float32(6.0 * 2.0**-126)) / T.float32(6.0))
                    scale_byte = T.cast(power >> 23, "uint8")
                    scale = T.reinterpret(power, "float32")
                if kind != "window":
                    thresholds = _thresholds(scale, dtype)
                    for i in T.unroll(group_bytes):
                        if in_word == 2:
                            both = _nibbles(word[i], thresholds, dtype)
                            code[i] = T.cast(((both >> 12) & T.uint32(15)) | ((both >> 24) & T.uint32(240)), "uint8")
                        else:
                            even, odd = (_nibbles(word[2 * i + j], thresholds, dtype) for j in (0, 1))
                            code[i] = T.cast((even >> 28) | ((odd >> 24) & T.uint32(240)), "uint8")
                for i in T.vectorized(group_bytes):
                    cache[where[row], g * group_bytes + i] = code[i]
                cache[where[row], value_bytes + g] = scale_byte

    return write_records


@program
def round_index_program(dim: int, dtype: str):
    """x [rows, dim] -> the values that index records would hold."""
    rows = T.dynamic("rows")
    group = FORMATS["index"][0]
    groups = dim // group
    in_word = _WORDS[dtype][0]

    @T.prim_func
    def round_index(x: T.Tensor((rows, dim), dtype), out: T.Tensor((rows, dim), dtype)):
        with T.Kernel(T.ceildiv(rows * groups, _THREADS), threads=_THREADS) as block:
            T.annotate_min_blocks_per_sm(_BLOCKS)
            unit = block * _THREADS + T.get_thread_binding()
            row, g = unit // groups, unit % groups
            held = T.alloc_local((group,), dtype)
            word = T.view(held, (group // in_word,), "uint32")
            amax = T.alloc_var("float32")
            scale = T.alloc_var("float32")
            codes = T.alloc_var("uint32")
            if row < rows:
                for i in T.vectorized(group):
                    held[i] = x[row, g * group + i]
                amax = 0.0
                for i in T.unroll(group):
                    amax = T.max(amax, T.abs(T.cast(held[i], "float32")))
                power = _power_bits(T.max(amax, T.float32(6.0 * 2.0**-126)) / T.float32(6.0))
                scale = T.reinterpret(power, "float32")
                thresholds = _thresholds(scale, dtype)
                for w in T.unroll(group // in_word):
                    codes = _nibbles(word[w], thresholds, dtype)
                    for i in T.unroll(in_word):
                        code = T.cast(codes >> (32 // in_word * (i + 1) - 4), "int32")
                        held[w * in_word + i] = T.cast(half_of_code(code), "float32") * T.float32(HALF_BIAS) * scale
                for i in T.vectorized(group):
                    out[row, g * group + i] = held[i]

    return round_index


def write_window(cache: Tensor, rows: Tensor, keys: Tensor) -> None:
    """Window records of keys [R, hd] into cache[rows]; see contract `write_window`."""
    _write("window", cache, rows, keys)


def write_entries(cache: Tensor, rows: Tensor, entries: Tensor) -> None:
    """Compressed records of latents [R, hd] into cache[rows]; see contract `write_entries`."""
    _write("compressed", cache, rows, entries)


def write_index_keys(cache: Tensor, rows: Tensor, keys: Tensor) -> None:
    """Index records of keys [R, Di] into cache[rows]; see contract `write_index_keys`."""
    _write("index", cache, rows, keys)


def _write(kind: str, cache: Tensor, rows: Tensor, values: Tensor) -> None:
    if len(rows):
        write_records_program(kind, values.shape[1], dtype_name(values))(aligned(values), rows.contiguous(), cache)


def round_index(x: Tensor) -> Tensor:
    """x [..., Di] rounded as index keys are; see contract `round_index`."""
    x = aligned(x)
    out = torch.empty_like(x)
    if x.numel():
        dim = x.shape[-1]
        round_index_program(dim, dtype_name(x))(x.view(-1, dim), out.view(-1, dim))
    return out
