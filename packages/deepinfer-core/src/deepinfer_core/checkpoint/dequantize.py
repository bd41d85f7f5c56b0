"""Stored bytes to numbers, exactly (docs/model.md: Checkpoint).

    e8m0   byte b              -> 2^(b - 127), 255 = NaN
    FP8    e4m3 q[i, j]        -> q[i, j] * 2^(s[i // 32, j // 32] - 127)
    FP4    byte k of a row     -> columns 2k (low nibble) and 2k + 1 (high nibble):
           code c (bit 3 = sign) -> +-[0, .5, 1, 1.5, 2, 3, 4, 6][c & 7] * 2^(s[i, j // 32] - 127)
    row    e4m3 q[r, j]        -> q[r, j] * 2^(s[r, j // 32] - 127)                                  (Engram tables)

A code has at most 4 significant bits and every scale is a power of two, so the products are exact in float32 and, above
bfloat16's subnormals, in bfloat16. All functions accept leading batch dimensions and codes and scales as uint8, int8 or
the 8-bit float types.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BLOCK", "dequantize_fp4", "dequantize_fp8_blocks", "dequantize_rows", "e8m0_to_float32", "fp8_records"]

BLOCK = 32  # rows and columns of an FP8 block, columns of an FP4 or Engram group


def e8m0_to_float32(scales: Tensor) -> Tensor:
    """2^(byte - 127) of each scale byte, NaN for 255; same shape, float32."""
    return scales.view(torch.float8_e8m0fnu).to(torch.float32)


def dequantize_fp8_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., a, b] e4m3 codes with [..., ceil(a / 32), ceil(b / 32)] e8m0 scales to [..., a, b]."""
    row_scales = e8m0_to_float32(scales).repeat_interleave(BLOCK, dim=-2)[..., : codes.shape[-2], :]
    return _scale_columns(_e4m3(codes), row_scales).to(dtype)


def fp8_records(codes: Tensor, scales: Tensor) -> Tensor:
    """An FP8 matrix [..., a, b], b a multiple of 32, with the scales of a row behind its codes: [..., a, b + b / 32]
    uint8.
    """
    row_scales = scales.view(torch.uint8).repeat_interleave(BLOCK, dim=-2)[..., : codes.shape[-2], :]
    return torch.cat([codes.view(torch.uint8), row_scales], -1)


def dequantize_fp4(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., a, b / 2] packed e2m1 codes with [..., a, ceil(b / 32)] e8m0 scales to [..., a, b]."""
    pairs = F.embedding(packed.view(torch.uint8).int(), _e2m1_pairs(packed.device))  # [..., a, b / 2, 2]
    return _scale_columns(pairs.flatten(-2), e8m0_to_float32(scales)).to(dtype)


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., w] e4m3 codes with [..., ceil(w / 32)] e8m0 scales to [..., w]."""
    return _scale_columns(_e4m3(codes), e8m0_to_float32(scales)).to(dtype)


def _scale_columns(values: Tensor, scales: Tensor) -> Tensor:
    """values [..., b] times scales [..., ceil(b / 32)], each scale covering 32 columns (the last one what is left)."""
    columns = values.shape[-1]
    if columns % BLOCK == 0:
        return (values.unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)
    return values * scales.repeat_interleave(BLOCK, dim=-1)[..., :columns]


# Values come from tables: on a CPU a look-up takes half the time of a cast.


def _e4m3(codes: Tensor) -> Tensor:
    indices = codes.view(torch.uint8).int()
    return _e4m3_values(codes.device).index_select(0, indices.flatten()).view(codes.shape)


@lru_cache(maxsize=16)
def _e4m3_values(device: torch.device) -> Tensor:
    """[256]: the value of every code, NaN for 0x7F and 0xFF."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(device, torch.float32)


@lru_cache(maxsize=16)
def _e2m1_pairs(device: torch.device) -> Tensor:
    """[256, 2]: the two values of every packed byte, low nibble first."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([magnitudes, -magnitudes])  # [16]
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).to(device)
