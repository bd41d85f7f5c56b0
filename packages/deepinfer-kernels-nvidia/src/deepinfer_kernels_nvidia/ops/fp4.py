"""Reading e2m1 codes: a code is a tiny half-precision number.

    e2m1   s | ee | m             moved into a half:   s | 000ee | m000000000        worth 2^-14 of its value

The exponent field keeps its meaning, subnormal codes included, so decoding is two masks, two shifts and one exact
multiplication by HALF_BIAS. SM90 has no instruction for it.
"""

from __future__ import annotations

from typing import Any

from deepinfer_kernels_nvidia.jit import T

__all__ = ["HALF_BIAS", "half_of_code"]

HALF_BIAS = 2.0**14


def half_of_code(code: Any) -> Any:
    """The half worth 2^-14 of the e2m1 code in the low four bits of an int32 expression."""
    return T.reinterpret(T.cast(((code & 7) << 9) | ((code & 8) << 12), "uint16"), "float16")
