"""Constants of the Engram hash (docs/model.md: Engram), a function of the config alone.

    multipliers  2 v + 1 for max_ngram draws v of NumPy's default_rng(10007 layer) in [0, floor((2^63 - 1) / C) div 2)
    primes       consecutive primes from engram_vocab_size up, never reused, in the order (layer, n-gram size 2.., head)
    offsets      column c of a layer owns rows [offset_c, offset_c + prime_c); offsets are running sums of the primes

C is engram_compressed_vocab_size, so class * multiplier stays below 2^63.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import ConfigError

__all__ = ["EngramHash", "engram_hashes"]

_SEED_PER_LAYER = 10007


@dataclass(frozen=True, slots=True)
class EngramHash:
    """Constants of one Engram layer; columns are ordered by n-gram size, then head."""

    multipliers: tuple[int, ...]  # [max_ngram]
    primes: tuple[int, ...]  # [columns]
    offsets: tuple[int, ...]  # [columns]


def engram_hashes(config: ModelConfig) -> dict[int, EngramHash]:
    """Constants of every Engram layer. Raises ConfigError where a table has fewer rows than its columns need."""
    hashes: dict[int, EngramHash] = {}
    primes = _primes_from(config.engram_vocab_size)
    for layer, num_rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        columns = tuple(next(primes) for _ in range(config.engram_columns))
        if sum(columns) > num_rows:
            raise ConfigError(
                f"config.json: engram_num_embeddings is {num_rows} for layer {layer}; the primes from "
                f"engram_vocab_size {config.engram_vocab_size} up need {sum(columns)} rows"
            )
        offsets = (0, *accumulate(columns[:-1]))
        hashes[layer] = EngramHash(_multipliers(config, layer), columns, offsets)
    return hashes


def _multipliers(config: ModelConfig, layer: int) -> tuple[int, ...]:
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    draws = np.random.default_rng(_SEED_PER_LAYER * layer).integers(
        0, bound, config.engram_max_ngram_size, dtype=np.int64
    )
    return tuple(2 * int(v) + 1 for v in draws)


def _primes_from(start: int) -> Iterator[int]:
    candidate = start
    while True:
        if _is_prime(candidate):
            yield candidate
        candidate += 1


def _is_prime(n: int) -> bool:
    """Miller-Rabin with bases that decide every n below 2.1e12; config.json's integers stay below 2^31."""
    bases = (2, 3, 5, 7, 11)
    if n < 2 or any(n % p == 0 for p in bases):
        return n in bases
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(pow(base, odd, n), n, twos) for base in bases)


def _passes(power: int, n: int, twos: int) -> bool:
    if power in (1, n - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % n
        if power == n - 1:
            return True
    return False
