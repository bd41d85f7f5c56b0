"""The draw itself: argmax of logits plus noise, with noise made only for ids that can win.

    token = argmax_v (x_v + G(seed, position, v))        over ids with x_v > -inf; the lowest id wins ties

After top-k, top-p or a grammar only a few ids are left of thousands. On a CPU, where the count is known at once, noise
is then made for those ids alone. The numbers are the same, so the token is too.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer_core.kernels.reference.philox import gumbel_noise, gumbel_noise_at

__all__ = ["argmax_token", "draw_token"]

# One id costs a whole Philox block, of which an unfiltered row uses all four words.
_SPARSE_SHARE = 8


def argmax_token(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(ids [R], failed [R]): the lowest id of the largest score; failed where that score is not finite."""
    ids = scores.argmax(1)  # documented to return the first of equals
    return ids, ~scores.gather(1, ids[:, None])[:, 0].isfinite()


def draw_token(logits: Tensor, seed: Tensor, position: Tensor, stream: int = 0) -> tuple[Tensor, Tensor]:
    """(ids [R], failed [R]) drawn from softmax(logits), float32 [R, V]. seed and position: int64 [R]; stream: what the
    noise is for (sampling/streams.py).
    """
    num_rows, num_ids = logits.shape
    if logits.device.type != "cpu":
        return _draw_from_all(logits, seed, position, stream)
    is_candidate = ~logits.isneginf()  # NaN is one, so that it is found
    few = is_candidate.sum(1) * _SPARSE_SHARE <= num_ids  # [R]
    if not few.any():
        return _draw_from_all(logits, seed, position, stream)
    if few.all():
        return _draw_from_few(logits, is_candidate, seed, position, stream)
    token, failed, many = seed.new_empty(num_rows), few.new_empty(num_rows), ~few
    token[few], failed[few] = _draw_from_few(logits[few], is_candidate[few], seed[few], position[few], stream)
    token[many], failed[many] = _draw_from_all(logits[many], seed[many], position[many], stream)
    return token, failed


def _draw_from_all(logits: Tensor, seed: Tensor, position: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    return argmax_token(gumbel_noise(seed, position, logits.shape[1], stream).add_(logits))


def _draw_from_few(
    logits: Tensor, is_candidate: Tensor, seed: Tensor, position: Tensor, stream: int
) -> tuple[Tensor, Tensor]:
    num_rows, num_ids = logits.shape
    row, ids = is_candidate.nonzero().unbind(1)  # [E] all candidates of all rows
    scores = logits[row, ids] + gumbel_noise_at(seed[row], position[row], ids, stream)
    best = logits.new_full((num_rows,), float("-inf")).scatter_reduce_(0, row, scores, "amax")
    winner = ids.where(scores == best[row], num_ids - 1)
    return seed.new_full((num_rows,), num_ids - 1).scatter_reduce_(0, row, winner, "amin"), ~best.isfinite()
