# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Quantise keys into packed cache records, byte for byte as the reference packs them (docs/model.md: Cache records).

    window      | D e4m3 codes                     | D / 32 e8m0 scales |   2^ceil(log2(max(amax, 1e-4) / 448))
    compressed  | D / 2 bytes of two e2m1 codes    | D / 16 e4m3 scales |   e4m3(max(amax, 6 * 2^-9) / 6)
    index       | D / 2 bytes of two e2m1 codes    | D / 32 e8m0 scales |   2^ceil(log2(max(amax, 6 * 2^-126) / 6))

One thread owns one group of values that share a scale. All roundings are integer arithmetic on the bits of a float32,
so that they need no conversion of the device and run alike on a host (tests/kernels/ascend_host.py):

    e4m3   normal:  bits + half of the 20 lost ones, ties to even; the exponent's bias goes from 127 to 7
           below 2^-6:  |v| + 2^14 leaves the multiple of 2^-9 in the last bits
    e2m1   the number of midpoints of the grid, times the scale, that lie below |v|
"""

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels_ascend.jit import BLOCKS, THREADS, T, dtype_name, each_unit, program

_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000
_LOST_BITS, _BIAS_CHANGE = 20, (127 - 7) << 3
_SMALLEST_NORMAL, _ALIGN_SUBNORMAL = 2.0**-6, 2.0**14
# Midpoint of two neighbours, and whether a value on it goes up: to the even code.
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
# kind -> (values that share a scale, bits of a value)
FORMATS = {"window": (32, 8), "compressed": (16, 4), "index": (32, 4)}


def _power_bits(x: Any) -> Any:
    """Bits of the smallest power of two >= x, a positive normal float."""
    return (T.reinterpret(x, "int32") + _MANTISSA) & _EXPONENT


def _e4m3_code(x: Any) -> Any:
    """e4m3 code (int32, without sign) of 0 <= x <= 448, to nearest, ties to even."""
    bits = T.reinterpret(x, "int32")
    normal = ((bits + ((1 << (_LOST_BITS - 1)) - 1) + ((bits >> _LOST_BITS) & 1)) >> _LOST_BITS) - _BIAS_CHANGE
    subnormal = T.reinterpret(x + T.float32(_ALIGN_SUBNORMAL), "int32") & 0xF
    return T.if_then_else(x < T.float32(_SMALLEST_NORMAL), subnormal, normal)


def e4m3_value(code: Any) -> Any:
    """float32 of an e4m3 code (int32) without sign."""
    normal = T.reinterpret((code + _BIAS_CHANGE) << _LOST_BITS, "float32")
    return T.if_then_else(code < 8, T.cast(code, "float32") * T.float32(2.0**-9), normal)


def _e2m1_code(magnitude: Any, scale: Any) -> Any:
    """Number (int32) of midpoints below magnitude / scale; the products are exact."""
    code = T.int32(0)
    for midpoint, inclusive in _MIDPOINTS:
        edge = T.float32(midpoint) * scale
        above = magnitude >= edge if inclusive else magnitude > edge
        code = code + T.if_then_else(above, T.int32(1), T.int32(0))
    return code


def e2m1_value(code: Any) -> Any:
    """float32 of an e2m1 magnitude code: 0, 0.5, then 1 + m/2 times powers of two."""
    normal = T.reinterpret(((code >> 1) + 126 << 23) | ((code & 1) << 22), "float32")
    return T.if_then_else(code < 2, T.cast(code, "float32") * T.float32(0.5), normal)


def _sign(x: Any) -> Any:
    """1 where the sign bit of a float32 is set, else 0."""
    return (T.reinterpret(x, "int32") >> 31) & 1


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
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            value = T.alloc_local((group,), "float32")
            amax = T.alloc_var("float32")
            scale = T.alloc_var("float32")
            inverse = T.alloc_var("float32")
            scale_code = T.alloc_var("int32")
            low = T.alloc_var("int32")
            high = T.alloc_var("int32")
            for step in T.serial(each_unit(rows * groups)):
                unit = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if unit < rows * groups:
                    row, g = unit // groups, unit % groups
                    amax = 0.0
                    for i in T.serial(group):
                        value[i] = T.cast(x[row, g * group + i], "float32")
                        amax = T.max(amax, T.abs(value[i]))
                    if kind == "window":
                        scale_code = _power_bits(T.max(amax, T.float32(1e-4)) * T.float32(1.0 / 448.0))
                        inverse = T.reinterpret((254 << 23) - scale_code, "float32")  # a power of two: exact
                        for i in T.serial(group):
                            scale = T.min(T.abs(value[i]) * inverse, T.float32(448.0))
                            low = _e4m3_code(scale)
                            cache[where[row], g * group + i] = T.cast(low | (_sign(value[i]) << 7), "uint8")
                        cache[where[row], value_bytes + g] = T.cast(scale_code >> 23, "uint8")
                    else:
                        if kind == "compressed":
                            scale = T.max(amax, T.float32(6.0 * 2.0**-9)) / T.float32(6.0)
                            scale_code = _e4m3_code(T.min(scale, T.float32(448.0)))
                            scale = e4m3_value(scale_code)
                        else:
                            scale_code = _power_bits(T.max(amax, T.float32(6.0 * 2.0**-126)) / T.float32(6.0))
                            scale = T.reinterpret(scale_code, "float32")
                            scale_code = scale_code >> 23
                        for i in T.serial(group_bytes):
                            low = _e2m1_code(T.abs(value[2 * i]), scale) | (_sign(value[2 * i]) << 3)
                            high = _e2m1_code(T.abs(value[2 * i + 1]), scale) | (_sign(value[2 * i + 1]) << 3)
                            cache[where[row], g * group_bytes + i] = T.cast(low | (high << 4), "uint8")
                        cache[where[row], value_bytes + g] = T.cast(scale_code, "uint8")

    return write_records


@program
def round_index_program(dim: int, dtype: str):
    """x [rows, dim] -> the values that index records would hold."""
    rows = T.dynamic("rows")
    group = FORMATS["index"][0]
    groups = dim // group

    @T.prim_func
    def round_index(x: T.Tensor((rows, dim), dtype), out: T.Tensor((rows, dim), dtype)):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            value = T.alloc_local((group,), "float32")
            amax = T.alloc_var("float32")
            scale = T.alloc_var("float32")
            rounded = T.alloc_var("float32")
            code = T.alloc_var("int32")
            for step in T.serial(each_unit(rows * groups)):
                unit = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if unit < rows * groups:
                    row, g = unit // groups, unit % groups
                    amax = 0.0
                    for i in T.serial(group):
                        value[i] = T.cast(x[row, g * group + i], "float32")
                        amax = T.max(amax, T.abs(value[i]))
                    scale = T.reinterpret(
                        _power_bits(T.max(amax, T.float32(6.0 * 2.0**-126)) / T.float32(6.0)), "float32"
                    )
                    for i in T.serial(group):
                        code = _e2m1_code(T.abs(value[i]), scale)
                        rounded = e2m1_value(code) * scale
                        rounded = T.reinterpret(T.reinterpret(rounded, "int32") | (_sign(value[i]) << 31), "float32")
                        out[row, g * group + i] = T.cast(rounded, dtype)

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
        write_records_program(kind, values.shape[1], dtype_name(values))(values.contiguous(), rows.contiguous(), cache)


def round_index(x: Tensor) -> Tensor:
    """x [..., Di] rounded as index keys are; see contract `round_index`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        dim = x.shape[-1]
        round_index_program(dim, dtype_name(x))(x.view(-1, dim), out.view(-1, dim))
    return out
