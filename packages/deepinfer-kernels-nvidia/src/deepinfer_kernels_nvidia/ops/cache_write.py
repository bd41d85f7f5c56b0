# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Quantise keys into packed cache records, byte for byte as the reference packs them (model.md 2.4, 3.1).

    window      | D e4m3 codes                     | D / 32 e8m0 scales |   2^ceil(log2(max(amax, 1e-4) / 448))
    compressed  | D / 2 bytes of two e2m1 codes    | D / 16 e4m3 scales |   e4m3(max(amax, 6 * 2^-9) / 6)
    index       | D / 2 bytes of two e2m1 codes    | D / 32 e8m0 scales |   2^ceil(log2(max(amax, 6 * 2^-126) / 6))

One thread owns one group of values that share a scale (64 bytes of bf16 at most): no value crosses a thread, so there
is no reduction and no barrier, and a row's bytes depend on nothing else. Rounding to e2m1 compares |v| with the seven
midpoints of the grid times the scale: both factors are exact, so this equals comparing v / scale with the midpoints,
without the division. Ties go to the even code, so every second comparison is strict.
"""

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program

_THREADS = 128
_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000
# Midpoint, whether a value on it goes up, and what crossing it adds to the magnitude.
_STEPS = (
    (0.25, False, 0.5),
    (0.75, True, 0.5),
    (1.25, False, 0.5),
    (1.75, True, 0.5),
    (2.5, False, 1.0),
    (3.5, True, 1.0),
    (5.0, False, 2.0),
)
# kind -> (values that share a scale, bits of a value)
FORMATS = {"window": (32, 8), "compressed": (16, 4), "index": (32, 4)}


def _power_bits(x: Any) -> Any:
    """Bits of the smallest power of two >= x, a positive normal float."""
    return (T.reinterpret(x, "int32") + _MANTISSA) & _EXPONENT


def _above(magnitude: Any, midpoint: Any, inclusive: bool) -> Any:
    return magnitude >= midpoint if inclusive else magnitude > midpoint


def _code(value: Any, scale: Any) -> Any:
    """e2m1 code of value / scale: the number of midpoints below it, and the sign bit."""
    magnitude = T.abs(value)
    code = (T.reinterpret(value, "uint32") >> 31) << 3
    for midpoint, inclusive, _ in _STEPS:
        code = code + T.if_then_else(_above(magnitude, midpoint * scale, inclusive), T.uint32(1), T.uint32(0))
    return code


@program
def write_records_program(kind: str, dim: int, dtype: str):
    """x [rows, dim] -> cache[where] of records."""
    rows, cache_rows = T.dynamic("rows"), T.dynamic("cache_rows")
    group, bits = FORMATS[kind]
    groups, group_bytes = dim // group, group * bits // 8
    value_bytes = groups * group_bytes

    @T.prim_func
    def write_records(
        x: T.Tensor((rows, dim), dtype),
        where: T.Tensor((rows,), "int64"),
        cache: T.Tensor((cache_rows, value_bytes + groups), "uint8"),
    ):
        with T.Kernel(T.ceildiv(rows * groups, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            row, g = unit // groups, unit % groups
            value = T.alloc_local((group,), "float32")
            code = T.alloc_local((group_bytes,), "uint8")
            amax = T.alloc_var("float32")
            scale = T.alloc_var("float32")
            inverse = T.alloc_var("float32")
            scale_byte = T.alloc_var("uint8")
            if row < rows:
                for i in T.vectorized(group):
                    value[i] = x[row, g * group + i]
                amax = 0.0
                for i in T.unroll(group):
                    amax = T.max(amax, T.abs(value[i]))
                if kind == "window":
                    power = _power_bits(T.max(amax, T.float32(1e-4)) * T.float32(1.0 / 448.0))
                    scale_byte = T.cast(power >> 23, "uint8")
                    inverse = T.reinterpret((254 << 23) - power, "float32")  # a power of two: exact
                    for i in T.unroll(group):
                        small = T.min(T.max(value[i] * inverse, T.float32(-448.0)), T.float32(448.0))
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
                    for i in T.unroll(group_bytes):
                        even, odd = _code(value[2 * i], scale), _code(value[2 * i + 1], scale)
                        code[i] = T.cast(even | (odd << 4), "uint8")
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

    @T.prim_func
    def round_index(x: T.Tensor((rows, dim), dtype), out: T.Tensor((rows, dim), dtype)):
        with T.Kernel(T.ceildiv(rows * groups, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            row, g = unit // groups, unit % groups
            value = T.alloc_local((group,), "float32")
            amax = T.alloc_var("float32")
            scale = T.alloc_var("float32")
            magnitude = T.alloc_var("float32")
            if row < rows:
                for i in T.vectorized(group):
                    value[i] = x[row, g * group + i]
                amax = 0.0
                for i in T.unroll(group):
                    amax = T.max(amax, T.abs(value[i]))
                power = _power_bits(T.max(amax, T.float32(6.0 * 2.0**-126)) / T.float32(6.0))
                scale = T.reinterpret(power, "float32")
                for i in T.unroll(group):
                    magnitude = 0.0
                    for midpoint, inclusive, step in _STEPS:
                        crossed = _above(T.abs(value[i]), midpoint * scale, inclusive)
                        magnitude += T.if_then_else(crossed, T.float32(step), 0.0)
                    value[i] = T.copysign(magnitude * scale, value[i])
                for i in T.vectorized(group):
                    out[row, g * group + i] = value[i]

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
