"""The draw of a token: the contract's function over the C library."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.kernels.native.dense import rows_of
from deepinfer_core.kernels.native.library import Library, failure

__all__ = ["DrawOps"]


class DrawOps:
    """Named as in the contract. Few ids can win, so noise is made for few: draw.c has the bound."""

    def __init__(self, library: Library) -> None:
        self._draw = library.function("draw_token")

    def draw_token(self, scores: Tensor, seed: Tensor, position: Tensor, stream: int = 0) -> tuple[Tensor, Tensor]:
        """scores [R, V], seed and position [R] int64 -> (ids [R], failed [R])."""
        scores, seed, position = rows_of(scores), seed.contiguous(), position.contiguous()
        rows, num_ids = scores.shape
        ids, failed = seed.new_empty(rows), torch.empty(rows, dtype=torch.bool)
        status = self._draw(
            scores.data_ptr(), scores.stride()[0], seed.data_ptr(), position.data_ptr(), stream,
            ids.data_ptr(), failed.data_ptr(), rows, num_ids,
        )  # fmt: skip
        if status:
            raise failure(status, "draw_token")
        return ids, failed
