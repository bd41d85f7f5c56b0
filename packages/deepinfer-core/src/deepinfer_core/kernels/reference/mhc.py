"""Single-pass mHC: the residual is S parallel streams X [R, S, D] (docs/model.md: Residual streams).

    m = (flatten(X) fn) * rsqrt(mean(flatten(X)^2) + eps)                                     [R, S + S + S * S]
    pre  = sigmoid(m[:S] scale_0 + base) + hc_eps            how the *next* sublayer's input is mixed from the streams
    post = 2 sigmoid(m[S:2S] scale_1 + base)                 how this sublayer's output is spread over the streams
    C    = Sinkhorn(softmax_j(m[2S:] scale_2 + base))        how the streams mix; C[i, j]: source i -> destination j
    u    = sum_i p_i X_i                                     sublayer input, p = `pre` of the sublayer before
    X'_j = post_j y + sum_i C[i, j] X_i
    x    = rms_norm(u of X')                                 what the next sublayer reads: `mhc_next`

Sinkhorn: C += hc_eps; C /= (sum_i C + hc_eps); then (iterations - 1) times: C /= (sum_j C + hc_eps); C /= (sum_i C +
hc_eps). A sum that is broadcast back is a product with a matrix of ones, and `baddbmm` adds the epsilon in the same
call: two small operations a half-step instead of three.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer_core.kernels.reference.elementwise import sigmoid
from deepinfer_core.kernels.reference.linear import linear
from deepinfer_core.kernels.reference.norm_rope import rms_norm

__all__ = ["mhc_collapse", "mhc_expand", "mhc_mix", "mhc_next", "next_of", "sinkhorn"]


def mhc_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iterations: int, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [R, S, D], fn [S * D, 2S + S * S], base [2S + S * S], scale [2S + S * S] -> pre [R, S], post [R, S], C
    [R, S, S].

    `scale` holds the three released scalars repeated over their columns. All float32.
    """
    s = streams.shape[1]
    flat = streams.flatten(1).float()
    inverse = torch.rsqrt((flat * flat).mean(-1, keepdim=True) + norm_eps)
    mixes = linear(flat, fn) * inverse * scale + base
    gates = sigmoid(mixes[:, : 2 * s].contiguous())
    pre, post = gates[:, :s] + eps, gates[:, s:] * 2.0
    return pre, post, sinkhorn(torch.softmax(mixes[:, 2 * s :].unflatten(-1, (s, s)).contiguous(), -1), iterations, eps)


def sinkhorn(c: Tensor, iterations: int, eps: float) -> Tensor:
    """c [R, S, S], rows already normalized by softmax, towards a doubly stochastic matrix (head of this file)."""
    r, s, _ = c.shape
    ones = c.new_ones(1, 1, 1).expand(r, s, s)
    epsilons = c.new_full((1, 1, 1), eps).expand(r, s, s)
    c = c + eps
    c = c / torch.baddbmm(epsilons, ones, c)
    for _ in range(iterations - 1):
        c = c / torch.baddbmm(epsilons, c, ones)
        c = c / torch.baddbmm(epsilons, ones, c)
    return c


def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """streams [R, S, D], pre [R, S] -> [R, D]."""
    return torch.bmm(pre[:, None].to(streams.dtype), streams)[:, 0]


def mhc_expand(streams: Tensor, y: Tensor, post: Tensor, c: Tensor) -> Tensor:
    """streams [R, S, D], y [R, D], post [R, S], c [R, S, S] -> [R, S, D]. The source, first index of c, is summed."""
    spread = post[:, :, None].to(y.dtype) * y[:, None]
    return torch.baddbmm(spread, c.transpose(1, 2).to(streams.dtype), streams)


def next_of(
    expand: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    collapse: Callable[[Tensor, Tensor], Tensor],
    norm: Callable[[Tensor, Tensor, float], Tensor],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`mhc_next` as these three operations, for tables that have no fused one."""

    def mhc_next(
        streams: Tensor, y: Tensor, post: Tensor, c: Tensor, pre: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """streams [R, S, D], y [R, D], post and pre [R, S], c [R, S, S], weight [D] -> X' [R, S, D], x [R, D]."""
        after = expand(streams, y, post, c)
        return after, norm(collapse(after, pre), weight, eps)

    return mhc_next


mhc_next = next_of(mhc_expand, mhc_collapse, rms_norm)
