"""Reading e2m1 codes, singly and eight at a time. SM90 has no instruction for them.

    e2m1   s | ee | m             moved into a half:   s | 000ee | m000000000        worth 2^-14 of its value

One code: the exponent field keeps its meaning, subnormal codes included, so decoding is two masks, two shifts and one
exact multiplication by HALF_BIAS.

    word   | code 7 | code 6 | .. | code 1 | code 0 |     s | eee     sign and magnitude of a code

Eight codes: `byte_permute` picks four bytes out of eight, by the low three bits of four nibbles. Its selector is the
word itself without the signs, so it reads a table of the eight magnitudes for four codes at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T

__all__ = ["HALF_BIAS", "bf16_of_codes", "byte_permute", "e5m2_table", "half_of_code", "octets_of_codes"]

HALF_BIAS = 2.0**14
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAGNITUDE_BITS, _SIGN_BITS = 0x77777777, 0x80808080  # of eight codes; of four bytes
_INTERLEAVED = (0x5140, 0x7362)  # bytes 0 and 1, or 2 and 3, of two words in turn


def half_of_code(code: Any) -> Any:
    """The half worth 2^-14 of the e2m1 code in the low four bits of an int32 expression."""
    return T.reinterpret(T.cast(((code & 7) << 9) | ((code & 8) << 12), "uint16"), "float16")


def byte_permute(low: Any, high: Any, selector: Any) -> Any:
    """uint32 whose byte i is byte (nibble i of the selector) of the eight bytes of `low` and `high`."""
    selector = T.uint32(selector) if isinstance(selector, int) else selector
    return T.call_extern("uint32", "__byte_perm", low, high, selector)


def e5m2_table(exponent: int) -> tuple[int, int]:
    """Bytes of e5m2 for the eight magnitudes times 2^exponent, the first lowest, in two words."""
    values = torch.tensor(MAGNITUDES) * 2.0**exponent
    return _two_words(values.to(torch.float8_e5m2).view(torch.uint8))


def octets_of_codes(word: Any, low: Any, high: Any) -> list[Any]:
    """Two words of four bytes: the codes of a uint32 word in their order, through a table of their magnitudes; the sign
    becomes the top bit.
    """
    magnitudes = word & T.uint32(_MAGNITUDE_BITS)
    return [byte_permute(low, high, magnitudes >> (16 * half)) | _signs(word, half) for half in range(2)]


def bf16_of_codes(word: Any) -> list[Any]:
    """Four words of two bf16: the codes of a uint32 word in their order."""
    low_of, high_of = _table_of_bytes(0), _table_of_bytes(1)
    magnitudes = word & T.uint32(_MAGNITUDE_BITS)
    pairs: list[Any] = []
    for half in range(2):
        chosen = magnitudes >> (16 * half)
        high = byte_permute(high_of[0], high_of[1], chosen) | _signs(word, half)
        low = byte_permute(low_of[0], low_of[1], chosen)
        pairs += [byte_permute(low, high, order) for order in _INTERLEAVED]
    return pairs


def _signs(word: Any, half: int) -> Any:
    """Sign bits of codes 0 .. 3, or 4 .. 7, each on top of a byte, where an odd code has its own already."""
    return byte_permute(word << 4, word, _INTERLEAVED[half]) & T.uint32(_SIGN_BITS)


def _table_of_bytes(place: int) -> tuple[Any, Any]:
    """Low (0) or high (1) bytes of the eight magnitudes in bf16, in two words."""
    values = torch.tensor(MAGNITUDES, dtype=torch.bfloat16)
    first, second = _two_words(values.view(torch.uint8)[place::2].contiguous())
    return T.uint32(first), T.uint32(second)


def _two_words(octets: Tensor) -> tuple[int, int]:
    words = octets.view(torch.uint32)
    return int(words[0]), int(words[1])
