"""`Trigger`: finds a sequence of token ids in a stream of them (Knuth-Morris-Pratt), with a state that is one integer.

sequence a a b:   stream  a a a b
                  progress 1 2 2 3 = complete
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Trigger"]


class Trigger:
    """`progress` = how many tokens of `sequence` the newest tokens of the stream match. Empty = complete at once."""

    def __init__(self, sequence: Sequence[int]) -> None:
        self._sequence = tuple(sequence)
        self._shorter = [0] * len(self._sequence)  # of each prefix: its longest proper prefix that is also its end
        for length in range(1, len(self._sequence)):
            self._shorter[length] = self._next(self._shorter[length - 1], self._sequence[length])

    def is_complete(self, progress: int) -> bool:
        """Whether the whole sequence has just been seen."""
        return progress == len(self._sequence)

    def advance(self, progress: int, token: int) -> int:
        """Progress after one more token; the sequence must not be complete yet."""
        return self._next(progress, token)

    def progress_of(self, tokens: Sequence[int]) -> int:
        """Progress at the end of `tokens`; a sequence that was complete earlier doesn't count."""
        tail = tokens[max(0, len(tokens) - len(self._sequence)) :]
        progress = 0
        for token in tail:
            progress = self._next(progress, token)
        return progress

    def _next(self, progress: int, token: int) -> int:
        while progress and self._sequence[progress] != token:
            progress = self._shorter[progress - 1]
        return progress + (bool(self._sequence) and self._sequence[progress] == token)
