"""Markov and confidence heads of the drafter (model.md 4.1): compositions of the products of this package.

E = markov_embed[previous];   logits = base + E markov_head;   z = [hidden ; E] . confidence, in float32
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.ops.linear import linear
from deepinfer_kernels_nvidia.ops.linear_float32 import linear_float32

__all__ = ["markov_step"]


def markov_step(
    base_logits: Tensor, hidden: Tensor, previous: Tensor, markov_embed: Tensor, markov_head: Tensor, confidence: Tensor
) -> tuple[Tensor, Tensor]:
    """base_logits [S, V], hidden [S, D], previous [S], markov_embed [V, r], markov_head [r, V], confidence [D + r, 1]
    -> logits [S, V], confidence logit [S], both float32; see contract `markov_step`.
    """
    embedded = markov_embed.index_select(0, previous)
    logits = base_logits.float() + linear(embedded, markov_head).float()
    joined = torch.cat([hidden.float(), embedded.float()], -1)
    return logits, linear_float32(joined, confidence.float())[:, 0]
