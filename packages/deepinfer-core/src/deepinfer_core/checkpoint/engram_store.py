"""Rows of one Engram table, kept as they are on disk and dequantized when they are looked up.

    row r:  e4m3 codes [W]  x  2^(scale[W / 32] - 127), one scale a 32 columns           264 bytes a row in the release

The release has two tables of 384 M rows (98 GB each) of which a token reads 24 rows, so a table may stay in host
memory, on the device, or memory-mapped on disk. A process may own a part of the rows: `lookup` gives zeros for the
others, so that the sum over the owners is the full result. `read` gives rows as they are stored, to be sent to the
process that wants them, and `decode` makes of them what `lookup` of the whole table would have given there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.checkpoint.dequantize import dequantize_rows

__all__ = ["EngramTable"]


@dataclass(frozen=True, slots=True, eq=False)
class EngramTable:
    """Rows `first_row .. first_row + len(codes) - 1` of a table of `num_rows`."""

    codes: Tensor  # [R, W] uint8, bits of float8_e4m3fn; on a CUDA device perhaps host memory (mapped_memory.py)
    scales: Tensor  # [R, W / 32] uint8, bits of float8_e8m0fnu
    num_rows: int
    first_row: int
    dtype: torch.dtype  # of what `lookup` returns
    device: torch.device  # of what `lookup` returns; the table itself may live elsewhere

    @property
    def owned_rows(self) -> range:
        """The rows that this process holds."""
        return range(self.first_row, self.first_row + self.codes.shape[0])

    @property
    def width(self) -> int:
        """Columns of a row (engram_head_dim)."""
        return self.codes.shape[1]

    def lookup(self, rows: Tensor) -> Tensor:
        """Dequantized `rows` [N] int64 -> [N, W], zeros for rows held elsewhere; 0 <= row < num_rows is not checked."""
        local = rows.to(self.codes.device) - self.first_row  # [N]
        if self.codes.shape[0] == self.num_rows:
            return dequantize_rows(self.codes[local], self.scales[local], self.dtype).to(self.device)
        held = (local >= 0) & (local < self.codes.shape[0])
        values = torch.zeros(len(rows), self.width, dtype=self.dtype, device=self.codes.device)
        values[held] = dequantize_rows(self.codes[local[held]], self.scales[local[held]], self.dtype)
        return values.to(self.device)

    def read(self, rows: Tensor) -> Tensor:
        """Stored `rows` [N] int64 -> [N, W + W / 32] bytes: codes, then scales. IndexError for a row held elsewhere."""
        local = rows.to(self.codes.device) - self.first_row
        if len(local) and not 0 <= int(local.min()) <= int(local.max()) < len(self.codes):
            raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} are asked for; held are {self.owned_rows}")
        return torch.cat([self.codes[local], self.scales[local]], 1).to(self.device)

    def decode(self, records: Tensor) -> Tensor:
        """What `read` gave here or elsewhere -> the values [N, W]."""
        codes, scales = records[:, : self.width].contiguous(), records[:, self.width :].contiguous()
        return dequantize_rows(codes, scales, self.dtype)
