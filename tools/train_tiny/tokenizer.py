"""Byte-level BPE with DeepSeek's special tokens: `build` trains it, `Encoder` turns documents into ids.

ids   0 bos, 1 eos, 2 pad, the other spellings of deepseek-recipe, noise (DSpark), then 256 bytes, then merges
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from deepseek_recipe.tokens import SpecialToken

PAD, NOISE = "<｜▁pad▁｜>", "<｜noise｜>"
SPECIALS = (
    SpecialToken.Bos.default_str(),
    SpecialToken.Eos.default_str(),
    PAD,
    *(t.default_str() for t in SpecialToken if t not in (SpecialToken.Bos, SpecialToken.Eos)),
    NOISE,
)
# Part of what the model says: a reader who skips special tokens still wants to see them.
_SHOWN = frozenset(t.default_str() for t in (SpecialToken.ThinkingStart, SpecialToken.ThinkingEnd, SpecialToken.Dsml))


def build(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on `texts` (plain, without special tokens)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(s, special=s not in _SHOWN, normalized=False) for s in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Encoder:
    """Documents to ids: special spellings count only where a segment says so."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = {s: tokenizer.token_to_id(s) for s in SPECIALS}
        self._plain = Tokenizer(tokenizer.model)
        self._plain.pre_tokenizer = tokenizer.pre_tokenizer
        self.bos, self.eos = self._special[SPECIALS[0]], self._special[SPECIALS[1]]

    def encode(self, documents: list[list[tuple[str, bool]]]) -> list[np.ndarray]:
        """Segments (text, is special) of each document -> uint16 ids."""
        plain = [text for segments in documents for text, special in segments if not special]
        encoded = iter(self._plain.encode_batch_fast(plain, add_special_tokens=False))
        return [
            np.concatenate([
                np.asarray([self._special[text]] if special else next(encoded).ids, dtype=np.uint16)
                for text, special in segments
            ])
            for segments in documents
        ]  # fmt: skip
