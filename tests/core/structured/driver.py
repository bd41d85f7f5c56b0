"""Draws answers the way the engine does: noise by (seed, position), masks per row, drafts that stand or fall."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_core.structured import GrammarConstraint
from deepinfer_core.text import Tokenizer

__all__ = ["allowed_ids", "answer"]


def allowed_ids(mask: np.ndarray, num_tokens: int) -> np.ndarray:
    """Ids whose bit is set."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:num_tokens])


def answer(
    constraint: GrammarConstraint,
    tokenizer: Tokenizer,
    seed: int,
    *,
    oracle: Sequence[int] = (),
    most: int = 600,
) -> list[int]:
    """Tokens up to the end token, or `most` of them.

    oracle: an earlier answer to the same seed; drafts are taken from it, spoilt now and then, five a step.
    """
    closing = np.array([tokenizer.token_bytes(token)[:1] in b'"}]' for token in range(tokenizer.num_tokens)])
    spoiler = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < most:
        drafts = [token if spoiler.random() < 0.8 else int(spoiler.integers(384)) for token in
                  oracle[len(tokens) : len(tokens) + 5]]  # fmt: skip
        rows = constraint.rows(drafts, 5 if oracle else 0)
        step: list[int] = []
        for row, mask in enumerate(rows.masks):
            step.append(_draw(mask, tokenizer, closing, seed, len(tokens) + row))
            if row == len(rows.drafts) or rows.drafts[row] != step[-1]:
                break
        stop = constraint.observe(step)
        if stop is not None:
            return tokens + step[: stop.num_tokens]
        tokens += step
    return tokens[:most]


def _draw(mask: np.ndarray | None, tokenizer: Tokenizer, closing: np.ndarray, seed: int, position: int) -> int:
    """The most likely allowed token; strings, objects and arrays are eager to close."""
    scores = np.random.default_rng((seed, position)).gumbel(size=tokenizer.num_tokens) + 3.0 * closing
    scores[tokenizer.eos_token_id] += 4.0
    if mask is not None:
        forbidden = np.ones(tokenizer.num_tokens, np.bool_)
        forbidden[allowed_ids(mask, tokenizer.num_tokens)] = False
        assert not forbidden.all()
        scores[forbidden] = -np.inf
    return int(scores.argmax())
