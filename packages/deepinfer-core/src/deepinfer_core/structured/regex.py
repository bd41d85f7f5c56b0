r"""`portable_regex`: a regular expression as Python and ECMAScript read it, rewritten for the automaton library.

    {,3}        -> {0,3}        a{b   -> a\{b       Python and ECMAScript take a stray brace literally
    [a[b&&c]    -> [a\[b\&&c]                       no set operations inside a class, except [:alpha:]
    \Z          -> \z

The library builds automata and never backtracks, so no expression takes exponential time in the length of its input.
What an automaton cannot express is refused: look-around, backreferences, word boundaries, possessive and atomic parts.
"""

from __future__ import annotations

import re
from typing import Final

from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.limits import MAX_NESTED_REPETITIONS, MAX_NESTING, MAX_REGEX_CHARS, MAX_REPETITIONS

__all__ = ["portable_regex"]

_COUNTED: Final = re.compile(r"\{(\d*)(,?)(\d*)\}")
_POSIX_CLASS: Final = re.compile(r"\[:\^?[a-z]+:\]")
_REFUSED_GROUPS: Final = (
    ("(?=", "look-ahead"),
    ("(?!", "negative look-ahead"),
    ("(?<=", "look-behind"),
    ("(?<!", "negative look-behind"),
    ("(?>", "an atomic group"),
    ("(?(", "a conditional"),
    ("(?P=", "a backreference"),
    ("(?P>", "recursion"),
    ("(?R", "recursion"),
    ("(?#", "a comment group"),
)
_REFUSED_ESCAPES: Final = dict.fromkeys("k123456789", "a backreference") | dict.fromkeys("bB", "a word boundary")


def portable_regex(pattern: str, where: str) -> str:
    """`pattern` for llguidance. Raises GrammarError that names `where`, the construct and the character.

    Refused by size too: more than 65,536 characters, 100 groups inside one another, a count above 100,000, or counts
    inside one another that multiply to more than 50,000.
    """
    if len(pattern) > MAX_REGEX_CHARS:
        raise GrammarError(f"{where} has {len(pattern)} characters; at most {MAX_REGEX_CHARS} are allowed")
    return _Rewriter(pattern, where).run()


class _Rewriter:
    """One pass from left to right. `_costs[d]` is the largest product of repetitions inside open group d so far."""

    def __init__(self, pattern: str, where: str) -> None:
        self._pattern, self._where = pattern, where
        self._at = 0
        self._out: list[str] = []
        self._costs: list[int] = [1]
        self._last_cost = 1  # of the item that a quantifier would repeat

    def run(self) -> str:
        while self._at < len(self._pattern):
            char = self._pattern[self._at]
            if char == "\\":
                self._escape()
            elif char == "[":
                self._class()
            elif char == "(":
                self._open()
            elif char == ")":
                self._close()
            elif char in "*+?{":
                self._quantifier(char)
            else:
                self._item(char if char != "}" else r"\}", 1)
        if len(self._costs) > 1:
            raise self._refused("a group that is never closed")
        return "".join(self._out)

    def _refused(self, what: str) -> GrammarError:
        return GrammarError(
            f"{self._where} has {what} at character {self._at}, which cannot be enforced; rewrite it without"
        )

    def _item(self, text: str, length: int, cost: int = 1) -> None:
        self._out.append(text)
        self._at += length
        self._last_cost = cost
        self._costs[-1] = max(self._costs[-1], cost)

    def _escape(self) -> None:
        letter = self._pattern[self._at + 1 : self._at + 2]
        if not letter:
            raise self._refused("a backslash with nothing after it")
        if letter in _REFUSED_ESCAPES:
            raise self._refused(_REFUSED_ESCAPES[letter])
        braced = re.compile(r"\\[pPxuU]\{[^{}]*\}").match(self._pattern, self._at)
        if braced:
            self._item(braced[0], len(braced[0]))
        else:
            self._item(r"\z" if letter == "Z" else "\\" + letter, 2)

    def _class(self) -> None:
        start = self._at
        self._at += 2 if self._pattern.startswith("[^", start) else 1
        parts = [self._pattern[start : self._at]]
        first = True
        while True:
            char = self._pattern[self._at : self._at + 1]
            if not char:
                self._at = start
                raise self._refused("a class that is never closed")
            if char == "]" and not first:
                break
            first = False
            parts.append(self._class_part(char))
        self._at += 1
        self._out.append("".join(parts) + "]")
        self._last_cost = 1

    def _class_part(self, char: str) -> str:
        posix = _POSIX_CLASS.match(self._pattern, self._at)
        if posix:
            self._at = posix.end()
            return posix[0]
        doubled = char in "&-~" and self._pattern.startswith(char * 2, self._at)
        length = 2 if char == "\\" else 1
        text = self._pattern[self._at : self._at + length]
        self._at += length
        return "\\" + text if char in "[]" or doubled else text

    def _open(self) -> None:
        for opening, name in _REFUSED_GROUPS:
            if self._pattern.startswith(opening, self._at):
                raise self._refused(name)
        if len(self._costs) > MAX_NESTING:
            raise GrammarError(
                f"{self._where} nests groups deeper than {MAX_NESTING} at character {self._at}; flatten it"
            )
        head = re.compile(r"\(\?(P?<[A-Za-z_]\w*>|[a-zA-Z-]*:|[a-zA-Z-]+\))").match(self._pattern, self._at)
        if head and head[0].endswith(")"):  # flags for the rest of the group: nothing is opened
            self._out.append(head[0])
            self._at = head.end()
            return
        text = head[0] if head else "("
        self._out.append(text)
        self._at += len(text)
        self._costs.append(1)

    def _close(self) -> None:
        if len(self._costs) == 1:
            raise self._refused("a closing parenthesis with no group to close")
        self._item(")", 1, self._costs.pop())

    def _quantifier(self, char: str) -> None:
        counted = _COUNTED.match(self._pattern, self._at) if char == "{" else None
        if char == "{" and (counted is None or counted[0] in ("{}", "{,}")):
            self._item(r"\{", 1)
            return
        text, most = char, 1
        if counted:
            low, comma, high = counted[1] or "0", counted[2], counted[3]
            most = max(int(low[:9]), int(high[:9] or "0"), 1)
            text = "{" + low + comma + high + "}"
        cost = self._last_cost * most
        limit = MAX_NESTED_REPETITIONS if cost > most else MAX_REPETITIONS
        if cost > limit:
            nested = ", counting repetitions inside one another" if cost > most else ""
            raise GrammarError(
                f"{self._where} repeats {cost} times at character {self._at}{nested}; at most {limit} are allowed"
            )
        self._item(text, len(counted[0]) if counted else 1, cost)
        following = self._pattern[self._at : self._at + 1]
        if following == "+":
            raise self._refused("a possessive quantifier")
        if following == "?":  # lazy: the same texts match
            self._at += 1
