"""Markov and confidence heads of the drafter (docs/model.md: Drafter): compositions of the products of this package.

E = markov_embed[previous];   logits = base + E markov_head;   z = [hidden ; E] . confidence, in float32

The product gives its float32 sums, as that of the head does, so the logits are rounded once, by the addition. What
torch does here (a gather of S rows, a concatenation, the addition) is as fast as a kernel would be: docs/kernels.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.ops.linear import head_logits
from deepinfer_kernels_nvidia.ops.linear_float32 import linear_float32

__all__ = ["markov_step"]


def markov_step(
    base_logits: Tensor, hidden: Tensor, previous: Tensor, markov_embed: Tensor, markov_head: Tensor, confidence: Tensor
) -> tuple[Tensor, Tensor]:
    """base_logits [S, V], hidden [S, D], previous [S], markov_embed [V, r], markov_head [r, V], confidence [D + r, 1]
    -> logits [S, V], confidence logit [S], both float32; see contract `markov_step`.
    """
    embedded = markov_embed.index_select(0, previous)
    logits = head_logits(embedded, markov_head).add_(base_logits)
    joined = torch.cat([hidden.float(), embedded.float()], -1)
    return logits, linear_float32(joined, confidence.float())[:, 0]
