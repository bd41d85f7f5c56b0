"""Operations of the training forward that the reference has only in a form for ragged rows.

    mix        mHC weights; Sinkhorn is one Triton kernel on a GPU, the reference on a CPU
    attend     dense attention over [window | compressed entries | sink] with masks; also the indexer's target
    experts    every expert on every row, weighted; a row's unchosen experts have weight 0

Formulas are those of deepinfer_core.kernels.reference; tests/tools compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_core.kernels.reference.mhc import sinkhorn as reference_sinkhorn
from deepinfer_core.kernels.reference.moe import swiglu

_NEGATIVE_INFINITY = float("-inf")


def fused[C: Callable[..., Any]](function: C) -> C:
    """`function`, compiled where it runs on a GPU: its pointwise chains then take one pass over memory each."""
    return cast("C", torch.compile(function, dynamic=False)) if torch.cuda.is_available() else function


# ---- mHC -----------------------------------------------------------------------------------------------------------


def mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iterations: int, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [R, S, D], fn [M, S D], base [M], scale [3] -> pre [R, S], post [R, S], C [R, S, S]; M = (2 + S) S."""
    s = streams.shape[1]
    logits = _mix_logits(streams, fn)
    pre, post, c = _gates(logits, base, scale, streams.flatten(1), s, norm_eps, eps)
    return pre, post, sinkhorn(c, iterations, eps)


def _mix_logits(streams: Tensor, fn: Tensor) -> Tensor:
    with torch.autocast(streams.device.type, enabled=False):
        return F.linear(streams.flatten(1), fn)


@fused
def _gates(
    logits: Tensor, base: Tensor, scale: Tensor, flat: Tensor, s: int, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    inverse = torch.rsqrt((flat * flat).mean(-1, keepdim=True) + norm_eps)
    scales = torch.cat([scale[0:1].expand(s), scale[1:2].expand(s), scale[2:3].expand(s * s)])
    mixes = logits * inverse * scales + base
    pre, post = torch.sigmoid(mixes[:, :s]) + eps, torch.sigmoid(mixes[:, s : 2 * s]) * 2.0
    return pre, post, torch.softmax(mixes[:, 2 * s :].unflatten(-1, (s, s)), -1)


def sinkhorn(c: Tensor, iterations: int, eps: float) -> Tensor:
    """As the reference; on a GPU one kernel forward and one backward instead of about 120 and 300."""
    if not c.is_cuda:
        return reference_sinkhorn(c, iterations, eps)
    from tools.train_tiny.sinkhorn_triton import Sinkhorn

    return Sinkhorn.apply(c.contiguous(), iterations, eps)


@fused
def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """streams [R, S, D], pre [R, S] -> [R, D]."""
    return (pre[..., None] * streams).sum(1)


@fused
def expand(streams: Tensor, y: Tensor, post: Tensor, c: Tensor) -> Tensor:
    """streams [R, S, D], y [R, D], post [R, S], c [R, S, S] -> [R, S, D]; c's first index, the source, is summed."""
    carried = sum(c[:, i, :, None] * streams[:, i, None] for i in range(streams.shape[1]))
    return post[..., None] * y[:, None].float() + carried


# ---- attention -------------------------------------------------------------------------------------------------------


def window_pairs(x: Tensor, window: int) -> Tensor:
    """[B, T, D], T a multiple of `window` -> [B, T / window, 2 window, D]: each chunk after the one before."""
    chunks = x.unflatten(1, (-1, window))
    return torch.cat([F.pad(chunks[:, :-1], (0, 0, 0, 0, 1, 0)), chunks], 2)


def window_mask(length: int, window: int, first_visible: Tensor | None, device: torch.device) -> Tensor:
    """[B or 1, T, 2 window] bool: the `window` newest positions up to t, but for rows from `first_visible` [B] on none
    before it."""
    t = torch.arange(length, device=device)
    start = t // window * window - window  # position of column 0
    key = start[:, None] + torch.arange(2 * window, device=device)
    seen = ((key >= 0) & (key <= t[:, None]) & (key > t[:, None] - window))[None]
    if first_visible is None:
        return seen
    cut = first_visible[:, None, None]
    return seen & ((key[None] >= cut) | (t[None, :, None] < cut))


def attend(
    q: Tensor,
    window_keys: Tensor,
    seen: Tensor,
    sink: Tensor,
    entries: Tensor | None,
    visible: Tensor | None,
    selected: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """q [B, T, H, D], window_keys [B, T, D], seen [B or 1, T, 2W], sink [H]; entries [B, N, D], visible [T, N],
    selected [B, T, N] or None for all visible -> out [B, T, H, D] and, with entries, the attention to visible entries
    summed over heads [B, T, N].

    T is a multiple of W. The second result ignores the selection: it is what the indexer should learn to predict.
    """
    batch, length, heads, dim = q.shape
    width = seen.shape[-1]
    pairs = window_pairs(window_keys, width // 2).to(q.dtype)  # [B, T / W, 2W, D]
    scaled = (q * dim**-0.5).view(batch, length // (width // 2), -1, dim)
    window_logits = torch.matmul(scaled, pairs.transpose(-1, -2)).view(batch, length, heads, width)
    if entries is None or visible is None:
        weights, inverse = _softmax_window(window_logits, seen, sink)
        out = torch.matmul(weights.view(*scaled.shape[:3], width), pairs).view(q.shape)
        return out * inverse.to(out.dtype), None
    entries = entries.to(q.dtype)
    entry_logits = torch.matmul(scaled.view(batch, -1, dim), entries.transpose(-1, -2)).view(batch, length, heads, -1)
    window_weights, entry_weights, inverse, target = _softmax_both(
        window_logits, entry_logits, seen, visible, selected, sink
    )
    out = torch.matmul(window_weights.view(*scaled.shape[:3], width), pairs).view(q.shape)
    out = out + torch.matmul(entry_weights.view(batch, length * heads, -1), entries).view(q.shape)
    return out * inverse.to(out.dtype), target.detach()


@fused
def _softmax_window(logits: Tensor, seen: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    masked = logits.float().masked_fill(~seen[:, :, None], _NEGATIVE_INFINITY)
    top = torch.maximum(masked.amax(-1, keepdim=True), sink[:, None]).detach()
    weights = torch.exp(masked - top)
    inverse = 1.0 / (weights.sum(-1, keepdim=True) + torch.exp(sink[:, None] - top))
    return weights.to(logits.dtype), inverse


@fused
def _softmax_both(
    window_logits: Tensor, entry_logits: Tensor, seen: Tensor, visible: Tensor, selected: Tensor | None, sink: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unnormalized weights of window and entries, 1 / denominator, and the target."""
    window = window_logits.float().masked_fill(~seen[:, :, None], _NEGATIVE_INFINITY)
    entry = entry_logits.float().masked_fill(~visible[None, :, None], _NEGATIVE_INFINITY)
    top = torch.maximum(
        torch.maximum(window.amax(-1, keepdim=True), entry.amax(-1, keepdim=True)), sink[:, None]
    ).detach()
    window_weights, all_weights = torch.exp(window - top), torch.exp(entry - top)
    rest = window_weights.sum(-1, keepdim=True) + torch.exp(sink[:, None] - top)
    target = (all_weights / (all_weights.sum(-1, keepdim=True) + rest)).sum(2)
    entry_weights = all_weights if selected is None else all_weights.masked_fill(~selected[:, :, None], 0.0)
    inverse = 1.0 / (entry_weights.sum(-1, keepdim=True) + rest)
    return window_weights.to(window_logits.dtype), entry_weights.to(window_logits.dtype), inverse, target


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts(x: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float) -> Tensor:
    """x [R, D], weights [R, E] (0 where not chosen), w1 and w3 [E, I, D], w2 [E, D, I] -> [R, D]."""
    gate_up = F.linear(x, torch.cat([w1.flatten(0, 1), w3.flatten(0, 1)]))  # [R, 2 E I]
    act = _weighted_swiglu(gate_up, weights, limit)
    return F.linear(act, w2.transpose(0, 1).flatten(1))


@fused
def _weighted_swiglu(gate_up: Tensor, weights: Tensor, limit: float) -> Tensor:
    act = swiglu(gate_up, limit)
    return (act.unflatten(-1, (weights.shape[1], -1)) * weights[..., None]).flatten(-2).to(gate_up.dtype)


@fused
def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """logits [R, E] float32, bias [E] -> weights [R, E] (0 where not chosen), rows per expert [E]."""
    scores = torch.sqrt(F.softplus(logits))
    ids = torch.topk(scores.detach() + bias, k).indices
    chosen = torch.zeros_like(scores).scatter(1, ids, 1.0)
    kept = scores * chosen
    return kept / (kept.sum(-1, keepdim=True) + 1e-20) * scale, chosen.sum(0)


# ---- indexer ---------------------------------------------------------------------------------------------------------


def index_scores(iq: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """iq [B, T, Hi, Di], weights [B, T, Hi], keys [B, N, Di] -> [B, T, N] float32."""
    batch, length, heads, dim = iq.shape
    dots = torch.matmul(iq.reshape(batch, length * heads, dim), keys.to(iq.dtype).transpose(-1, -2))
    return _head_sum(dots.view(batch, length, heads, -1), weights)


@fused
def _head_sum(dots: Tensor, weights: Tensor) -> Tensor:
    return (torch.relu(dots.float()) * weights[..., None].float()).sum(2)


@fused
def index_loss(scores: Tensor, target: Tensor, visible: Tensor) -> Tensor:
    """Mean over rows of KL(target / sum || softmax(scores)) over the visible entries; rows that see none count 0."""
    log_q = torch.log_softmax(scores.masked_fill(~visible, -1e9), -1)
    p = target / (target.sum(-1, keepdim=True) + 1e-12)
    return (p * (torch.log(p + 1e-12) - log_q)).masked_fill(~visible, 0.0).sum(-1).mean()


def index_scale(heads: int, dim: int) -> float:
    """Factor of the indexer's head weights."""
    return 1.0 / math.sqrt(heads * dim)
