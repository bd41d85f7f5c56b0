"""Drafts under verification: coupled or by the ratio of probabilities (acceptance itself: kernels/reference/verify.py).

Coupled: the drafter drew x with the same noise G(seed, position, v), so x = y often, and what is emitted
is always the target's own draw: a function of seed and position alone.

Ratio: x was drawn from q with noise of its own; accept with probability min(1, p(x) / q(x)), else draw from the
normalised positive part of p - q; when all stand, the last row's own draw is emitted. The emitted tokens are
distributed as p (Leviathan et al. 2023, Chen et al. 2023), but their noise depends on how many drafts were verified.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.sampling.philox import random_words, uniform
from deepinfer_core.sampling.streams import Stream

__all__ = ["ratio_draw"]


def ratio_draw(
    target_logits: Tensor,
    draft_logits: Tensor,
    draft: Tensor,
    seed: Tensor,
    position: Tensor,
    kernels: Kernels = REFERENCE,
) -> tuple[Tensor, Tensor]:
    """(emitted [R], stands [R]) for R rows that each check one draft by the ratio of probabilities.

    target_logits, draft_logits: [R, V], what softmax turns into p and q; draft: int64 [R], the token drawn from q;
    seed, position: int64 [R], position that of the draft.
    """
    p, q = target_logits.double().softmax(-1), draft_logits.double().softmax(-1)
    at = draft[:, None]
    coin = uniform(random_words(seed, position, 1, Stream.ACCEPT))  # [R, 1]
    stands = (coin * q.gather(1, at) < p.gather(1, at))[:, 0]
    residual = (p - q).clamp(min=0.0)
    # p = q up to rounding leaves nothing over; a draft is then rejected with probability 0, up to rounding, too.
    nothing = residual.amax(1, keepdim=True) <= 0.0
    scores = residual.where(~nothing, p).log().float()
    token, _ = kernels.draw_token(scores, seed, position, int(Stream.RESIDUAL))
    return draft.where(stands, token), stands
