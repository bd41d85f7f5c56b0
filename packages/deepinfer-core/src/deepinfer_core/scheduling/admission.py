"""Is there memory for one more request? Look at the largest cache that the running ones will need together.

With requests sorted by remaining tokens, longest first, the i-th to last end comes when requests 1..i are still there
and each has grown by remaining_i:

    peak = max over i of   sum over j <= i of current_j   +   i x remaining_i

(Past-Future scheduling, Gong et al., ASPLOS 2025.) With right predictions nothing is ever preempted and the cache is
nearly full at its peak. A prediction is `max_tokens` times the share of it that answers have used lately; a
preemption raises the share.
"""

from __future__ import annotations

import numpy as np

from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.scheduling.plan import Int64Array

__all__ = ["OutputForecast", "peak_tokens"]

_RATE = 0.05  # weight of one finished answer
_MIN_SHARE = 0.05
_AFTER_PREEMPTION = 1.2  # the forecast was too low by about so much
_FIRST_OPEN_END = 1024.0  # output tokens of a request without max_tokens, before any has finished


def peak_tokens(current: Int64Array, remaining: Int64Array) -> int:
    """Most tokens held at once, if request i holds current[i] now and ends remaining[i] tokens later."""
    if len(current) == 0:
        return 0
    order = np.argsort(-remaining, kind="stable")
    held = np.cumsum(current[order]) + np.arange(1, len(order) + 1) * remaining[order]
    return int(held.max())


class OutputForecast:
    """How long answers get: learned from the ones that finished. Only admission uses it; no token depends on it."""

    def __init__(self) -> None:
        self._share = 1.0  # of max_tokens, where the request names it
        self._open_end = _FIRST_OPEN_END  # tokens, where it does not

    def output_tokens(self, most: int, *, open_end: bool) -> int:
        """Expected output of a request that may have `most` tokens; `open_end`: the user named no max_tokens."""
        expected = self._open_end if open_end else most * self._share
        return max(1, min(most, round(expected)))

    def remaining(self, expected_end: Int64Array, length: Int64Array, limit: Int64Array) -> Int64Array:
        """Tokens that running requests will still get; one that outlived its forecast gets a block more."""
        late = np.minimum(limit - length, BLOCK_TOKENS)
        return np.maximum(expected_end - length, late)

    def finished(self, output_tokens: int, most: int, *, open_end: bool) -> None:
        """Learn from an answer."""
        if open_end:
            self._open_end += _RATE * (output_tokens - self._open_end)
        else:
            self._share += _RATE * (output_tokens / most - self._share)
            self._share = max(_MIN_SHARE, self._share)

    def preempted(self) -> None:
        """Learn that too many were let in."""
        self._share = min(1.0, self._share * _AFTER_PREEMPTION)
        self._open_end *= _AFTER_PREEMPTION
