"""Heads of the DSpark drafter (docs/model.md: Drafter).

    E_k      = markov_embed[x_{k-1}]
    logits_k = U_k + E_k markov_head
    z_k      = w . [h_k ; E_k]

U_k are the base logits of block position k, h_k its collapsed hidden state before the norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.kernels.reference.linear import linear

__all__ = ["draft_attention_bias", "markov_step"]


def markov_step(
    base_logits: Tensor, hidden: Tensor, previous: Tensor, markov_embed: Tensor, markov_head: Tensor, confidence: Tensor
) -> tuple[Tensor, Tensor]:
    """base_logits [S, V], hidden [S, D], previous tokens [S], markov_embed [V, r], markov_head [r, V], confidence [D +
    r, 1]
    -> logits [S, V] float32, confidence logit [S] float32."""
    embedded = markov_embed.index_select(0, previous)
    logits = base_logits.float() + linear(embedded, markov_head).float()
    z = linear(torch.cat([hidden.float(), embedded.float()], -1), confidence)[:, 0]
    return logits, z


def draft_attention_bias(ring_bias: Tensor, block: int) -> Tensor:
    """ring_bias [S, W] of each segment -> [S * block, W + block]: every query of a block sees the ring and the whole
    block.
    """
    seen = torch.nn.functional.pad(ring_bias, (0, block))
    return seen.repeat_interleave(block, 0)
