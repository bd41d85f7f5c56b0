"""Packed cache records: their bytes (docs/model.md: Cache records), reading and writing rows in either form.

    window      | D e4m3 values                    | D / 32 e8m0 scales |   528 B for D = 512
    compressed  | D / 2 bytes, even value low nibble | D / 16 e4m3 scales |   288 B for D = 512
    index       | D / 2 bytes, even value low nibble | D / 32 e8m0 scales |    68 B for D = 128

A *plain* cache holds the rounded values in a float dtype (the reference on the CPU), a *packed* one holds uint8
records (GPU kernels, export). Both have one row an entry and hold the same values. `pack` is meant for values that are
not rounded yet: of rounded ones it keeps every value except in compressed groups whose scale is subnormal (largest
magnitude below 0.1), where the scale is not unique.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from deepinfer_core.kernels.reference.rounding import (
    ceil_power_of_two,
    round_compressed,
    round_e4m3,
    round_index,
    round_window,
)

__all__ = ["COMPRESSED", "INDEX", "WINDOW", "RecordFormat", "pack", "read_rows", "unpack", "write_rows"]


@dataclass(frozen=True)
class RecordFormat:
    """How one cache row is stored."""

    name: Literal["window", "compressed", "index"]
    group: int  # values that share a scale
    value_bits: Literal[4, 8]

    def num_bytes(self, dim: int) -> int:
        """Length of a packed record of `dim` values."""
        return dim * self.value_bits // 8 + dim // self.group


WINDOW = RecordFormat("window", 32, 8)
COMPRESSED = RecordFormat("compressed", 16, 4)
INDEX = RecordFormat("index", 32, 4)

_ROUND = {"window": round_window, "compressed": round_compressed, "index": round_index}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Midpoints of the magnitudes; a value on one goes to the even code, so every second comparison is strict.
_STRICT_MIDPOINTS, _OTHER_MIDPOINTS = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


def write_rows(cache: Tensor, rows: Tensor, values: Tensor, fmt: RecordFormat) -> None:
    """Round values [R, D] and store them in cache[rows]; rows [R] are distinct but for rows that nobody reads."""
    record = pack(values, fmt) if cache.dtype == torch.uint8 else _ROUND[fmt.name](values).to(cache.dtype)
    cache.index_copy_(0, rows, record)


def read_rows(cache: Tensor, rows: Tensor, fmt: RecordFormat, dtype: torch.dtype) -> Tensor:
    """cache[rows] as values: rows [...] -> [..., D]."""
    records = cache.index_select(0, rows.flatten()).unflatten(0, rows.shape)
    return unpack(records, fmt).to(dtype) if cache.dtype == torch.uint8 else records.to(dtype)


def pack(values: Tensor, fmt: RecordFormat) -> Tensor:
    """values [R, D], not rounded yet -> uint8 [R, num_bytes(D)]; `unpack` of it equals the rounded values."""
    groups = values.float().unflatten(-1, (-1, fmt.group))
    amax = groups.abs().amax(-1, keepdim=True)
    if fmt.name == "window":
        scale = ceil_power_of_two(amax.clamp_min(1e-4) * (1.0 / 448.0))
        codes = (groups / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    else:
        codes = _nibbles(groups, scale := _fp4_scale(amax, fmt))
    return torch.cat([codes, _scale_bytes(scale, fmt)], -1)


def unpack(records: Tensor, fmt: RecordFormat) -> Tensor:
    """uint8 [..., num_bytes(D)] -> float32 [..., D]."""
    dim = records.shape[-1] * 8 * fmt.group // (fmt.value_bits * fmt.group + 8)
    value_bytes = dim * fmt.value_bits // 8
    codes, scales = records[..., :value_bytes], records[..., value_bytes:].contiguous()
    scale_dtype = torch.float8_e4m3fn if fmt.name == "compressed" else torch.float8_e8m0fnu
    scale = scales.view(scale_dtype).to(torch.float32)[..., None]
    if fmt.value_bits == 8:
        values = codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    else:
        pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        values = _constant(_E2M1, records.device)[pairs.long()]
    return (values.unflatten(-1, (-1, fmt.group)) * scale).flatten(-2)


def _fp4_scale(amax: Tensor, fmt: RecordFormat) -> Tensor:
    if fmt.name == "compressed":
        return round_e4m3(amax.clamp_min(6.0 * 2.0**-9) / 6.0)
    return ceil_power_of_two(amax.clamp_min(6.0 * 2.0**-126) / 6.0)


def _nibbles(groups: Tensor, scale: Tensor) -> Tensor:
    x = (groups / scale).flatten(-2)
    low, high = _constant(_STRICT_MIDPOINTS, x.device), _constant(_OTHER_MIDPOINTS, x.device)
    magnitude = x.abs()[..., None]
    code = (magnitude > low).sum(-1) + (magnitude >= high).sum(-1) + 8 * torch.signbit(x)
    even, odd = code.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return even | (odd << 4)


def _scale_bytes(scale: Tensor, fmt: RecordFormat) -> Tensor:
    dtype = torch.float8_e4m3fn if fmt.name == "compressed" else torch.float8_e8m0fnu
    return scale[..., 0].to(dtype).view(torch.uint8)


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """float32 on `device`, copied there once: a copy from the host cannot be part of a captured graph."""
    with torch.inference_mode(False):  # it outlives the call, and training uses it, too
        return torch.tensor(values, device=device)
