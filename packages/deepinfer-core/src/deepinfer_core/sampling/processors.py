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

Every function keeps the promise of the row: what becomes of a row does not depend, bit for bit, on the other rows.
Reductions that a library may split by the shape of the batch (float sums) are therefore scans along the row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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

_NEVER = float("-inf")

# torch.topk is fast for a share of the row below 1 / this.
_FEW_SHARE = 64


def apply_bit_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """In place: -inf where a row's bit is 0. rows: int64 [G] rows of `logits` [R, V]; masks: int32 [G, ceil(V / 32)].

    Bit v % 32 of word v // 32 stands for id v; the words are those of a uint32 array.
    """
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()  # [G, V]
    logits[rows] = logits[rows].masked_fill(~allowed, _NEVER)


def add_sparse(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """In place: logits[rows[i], ids[i]] += values[i]. All three are [E].

    A (row, id) may come twice, with a bias and with 0 or -inf: then the order of the additions does not matter.
    """
    logits.index_put_((rows, ids), values, accumulate=True)


def apply_penalties(
    logits: Tensor, prompt_seen: Tensor, output_count: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Penalised logits [R, V]. prompt_seen: bool [R, V]; output_count: int32 [R, V]; the rest: float32 [R]."""
    in_output = output_count > 0
    scaled = torch.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
    logits = torch.where(in_output | prompt_seen, scaled, logits)
    logits = logits - presence[:, None] * in_output
    return logits - frequency[:, None] * output_count


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """x / T. temperature: float32 [R], above 0."""
    return logits / temperature[:, None]


def top_k_mask(logits: Tensor, k: Tensor, max_k: int) -> Tensor:
    """True for exactly k entries a row: the largest, ties to the lower id. k: int64 [R], 1 <= k <= max_k <= V."""
    return _largest_mask(logits, _largest_values(logits, max_k), k)


def keep_top_k(logits: Tensor, k: Tensor, max_k: int) -> Tensor:
    """-inf outside the k largest of each row. k and max_k as for `top_k_mask`."""
    return logits.masked_fill(~top_k_mask(logits, k, max_k), _NEVER)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside the smallest set that holds `top_p` of the probability. top_p: float64 [R], in (0, 1].

    That set is the n largest entries, ties to the lower id, so sorting values without their ids is enough to find n.
    """
    values = _largest_values(logits, logits.shape[1])
    total = _weights(values, values[:, :1]).cumsum(1)  # [R, V]
    wanted = top_p[:, None] * total[:, -1:]
    num_kept = (total[:, :-1] < wanted).sum(1) + 1  # an entry stays if the ones before it do not reach top_p
    return logits.masked_fill(~_largest_mask(logits, values, num_kept), _NEVER)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """-inf where the probability is below `min_p` times the largest. min_p: float64 [R], in [0, 1]."""
    weights = _weights(logits, logits.amax(1, keepdim=True))
    return logits.masked_fill(weights < min_p[:, None], _NEVER)


def _weights(values: Tensor, largest: Tensor) -> Tensor:
    """exp(x - max) in float64: probabilities up to a factor a row, 1 for the largest.

    The difference is taken in float64, where it is exact: logits that differ keep their order as probabilities.
    """
    return (values.double() - largest).exp_()


def _largest_values(logits: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, descending: [R, count]."""
    if logits.device.type != "cpu" or count * _FEW_SHARE <= logits.shape[1]:
        return logits.topk(count, dim=1).values
    # On a CPU numpy sorts values many times faster than torch, which carries indices along.
    ascending = np.sort(logits.detach().float().numpy(), axis=1)
    return torch.from_numpy(ascending[:, ::-1][:, :count].copy())


def _largest_mask(logits: Tensor, values: Tensor, k: Tensor) -> Tensor:
    """True for the k largest entries a row, ties to the lower id; `values`: the row's largest, descending."""
    threshold = values.gather(1, k[:, None] - 1)  # [R, 1]
    above, equal = logits > threshold, logits == threshold
    num_equal = k[:, None] - above.sum(1, keepdim=True)
    return above | equal & (equal.cumsum(1) <= num_equal)
