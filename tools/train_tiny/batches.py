"""Training samples from the arrays of data.py: bos, then T - 1 tokens from a place where a sample may start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.train_tiny.kinds import KINDS


@dataclass(frozen=True)
class Corpus:
    """The token ids of one split on one device."""

    ids: dict[str, Tensor]  # by kind, int32
    starts: dict[str, Tensor]  # by kind, int64
    bos: int

    @classmethod
    def load(cls, folder: Path, split: str, device: torch.device | str, bos: int = 0) -> Corpus:
        """`{split}_{kind}.npy` and `{split}_{kind}_starts.npy` of every kind."""
        with np.load(folder / f"{split}.npz") as arrays:
            ids = {kind: torch.from_numpy(arrays[kind].astype(np.int32)).to(device) for kind in KINDS}
            starts = {kind: torch.from_numpy(arrays[f"{kind}_starts"].astype(np.int64)).to(device) for kind in KINDS}
        return cls(ids, starts, bos)

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens, [size, length] int64, kinds by their shares."""
        parts = []
        counts = torch.multinomial(torch.tensor(list(KINDS.values())), size, replacement=True, generator=generator)
        for number, kind in enumerate(KINDS):
            count = int((counts == number).sum())
            if count:
                parts.append(self._samples(kind, count, length, generator))
        tokens = torch.cat(parts).long()
        inputs = torch.cat([torch.full_like(tokens[:, :1], self.bos), tokens[:, :-1]], 1)
        return inputs, tokens

    def _samples(self, kind: str, count: int, length: int, generator: torch.Generator) -> Tensor:
        ids, starts = self.ids[kind], self.starts[kind]
        choice = torch.randint(len(starts), (count,), generator=generator).to(starts.device)
        first = starts[choice].clamp_max(max(len(ids) - length, 0))
        return ids[(first[:, None] + torch.arange(length, device=ids.device)).clamp_max(len(ids) - 1)]

    def in_order(self, kind: str, length: int) -> tuple[Tensor, Tensor]:
        """All of one kind in pieces: inputs and next tokens [n, length] int64; an incomplete last piece is left out."""
        ids = self.ids[kind]
        tokens = ids[: len(ids) // length * length].view(-1, length).long()
        return torch.cat([torch.full_like(tokens[:, :1], self.bos), tokens[:, :-1]], 1), tokens
