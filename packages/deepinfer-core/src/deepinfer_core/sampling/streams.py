"""What a random word is for: the last word of every Philox counter. The numbers are part of the definition."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Stream"]


class Stream(IntEnum):
    """Independent streams of one key."""

    TOKEN = 0  # the draw of a token from the target; with coupled verification also the drafter's
    FORK = 1  # seeds of sample 1, 2, .. of n
    ARRIVAL = 2  # seeds of requests that bring none, from the engine's seed
    DRAFT = 3  # the drafter's draw, ratio verification only
    ACCEPT = 4  # the coin that accepts a draft, ratio verification only
    RESIDUAL = 5  # the draw that replaces a rejected draft, ratio verification only
