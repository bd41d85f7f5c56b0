"""Reading e4m3 codes as pairs of bf16 in words, by moving bits, and exact products of such pairs.

    e4m3   s | eeee | mmm     moved into a bf16:   s | 0000eeee | mmm0000     worth 2^-120 of its value

The exponent field keeps its meaning, subnormal codes included, so a product with 2^120 gives the value exactly. The two
codes of NaN would become 480 and -480: no record holds them.
"""

from __future__ import annotations

from typing import Any

from deepinfer_kernels_nvidia.jit import T
from deepinfer_kernels_nvidia.ops.fp4 import byte_permute

__all__ = ["TWO_TO_120", "bf16_of_e4m3", "bf16_of_scale", "pair_of_power", "times"]

TWO_TO_120 = 0x7B807B80  # twice, in bf16
_ABOVE_ZERO = (0x1404, 0x3424)  # bytes 0 and 1, or 2 and 3, of a word, each above a zero byte
_TWICE_ABOVE_ZERO, _NEXT_BYTE = 0x0404, 0x1010  # byte 0 of a word, twice above a zero byte; what makes it byte 1
_EXPONENT_FIELDS = 0x00800080  # lowest exponent bit of two bf16
_SIGNS, _MAGNITUDES = 0x80008000, 0x7F007F00


def bf16_of_e4m3(word: Any) -> list[Any]:
    """Two words of two bf16: the codes of a uint32 word in their order, each worth 2^-120 of its value."""
    spread = [byte_permute(word, T.uint32(0), order) for order in _ABOVE_ZERO]
    return [(pair & T.uint32(_SIGNS)) | _magnitudes(pair) for pair in spread]


def bf16_of_scale(word: Any, place: Any) -> Any:
    """The code in byte `place` (0 or 1) of a uint32 word, which is not negative, twice; worth 2^-120 of its value."""
    return _magnitudes(byte_permute(word, T.uint32(0), _TWICE_ABOVE_ZERO + _NEXT_BYTE * place))


def pair_of_power(exponent: Any) -> Any:
    """Two bf16 of 2^(exponent - 127): an e8m0 byte, but for 0, in a uint32."""
    return exponent * T.uint32(_EXPONENT_FIELDS)


def times(word: Any, factor: Any) -> Any:
    """Products of two pairs of bf16, in a word."""
    return T.reinterpret(T.mul2(T.reinterpret(word, "bfloat16x2"), T.reinterpret(factor, "bfloat16x2")), "uint32")


def _magnitudes(pair: Any) -> Any:
    return (pair & T.uint32(_MAGNITUDES)) >> T.uint32(4)
