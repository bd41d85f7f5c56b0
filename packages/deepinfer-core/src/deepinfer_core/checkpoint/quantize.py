"""Numbers to stored bytes, the inverse of `dequantize`: smallest scales that fit, to nearest, ties to even.

    FP8    s = 2^ceil(log2(amax / 448)) of each 32 x 32 block, codes e4m3(w / s)
    FP4    s = 2^ceil(log2(amax / 6)) of each 32 columns of a row, codes e2m1(w / s), even column in the low nibble
    row    s = 2^ceil(log2(amax / 448)) of each 32 columns of a row, codes e4m3(w / s)

Quantizing what `dequantize` returned gives the same values again, and the same bytes if no smaller scales hold them. A
straight-through forward of a trainer is `dequantize_x(*quantize_x(w))`. Inputs are float tensors with any leading batch
dimensions whose finite values lie below 2^127; what they round to is exact in bfloat16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_core.checkpoint.dequantize import BLOCK
from deepinfer_core.kernels.reference.records import INDEX, pack
from deepinfer_core.kernels.reference.rounding import ceil_power_of_two

__all__ = ["quantize_fp4", "quantize_fp8_blocks", "quantize_rows"]

_E4M3_MAX = 448.0
_SMALLEST_NORMAL = 2.0**-126


def quantize_fp8_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """[..., a, b] to e4m3 codes [..., a, b] and e8m0 scales [..., ceil(a / 32), ceil(b / 32)]."""
    rows, columns = values.shape[-2:]
    blocks = _pad(values.mT).mT  # [..., A, b], A a multiple of 32
    blocks = _pad(blocks).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., A / 32, 32, B / 32, 32]
    codes, scales = _e4m3(blocks, (-3, -1))
    codes = codes.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous()
    return codes, scales[..., 0, :, 0].contiguous()


def quantize_fp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """[..., a, b], b even, to packed e2m1 codes int8 [..., a, b / 2] and e8m0 scales [..., a, ceil(b / 32)]."""
    padded = _pad(values)
    record = pack(padded, INDEX)  # an index key has the same form: codes, then scales
    code_bytes = padded.shape[-1] // 2
    codes = record[..., : values.shape[-1] // 2].contiguous().view(torch.int8)
    return codes, record[..., code_bytes:].contiguous().view(torch.float8_e8m0fnu)


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """[..., w] to e4m3 codes [..., w] and e8m0 scales [..., ceil(w / 32)]."""
    codes, scales = _e4m3(_pad(values).unflatten(-1, (-1, BLOCK)), (-1,))
    return codes.flatten(-2)[..., : values.shape[-1]].contiguous(), scales[..., 0].contiguous()


def _e4m3(groups: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Codes of `groups` and, with `dims` kept as 1, the scale of each group."""
    amax = groups.abs().amax(dims, keepdim=True).clamp_min(_E4M3_MAX * _SMALLEST_NORMAL)
    scale = ceil_power_of_two(amax / _E4M3_MAX)
    return (groups / scale).to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu)


def _pad(values: Tensor) -> Tensor:
    """float32 with zero columns up to a multiple of 32."""
    return F.pad(values.float(), (0, -values.shape[-1] % BLOCK))
