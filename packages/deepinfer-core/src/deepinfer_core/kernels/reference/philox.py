"""Counter-based noise: a pure function of (seed, position, vocabulary id, stream), the same on every device.

    key      = (seed mod 2^32, seed div 2^32)
    counter  = (v div 4, position mod 2^32, position div 2^32, stream)
    w        = word (v mod 4) of Philox4x32-10(counter, key)
    u        = (w + 0.5) / 2^32                       in float64, never 0 or 1
    G        = float32(-ln(-ln u))                    both logarithms in float64

argmax_v (x_v + G_v) draws v with probability softmax(x)_v (the Gumbel-max trick). No state: a row's noise depends
neither on its place in the batch nor on what was drawn before. Philox is from Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3" (SC 2011); its known answers and those of G are tests. Words are equal everywhere; a logarithm that
is wrong in the last bit of float64 changes G only where that bit decides the rounding to float32, one id in 2^28.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gumbel", "gumbel_noise", "gumbel_noise_at", "philox4x32", "random_words", "random_words_at", "uniform"]

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_WORDS = 4

# Counters of one tile on a CPU. The rounds pass over the tile about a hundred times, so it should stay in the cache.
_TILE_COUNTERS = 1 << 14


def philox4x32[Word: (int, Tensor)](
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 of words in [0, 2^32): Python integers, or int64 tensors that broadcast against each other.

    An int64 product of two such words wraps, but its bits are those of the unsigned product; the masks remove the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = k0 + _WEYL_0 & _MASK, k1 + _WEYL_1 & _MASK
    return c0, c1, c2, c3


def random_words(seed: Tensor, position: Tensor, num_ids: int, stream: int) -> Tensor:
    """w of ids 0 .. num_ids - 1 for each row, int64 of [0, 2^32), [R, num_ids].

    seed, position: int64 [R]; a seed of 2^63 or more is given by its two's complement.
    """
    num_rows, num_counters = len(seed), -(-num_ids // _WORDS)
    block = torch.arange(num_counters, device=seed.device)[None]  # [1, C]
    words = seed.new_empty(num_rows, num_counters, _WORDS)  # [R, C, 4]
    tile = num_rows if seed.device.type != "cpu" else max(1, _TILE_COUNTERS // max(1, num_counters))
    for first in range(0, num_rows, max(1, tile)):
        rows = slice(first, first + tile)
        s, p = seed[rows, None], position[rows, None]  # [r, 1]
        counter = (block, p & _MASK, p >> 32 & _MASK, torch.full_like(p, stream))
        parts = philox4x32(counter, (s & _MASK, s >> 32 & _MASK))
        for index, part in enumerate(parts):
            words[rows, :, index] = part
    return words.flatten(1)[:, :num_ids]


def random_words_at(seed: Tensor, position: Tensor, ids: Tensor, stream: int) -> Tensor:
    """w of single (seed, position, id): int64 [E] from three int64 [E]. A fourth as fast an id as `random_words`."""
    counter = (ids // _WORDS, position & _MASK, position >> 32 & _MASK, torch.full_like(ids, stream))
    parts = torch.stack(philox4x32(counter, (seed & _MASK, seed >> 32 & _MASK)))  # [4, E]
    return parts.gather(0, (ids % _WORDS)[None])[0]


def uniform(words: Tensor) -> Tensor:
    """u = (w + 0.5) / 2^32 in float64, strictly between 0 and 1."""
    return (words.double() + 0.5) * 2.0**-32


def gumbel(words: Tensor) -> Tensor:
    """G of each word: float32, from -3.130 (w = 0) to 22.874 (w = 2^32 - 1)."""
    return uniform(words).log_().neg_().log_().neg_().float()


def gumbel_noise(seed: Tensor, position: Tensor, num_ids: int, stream: int = 0) -> Tensor:
    """G(seed, position, v) for v < num_ids: float32 [R, num_ids]; seed and position as for `random_words`."""
    return gumbel(random_words(seed, position, num_ids, stream))


def gumbel_noise_at(seed: Tensor, position: Tensor, ids: Tensor, stream: int = 0) -> Tensor:
    """G of single (seed, position, id): float32 [E] from three int64 [E]."""
    return gumbel(random_words_at(seed, position, ids, stream))
