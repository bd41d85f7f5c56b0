"""The drafter's draws: with coupled verification they use the noise of the position that they guess.

    draft k of segment s = argmax_v (logits_v / T + G(seed, first_position + k, v))           T = 0: argmax_v logits_v

The drafter may ignore penalties and filters (design.md 6): that costs acceptance, never correctness.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer_core.sampling.philox import gumbel_noise
from deepinfer_core.sampling.processors import apply_temperature
from deepinfer_core.sampling.streams import Stream

__all__ = ["DraftNoise"]

# A block's noise is made at once while it stays below so many entries: the passes then are fewer and longer.
_MAX_ENTRIES = 1 << 24


@dataclass(slots=True)
class DraftNoise:
    """Draws for a block of `num_steps` drafts of S segments."""

    seed: Tensor  # [S] int64
    first_position: Tensor  # [S] int64, position of the first draft
    temperature: Tensor  # [S] float32, 1 where greedy
    greedy: Tensor | None  # [S] bool; None = all are
    num_ids: int  # ids from here on have no token
    num_steps: int
    stream: Stream
    _block: Tensor | None = field(default=None, init=False)  # [S, num_steps, ids]

    def choose(self, step: int, logits: Tensor) -> Tensor:
        """Tokens [S] of draft number `step` (from 0) under the drafter's logits [S, V]."""
        logits = logits[:, : self.num_ids].float()
        if self.greedy is None:
            return logits.argmax(1)
        return apply_temperature(logits, self.temperature).add_(self._noise(step)).argmax(1)

    def _noise(self, step: int) -> Tensor:
        if self._block is not None:
            return self._block[:, step]
        if len(self.seed) * self.num_steps * self.num_ids > _MAX_ENTRIES:
            return self._silent_where_greedy(
                gumbel_noise(self.seed, self.first_position + step, self.num_ids, self.stream)
            )
        steps = torch.arange(self.num_steps, device=self.seed.device)
        positions = (self.first_position[:, None] + steps).flatten()
        noise = gumbel_noise(self.seed.repeat_interleave(self.num_steps), positions, self.num_ids, self.stream)
        self._block = self._silent_where_greedy(noise.unflatten(0, (-1, self.num_steps)))
        return self._block[:, step]

    def _silent_where_greedy(self, noise: Tensor) -> Tensor:
        greedy = self.greedy.view(-1, *[1] * (noise.dim() - 1)) if self.greedy is not None else None
        return noise if greedy is None else noise.masked_fill_(greedy, 0.0)
