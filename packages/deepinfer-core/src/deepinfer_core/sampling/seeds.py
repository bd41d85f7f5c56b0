"""Seeds of requests: every request has one of 64 bits, given or derived, and reports it.

    request without a seed, number a   engine seed None: from the operating system
                                       engine seed s: Philox(key s, counter (a mod 2^32, a div 2^32, 0, ARRIVAL))
    sample i of n of seed s            i = 0: s
                                       i > 0: Philox(key s, counter (i, 0, 0, FORK))

The first two words of the result are the seed, the first one its low half.
"""

from __future__ import annotations

import secrets

from deepinfer_core.sampling.philox import philox4x32
from deepinfer_core.sampling.streams import Stream

__all__ = ["fork_seed", "request_seed"]


def request_seed(given: int | None, engine_seed: int | None, arrival_number: int) -> int:
    """The seed of a request, 0 <= seed < 2^64. `arrival_number` counts the requests of an engine from 0."""
    if given is not None:
        return given % 2**64
    if engine_seed is None:
        return secrets.randbits(64)
    return _derive(engine_seed, arrival_number, Stream.ARRIVAL)


def fork_seed(seed: int, sample: int) -> int:
    """The seed of sample number `sample` (from 0) of a request with `seed`."""
    return seed if sample == 0 else _derive(seed, sample, Stream.FORK)


def _derive(seed: int, number: int, stream: Stream) -> int:
    key = (seed & 0xFFFFFFFF, seed >> 32)
    low, high, _, _ = philox4x32((number & 0xFFFFFFFF, number >> 32, 0, int(stream)), key)
    return low | high << 32
