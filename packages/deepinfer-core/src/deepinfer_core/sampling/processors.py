"""What happens to a row's logits before its token is drawn: pure functions over [R, V] with one parameter a row.

    logits float32
      -> mask           grammar bits, ids without a token, end tokens before min_tokens: -inf
      -> logit_bias     x_v + bias_v
      -> repetition     v in prompt or output:  x_v / r  if x_v > 0  else  x_v r
      -> presence       v in output:            x_v - presence
      -> frequency                              x_v - frequency times v is in the output
      -> temperature    x / T                                                     greedy rows stop before this one
      -> top-k          the k largest, ties to the lower id
      -> top-p          p = softmax of the rest; the smallest set in the order (p descending, id ascending), summed in
                        that order in float64, that reaches top_p; the token that crosses it stays
      -> min-p          p_v >= min_p times the largest p
      -> + G, argmax    (philox.py); the lowest id wins ties

They make up two operations of the contract, `adjust_logits` and `filter_logits`, so they lie with the reference
operations.
"""

from __future__ import annotations

from deepinfer_core.kernels.reference.adjust import add_sparse, apply_bit_masks, apply_penalties
from deepinfer_core.kernels.reference.filters import (
    apply_temperature,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    top_k_mask,
)

__all__ = [
    "add_sparse",
    "apply_bit_masks",
    "apply_penalties",
    "apply_temperature",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "top_k_mask",
]
