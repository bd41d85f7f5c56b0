"""Compressed entries and index keys of a KV source layer (docs/model.md: Attention).

    ratio 2    a = x wkv, g = x wgate; entry j pools positions 2j and 2j + 1, channel by channel:
               pooled = sum_m softmax_m(g_m) a_m;  latent = rms_norm(pooled)
    ratio 1    latent = rms_norm(x wkv)
    index key  round_index(rope(rms_norm(latent wk)))
    entry      round_compressed(rope(latent))

Both are turned to position j * ratio, that of the group's first token.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer_core.kernels.reference.elementwise import sigmoid
from deepinfer_core.kernels.reference.linear import linear
from deepinfer_core.kernels.reference.norm_rope import apply_rope, rms_norm
from deepinfer_core.kernels.reference.rounding import round_compressed, round_index

__all__ = ["index_key", "main_entry", "pool_pairs"]


def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    """first, second [R, 2, D] float32: (a, g) of the even and of the odd position -> [R, D].

    The softmax over two members is the logistic function of their difference.
    """
    share = sigmoid(first[:, 1] - second[:, 1])  # weight of the first member
    return first[:, 0] * share + second[:, 0] * (1.0 - share)


def index_key(latent: Tensor, wk: Tensor, k_norm: Tensor, table: Tensor, eps: float) -> Tensor:
    """latent [R, D] not rotated, wk [D, Di], rope table [R, 2, rotary] of the entry's first token -> [R, Di]."""
    return round_index(apply_rope(rms_norm(linear(latent, wk), k_norm, eps), table))


def main_entry(latent: Tensor, table: Tensor) -> Tensor:
    """latent [R, D] -> [R, D] as stored."""
    return round_compressed(apply_rope(latent, table))
