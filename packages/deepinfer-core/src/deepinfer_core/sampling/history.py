"""Which tokens a request has seen, for its penalties: counts on the device, kept only for requests that have penalties.

    pool row    prompt_seen  bool  [V]     v is in the prompt
                output_count int32 [V]     how often v is in the output

At row k of a segment the history is what was committed, the anchor included, and the drafts 1 .. k: those are counted
beside the pool (kernels/reference/adjust.py), so that a rejected draft leaves no trace.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.kernels.reference.adjust import Penalties
from deepinfer_core.kernels.reference.columns import to_device

__all__ = ["TokenHistory"]


class TokenHistory:
    """Token counts by slot. Rows of the pool are handed out as needed, and its size doubles when they run out."""

    def __init__(self, num_ids: int, device: torch.device) -> None:
        self._num_ids, self._device = num_ids, device
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        self._prompt_seen = torch.zeros(0, num_ids, dtype=torch.bool, device=device)
        self._output_count = torch.zeros(0, num_ids, dtype=torch.int32, device=device)

    def start(self, slot: int, prompt: NDArray[np.int64], output: NDArray[np.int64]) -> None:
        """Begin the history of the request in `slot`: its prompt, and what was generated before a preemption."""
        self.end(slot)
        if not self._free:
            self._grow()
        row = self._row_of[slot] = self._free.pop()
        ids = to_device(prompt[prompt < self._num_ids], self._device)
        self._prompt_seen[row] = False
        self._prompt_seen[row, ids] = True
        counts = np.bincount(output, minlength=self._num_ids)[: self._num_ids]
        self._output_count[row] = to_device(counts.astype(np.int32), self._device)

    def end(self, slot: int) -> None:
        """Forget the history of `slot`, if there is one."""
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def penalties(
        self,
        index: NDArray[np.int64],
        slots: NDArray[np.int32],
        num_drafts: NDArray[np.int64],
        token: Tensor,
        records: NDArray[np.void],
    ) -> Penalties:
        """What rows `index` [n] of a step ask for. slots [n]; num_drafts [n]: the row's own token and so many - 1
        before it are drafts, hence not committed; token [R]: own tokens of all rows, on the device; records [n].
        """
        return Penalties(
            index, self._rows(slots), num_drafts, records["repetition"], records["presence"], records["frequency"],
            token, self._prompt_seen, self._output_count,
        )  # fmt: skip

    def commit(self, slots: NDArray[np.int32], tokens: Tensor) -> None:
        """Count what was drawn. slots: [S]; tokens: int64 [S, T] on the device, -1 where there is none."""
        rows = to_device(self._rows(slots), self._device)[:, None].expand_as(tokens)
        drawn = (tokens >= 0).int()
        self._output_count.index_put_((rows, tokens.clamp(min=0)), drawn, accumulate=True)

    def _rows(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        return np.array([self._row_of[int(slot)] for slot in slots], np.int64)

    def _grow(self) -> None:
        size = len(self._output_count)
        more = max(4, size)
        self._free.extend(range(size + more - 1, size - 1, -1))
        for name in ("_prompt_seen", "_output_count"):
            old: Tensor = getattr(self, name)
            setattr(self, name, torch.cat([old, old.new_zeros(more, self._num_ids)]))
