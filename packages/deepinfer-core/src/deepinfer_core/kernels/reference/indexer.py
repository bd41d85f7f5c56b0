"""Two-level indexer: scores of compressed entries, candidate blocks, selection (docs/model.md: Attention).

    score       s_j = sum_h w_h relu(iq_h . ik_j),  w = (x weights_proj) (Di Hi)^-0.5;  -inf where invisible
    candidates  block b covers entries B b .. B b + B - 1, its score is the largest of them; the block with the newest
                visible entry always enters; the best `candidate_topk_blocks` above -inf are published per query
    reindex     later layers over the same keys: s_j = -inf outside the query's candidates
    selection   the best `index_topk`

Keys come in pages of fixed length, so that every product has one shape whatever the context length:
[Hi, Di] x [Di, page].
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.kernels.reference.topk import top_k, top_k_set

__all__ = ["candidate_blocks", "index_scores", "mask_to_candidates", "select_entries"]

_NEGATIVE_INFINITY = float("-inf")


def index_scores(iq: Tensor, weights: Tensor, pages: Tensor, num_visible: Tensor) -> Tensor:
    """iq [R, Hi, Di], weights [R, Hi], pages [R, B, P, Di], num_visible [R] -> scores [R, B * P] float32, -inf where
    invisible.
    """
    rows, num_pages, page, dim = pages.shape
    heads = iq.shape[1]
    queries = iq[:, None].expand(-1, num_pages, -1, -1).reshape(rows * num_pages, heads, dim)
    dots = torch.relu(torch.bmm(queries, pages.flatten(0, 1).transpose(1, 2)))  # [R * B, Hi, P]
    mix = weights[:, None, None].expand(-1, num_pages, -1, -1).reshape(rows * num_pages, 1, heads)
    scores = torch.bmm(mix, dots).float().view(rows, num_pages * page)
    entries = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(entries >= num_visible[:, None], _NEGATIVE_INFINITY)


def candidate_blocks(scores: Tensor, num_visible: Tensor, block: int, top_blocks: int) -> Tensor:
    """scores [R, N] with -inf where invisible -> [R, ceil(N / block)] bool: the blocks that later layers may select
    from.
    """
    n = scores.shape[1]
    padded = torch.nn.functional.pad(scores, (0, -n % block), value=_NEGATIVE_INFINITY)
    best = padded.unflatten(-1, (-1, block)).amax(-1)  # [R, NB]
    newest = torch.div(num_visible - 1, block, rounding_mode="floor")  # -1: nothing visible, no block is forced
    blocks = torch.arange(best.shape[1], device=scores.device)
    best = best.masked_fill(blocks == newest[:, None], float("inf"))
    chosen = top_k(best, top_blocks)  # [R, top_blocks]
    marks = torch.zeros(best.shape[0], best.shape[1] + 1, dtype=torch.bool, device=scores.device)
    marks.scatter_(1, torch.where(chosen < 0, best.shape[1], chosen), True)
    return marks[:, :-1]


def mask_to_candidates(scores: Tensor, blocks: Tensor, block: int) -> Tensor:
    """scores [R, N], blocks [R, NB] bool -> scores with -inf outside the marked blocks."""
    allowed = blocks.repeat_interleave(block, 1)[:, : scores.shape[1]]
    return scores.masked_fill(~allowed, _NEGATIVE_INFINITY)


def select_entries(scores: Tensor, k: int) -> Tensor:
    """scores [R, N] -> [R, k] entry numbers, ascending, -1 where fewer are above -inf."""
    return top_k_set(scores, k)
