"""Find the first marker in a stream of characters: a set of patterns, stepped one symbol at a time.

    marker   = [newlines*] literal          e.g.  \\n* </think>
    state    = for every marker, how much of it the last symbols have matched
    step     = state × symbol → state       computed on first use, then one dictionary look-up

Each marker is followed as in Knuth-Morris-Pratt, so a stream is read once and the work is linear in its length.
Newlines in front of a marker belong to it. Two rules that follow from keeping one candidate a marker:
- a newline that interrupts a partly matched marker does not start a new run of newlines for that marker;
- a candidate that falls back to a shorter one loses its run of newlines.

A symbol is a character of text, a character decoded from ordinary token ids, or one special token. The part of a
literal that spells a special token is not matched by ordinary token ids: a model that spells a marker out means text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Marker", "MarkerSet", "Origin", "State"]

# Far above what the protocol's own markers need (under 100); long stop sequences are what this bounds.
MAX_CACHED_STATES = 1024


class Origin(Enum):
    """Where characters come from; decides whether they may spell a special token."""

    TEXT = "text"
    PLAIN_TOKENS = "plain tokens"
    SPECIAL_TOKEN = "special token"


@dataclass(frozen=True)
class Marker:
    """A literal to look for. `special` is the slice of it that spells a special token; empty when none does."""

    literal: str
    special: tuple[int, int] = (0, 0)
    after_newlines: bool = False
    borders: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.literal:
            raise ValueError("a marker must have at least one character; an empty one would match everywhere")
        object.__setattr__(self, "borders", _borders(self.literal))

    def advance(self, progress: int, in_run: bool, char: str, spells_special: bool) -> tuple[int, bool]:
        """The next (characters matched, whether a run of newlines precedes them) after `char`."""
        was_partial = progress > 0
        first, last = self.special
        while True:
            if self.literal[progress] == char and (spells_special or not first <= progress < last):
                return progress + 1, in_run
            if progress == 0:
                return 0, self.after_newlines and char == "\n" and not was_partial
            progress, in_run = self.borders[progress - 1], False

    def advance_special(self, progress: int, in_run: bool, spelling: str) -> tuple[int, bool]:
        """The same for one special token, which matches only as a whole."""
        first, last = self.special
        if first < last and self.literal[first:last] == spelling and progress == first:
            return last, in_run
        return (last, False) if first == 0 < last and self.literal[:last] == spelling else (0, False)


def _borders(literal: str) -> tuple[int, ...]:
    """For every prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(literal)
    length = 0
    for i in range(1, len(literal)):
        while length and literal[i] != literal[length]:
            length = borders[length - 1]
        length += literal[i] == literal[length]
        borders[i] = length
    return tuple(borders)


class State:
    """One state of a `MarkerSet`. All fields but the three tables are fixed.

    `matched`: index of the marker that is complete, -1 for none. `runs`: markers whose newlines are held. `new_runs`:
    those whose run starts with this very symbol. `progress`: characters matched by the longest candidate without
    a run.
    """

    __slots__ = ("candidates", "matched", "new_runs", "progress", "runs", "special", "text", "tokens")

    def __init__(
        self, candidates: tuple[tuple[int, bool], ...], new_runs: tuple[int, ...], markers: Sequence[Marker]
    ) -> None:
        self.candidates = candidates
        self.new_runs = new_runs
        self.matched = next((i for i, (n, _) in enumerate(candidates) if n == len(markers[i].literal)), -1)
        self.runs = tuple(i for i, (_, in_run) in enumerate(candidates) if in_run)
        self.progress = max((n for n, in_run in candidates if not in_run), default=0)
        self.text: dict[str, State] = {}
        self.tokens: dict[str, State] = {}
        self.special: dict[str, State] = {}


class MarkerSet:
    """The markers of one stage, in order of precedence when two end at the same symbol."""

    def __init__(self, markers: Sequence[Marker]) -> None:
        self.markers = tuple(markers)
        self._alphabet = frozenset("".join(m.literal for m in markers)) | {"\n"}
        starts = {marker.literal[0] for marker in markers}
        if any(marker.after_newlines for marker in markers):
            starts.add("\n")
        # Search for the first character that can begin a marker. `(?!)` never matches.
        pattern = f"[{''.join(map(re.escape, sorted(starts)))}]" if starts else "(?!)"
        self.find_start: Callable[..., re.Match[str] | None] = re.compile(pattern).search
        self._states: dict[tuple[tuple[tuple[int, bool], ...], tuple[int, ...]], State] = {}
        self.root = State(((0, False),) * len(markers), (), self.markers)

    def step(self, state: State, char: str, origin: Origin) -> State:
        """The state after one character of text or of ordinary tokens."""
        table = state.text if origin is Origin.TEXT else state.tokens
        following = table.get(char)
        if following is not None:
            return following
        if char not in self._alphabet:
            return self.root
        spells_special = origin is Origin.TEXT
        pairs = zip(self.markers, state.candidates, strict=True)
        following = self._intern(state, tuple(m.advance(n, run, char, spells_special) for m, (n, run) in pairs))
        table[char] = following
        return following

    def step_special(self, state: State, spelling: str) -> State:
        """The state after one special token."""
        following = state.special.get(spelling)
        if following is None:
            pairs = zip(self.markers, state.candidates, strict=True)
            following = self._intern(state, tuple(m.advance_special(n, run, spelling) for m, (n, run) in pairs))
            if following is not self.root:
                state.special[spelling] = following
        return following

    def _intern(self, before: State, candidates: tuple[tuple[int, bool], ...]) -> State:
        new_runs = tuple(
            i for i, (now, was) in enumerate(zip(candidates, before.candidates, strict=True)) if now[1] and not was[1]
        )
        if not new_runs and candidates == self.root.candidates:
            return self.root
        key = (candidates, new_runs)
        known = self._states.get(key)
        if known is None:
            if len(self._states) >= MAX_CACHED_STATES:
                self._forget()
            known = self._states[key] = State(candidates, new_runs, self.markers)
        return known

    def _forget(self) -> None:
        """Drop all states but the root. A stream that stands in one of them goes on from it."""
        for state in (*self._states.values(), self.root):
            state.text.clear()
            state.tokens.clear()
            state.special.clear()
        self._states.clear()
