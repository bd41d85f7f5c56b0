"""`Automaton`: a small deterministic automaton over characters, to compare the words of lexemes.

    expression ─ Thompson ─► states with empty moves ─ subsets, on demand ─► transitions on disjoint ranges

Only two questions are asked, both about prefixes: is a word of A a proper prefix of a word of A, or of one of B?
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from deepinfer_core.structured.rules import Chars, Choice, Expression, Reference, Repeat, Sequence

__all__ = ["Automaton", "AutomatonTooLarge", "Regular", "has_proper_prefix"]

type Regular = Expression  # without references
type _Subset = frozenset[int]

_MAX_STATES: Final = 4_000
_MAX_PAIRS: Final = 20_000


class AutomatonTooLarge(Exception):  # noqa: N818 -- an answer ("don't know") rather than an error
    """The question costs too much; the caller takes the safe side."""


class Automaton:
    """Built from an expression without references."""

    def __init__(self, expression: Regular) -> None:
        self._moves: list[list[tuple[int, int, int]]] = []  # state -> (low, high, next)
        self._jumps: list[list[int]] = []
        start = self._state()
        self._final = self._add(expression, start)
        self.start: _Subset = self._closed({start})
        self._known: dict[_Subset, list[tuple[int, int, _Subset]]] = {}

    def accepts_at(self, subset: _Subset) -> bool:
        """Whether the text so far is a word."""
        return self._final in subset

    def steps(self, subset: _Subset) -> list[tuple[int, int, _Subset]]:
        """(low, high, next) for disjoint ascending ranges of characters that can follow."""
        if subset not in self._known:
            self._known[subset] = list(self._split(subset))
        return self._known[subset]

    def _state(self) -> int:
        if len(self._moves) == _MAX_STATES:
            raise AutomatonTooLarge
        self._moves.append([])
        self._jumps.append([])
        return len(self._moves) - 1

    def _add(self, expression: Regular, start: int) -> int:
        """States for `expression` from `start` on; returns the state after it."""
        match expression:
            case Chars(ranges):
                end = self._state()
                self._moves[start] += [(low, high, end) for low, high in ranges]
            case Sequence(items):
                end = start
                for item in items:
                    end = self._add(item, end)
            case Choice(options):
                end = self._state()
                for option in options:
                    begin = self._state()
                    self._jumps[start].append(begin)
                    self._jumps[self._add(option, begin)].append(end)
            case Repeat(item, low, high):
                end = self._repeat(item, low, high, start)
            case Reference(name):
                raise ValueError(f"{name} is a reference")
        return end

    def _repeat(self, item: Regular, low: int, high: int | None, start: int) -> int:
        for _ in range(low):
            start = self._add(item, start)
        end = self._state()
        if high is None:
            loop = self._state()
            self._jumps[start].append(loop)
            self._jumps[self._add(item, loop)].append(loop)
            self._jumps[loop].append(end)
            return end
        self._jumps[start].append(end)
        for _ in range(high - low):
            begin = self._state()
            self._jumps[start].append(begin)
            start = self._add(item, begin)
            self._jumps[start].append(end)
        return end

    def _closed(self, states: set[int]) -> _Subset:
        open_states = list(states)
        while open_states:
            for state in self._jumps[open_states.pop()]:
                if state not in states:
                    states.add(state)
                    open_states.append(state)
        return frozenset(states)

    def _split(self, subset: _Subset) -> Iterator[tuple[int, int, _Subset]]:
        moves = [move for state in subset for move in self._moves[state]]
        cuts = sorted({low for low, _, _ in moves} | {high + 1 for _, high, _ in moves})
        for low, after in itertools.pairwise(cuts):
            targets = {target for first, last, target in moves if first <= low and after - 1 <= last}
            if targets:
                yield low, after - 1, self._closed(targets)


def has_proper_prefix(shorter: Automaton, longer: Automaton) -> bool:
    """Whether a word of `shorter` is a proper prefix of a word of `longer`.

    Raises AutomatonTooLarge. Every state of a Thompson automaton leads to a word, so "can go on" is "is a prefix".
    """
    seen = {(shorter.start, longer.start)}
    open_pairs = list(seen)
    while open_pairs:
        short, long = open_pairs.pop()
        steps = longer.steps(long)
        if shorter.accepts_at(short) and steps:
            return True
        for low, high, long_next in steps:
            for first, last, short_next in shorter.steps(short):
                pair = (short_next, long_next)
                if first <= high and low <= last and pair not in seen:
                    if len(seen) == _MAX_PAIRS:
                        raise AutomatonTooLarge
                    seen.add(pair)
                    open_pairs.append(pair)
    return False
