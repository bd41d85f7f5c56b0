"""The drafter's draws: with coupled verification they use the noise of the position that they guess.

    draft k of segment s = argmax_v (x_v + G(seed, first_position + k, v))         greedy requests: argmax_v logits_v

x are the drafter's logits after the request's temperature, top-k, top-p and min-p, since the target's draw passes these
too; the drafter ignores masks, bias and penalties: that costs acceptance, never correctness. Ratio
verification knows the drafter's distribution as softmax(logits / T), so there the filters are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.sampling.filters import RowFilters, apply_temperature, to_device
from deepinfer_core.sampling.philox import gumbel_noise
from deepinfer_core.sampling.streams import Stream

__all__ = ["DraftNoise"]

# Below so many entries the noise of a whole block costs less than the calls for one step after the other.
_SMALL_BLOCK = 1 << 17


@dataclass(slots=True)
class DraftNoise:
    """Draws for a block of `num_steps` drafts of S segments."""

    seed: Tensor  # [S] int64
    first_position: Tensor  # [S] int64, position of the first draft
    filters: RowFilters | None  # of the S segments; None = all are greedy
    greedy: Tensor  # [S] bool
    num_ids: int  # ids from here on have no token
    num_steps: int
    stream: Stream
    kernels: Kernels = REFERENCE
    _block: Tensor | None = field(default=None, init=False)  # [S, num_steps, ids]

    def choose(self, step: int, logits: Tensor) -> Tensor:
        """Tokens [S] of draft number `step` (from 0) under the drafter's logits [S, V]."""
        logits = logits[:, : self.num_ids].float()
        likeliest = logits.argmax(1)
        if self.filters is None:
            return likeliest
        if self.stream is Stream.TOKEN:
            scores = self.kernels.filter_logits(logits, self.filters)
        else:
            scores = apply_temperature(logits, to_device(self.filters.temperature, logits.device))
        if len(self.seed) * self.num_steps * self.num_ids <= _SMALL_BLOCK:
            token = scores.add(self._block_noise()[:, step]).argmax(1)
        else:
            token, _ = self.kernels.draw_token(scores, self.seed, self.first_position + step, int(self.stream))
        return token.where(~self.greedy, likeliest)

    def _block_noise(self) -> Tensor:
        if self._block is None:
            steps = torch.arange(self.num_steps, device=self.seed.device)
            positions = (self.first_position[:, None] + steps).flatten()
            noise = gumbel_noise(self.seed.repeat_interleave(self.num_steps), positions, self.num_ids, self.stream)
            self._block = noise.unflatten(0, (-1, self.num_steps))
        return self._block
