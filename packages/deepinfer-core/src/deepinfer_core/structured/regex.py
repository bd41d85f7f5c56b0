r"""`portable_regex`: a regular expression as Python and ECMAScript read it, rewritten for the automaton library.

    {,3}        -> {0,3}        a{b   -> a\{b       Python and ECMAScript take a stray brace literally
    [a[b&&c]    -> [a\[b\&&c]                       no set operations inside a class, except [:alpha:]
    [\w-.]      -> [\w\-.]                          a dash beside a class of characters stands for itself
    \Z \0 [\b] -> \z \x00 [\x08]

The library builds automata and never backtracks, so no expression takes exponential time in the length of its input.
What an automaton cannot express is refused: look-around, backreferences, word boundaries, possessive and atomic parts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.limits import MAX_NESTED_REPETITIONS, MAX_NESTING, MAX_REGEX_CHARS, MAX_REPETITIONS

__all__ = ["PortableRegex", "portable_regex"]

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
_WITH_CONTROLS: Final = re.compile(r"\[\^|\[:|\\[DPSUWpux]|[\x00-\x1f]")  # in a class that may contain some
_NO_CONTROLS: Final = r"[^\x00-\x07\x0B\x0E-\x1F]"
# Of these characters a class has to contain two to be known for a choice.
_SAMPLE: Final = "".join(map(chr, [*range(0x300), *range(0x300, 0xD800, 61), *range(0xE000, 0x20000, 251)]))
_CLASS_ESCAPE: Final = re.compile(r"\\(?:[dDsSwW]|[pP](?:\{[^{}]*\}|[A-Za-z]))")
_REFUSED_ESCAPES: Final = dict.fromkeys("k123456789", "a backreference") | dict.fromkeys("bB", "a word boundary")


class PortableRegex(NamedTuple):
    """A pattern that llguidance takes.

    num_fixed: characters that may follow one another without a choice between two, at most.
    has_choice: whether every text of it has a place where two characters may stand, as far as can be told.
    repeats_fixed: whether a part without such a place may be repeated without end, as in a+ and (ab)*.
    """

    text: str
    num_fixed: int
    has_choice: bool
    repeats_fixed: bool


def portable_regex(pattern: str, where: str, *, in_json: bool = False) -> PortableRegex:
    """`pattern` for llguidance. Raises GrammarError that names `where`, the construct and the character.

    in_json: it is about the characters of a JSON string, which llguidance writes with escapes. There a class must not
    contain the control characters that are never written: with them, [^"] would let \\" pass.

    Refused by size too: more than 65,536 characters, 100 groups inside one another, a count above 100,000, or counts
    inside one another that multiply to more than 50,000.
    """
    if len(pattern) > MAX_REGEX_CHARS:
        raise GrammarError(f"{where} has {len(pattern)} characters; at most {MAX_REGEX_CHARS} are allowed")
    return _Rewriter(pattern, where, in_json).run()


@dataclass(frozen=True, slots=True)
class _Part:
    """What is known of an item, or of an alternative as far as it was read."""

    cost: int = 1  # largest product of repetitions inside one another
    num_fixed: int = 0
    has_choice: bool = False  # between two characters at least, somewhere in every text of it


_FIXED: Final = _Part(num_fixed=1)
_CHOICE: Final = _Part(has_choice=True)


class _Group:
    """An open group: the alternative that is being read, and what its earlier ones have in common."""

    def __init__(self) -> None:
        self.current = _Part()
        self._earlier: _Part | None = None

    def add(self, item: _Part) -> None:
        now = self.current
        self.current = _Part(
            max(now.cost, item.cost), now.num_fixed + item.num_fixed, now.has_choice or item.has_choice
        )

    def alternative(self) -> None:
        self._earlier, self.current = self.whole(), _Part()

    def whole(self) -> _Part:
        now, earlier = self.current, self._earlier or self.current
        return _Part(
            max(now.cost, earlier.cost),
            max(now.num_fixed, earlier.num_fixed),
            now.has_choice and earlier.has_choice,
        )


class _Rewriter:
    """One pass from left to right."""

    def __init__(self, pattern: str, where: str, in_json: bool) -> None:
        self._pattern, self._where, self._in_json = pattern, where, in_json
        self._at = 0
        self._out: list[str] = []
        self._groups = [_Group()]  # open ones, outermost first
        self._last = _Part()  # what a quantifier would repeat; not yet added to its group
        self._repeats_fixed = False

    def run(self) -> PortableRegex:
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
            elif char == "|":
                self._item(char, 1, _Part())
                self._groups[-1].alternative()
            else:
                self._item(char if char != "}" else r"\}", 1, _CHOICE if char == "." else _FIXED)
        if len(self._groups) > 1:
            raise self._refused("a group that is never closed")
        self._groups[0].add(self._last)
        whole = self._groups[0].whole()
        return PortableRegex("".join(self._out), whole.num_fixed, whole.has_choice, self._repeats_fixed)

    def _refused(self, what: str) -> GrammarError:
        return GrammarError(
            f"{self._where} has {what} at character {self._at}, which cannot be enforced; rewrite it without"
        )

    def _item(self, text: str, length: int, item: _Part) -> None:
        self._groups[-1].add(self._last)
        self._out.append(text)
        self._at += length
        self._last = item

    def _escape(self) -> None:
        letter = self._pattern[self._at + 1 : self._at + 2]
        if not letter:
            raise self._refused("a backslash with nothing after it")
        if letter in _REFUSED_ESCAPES:
            raise self._refused(_REFUSED_ESCAPES[letter])
        braced = re.compile(r"\\[pPxuU]\{[^{}]*\}").match(self._pattern, self._at)
        part = _CHOICE if letter in "dDsSwW" else _FIXED
        if letter in "pP":
            text = braced[0] if braced else self._pattern[self._at : self._at + 3]
            self._item(self._written(f"[{text}]"), len(text), part)
        elif braced:
            self._item(braced[0], len(braced[0]), part)
        else:
            self._item(self._nul() or (r"\z" if letter == "Z" else "\\" + letter), 2, part)

    def _nul(self) -> str | None:
        r"""How \0 is written, if it stands here; with a digit behind it, it would be octal."""
        if not self._pattern.startswith(r"\0", self._at):
            return None
        if self._pattern[self._at + 2 : self._at + 3].isdigit():
            raise self._refused("an octal escape")
        return r"\x00"

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
            parts.append(self._class_part(char, first))
            first = False
        self._at += 1
        text = "".join(parts) + "]"
        self._item(self._written(text), 0, _CHOICE if _has_two(text) else _FIXED)

    def _written(self, text: str) -> str:
        """A class without the control characters that JSON strings are written without, if it is about one."""
        return f"[{text}&&{_NO_CONTROLS}]" if self._in_json and _WITH_CONTROLS.search(text) else text

    def _class_part(self, char: str, first: bool) -> str:
        posix = _POSIX_CLASS.match(self._pattern, self._at)
        kind = _CLASS_ESCAPE.match(self._pattern, self._at) or posix
        if kind:  # no end of a range: a dash behind it stands for itself, unless it is the last character anyway
            self._at = kind.end()
            dash = self._pattern.startswith("-", self._at)
            self._at += dash
            return kind[0] + r"\-" * dash
        if char == "-" and not first and _CLASS_ESCAPE.match(self._pattern, self._at + 1):
            self._at += 1
            return r"\-"
        doubled = char in "&-~" and self._pattern.startswith(char * 2, self._at)
        length = 2 if char == "\\" else 1
        text = self._pattern[self._at : self._at + length]
        if text in (r"\b", r"\0"):
            text = r"\x08" if text == r"\b" else self._nul() or text
        self._at += length
        return "\\" + text if char in "[]" or doubled else text

    def _open(self) -> None:
        for opening, name in _REFUSED_GROUPS:
            if self._pattern.startswith(opening, self._at):
                raise self._refused(name)
        if len(self._groups) > MAX_NESTING:
            raise GrammarError(
                f"{self._where} nests groups deeper than {MAX_NESTING} at character {self._at}; flatten it"
            )
        head = re.compile(r"\(\?(P?<[A-Za-z_]\w*>|[a-zA-Z-]*:|[a-zA-Z-]+\))").match(self._pattern, self._at)
        if head and head[0].endswith(")"):  # flags for the rest of the group: nothing is opened
            self._out.append(head[0])
            self._at = head.end()
            self._repeats_fixed |= "x" in head[0]  # what looks like a choice may be a comment
            return
        text = head[0] if head else "("
        self._repeats_fixed |= "x" in text and not text.endswith(">")
        self._item(text, len(text), _Part())
        self._groups.append(_Group())

    def _close(self) -> None:
        if len(self._groups) == 1:
            raise self._refused("a closing parenthesis with no group to close")
        self._groups[-1].add(self._last)
        self._last = _Part()
        self._item(")", 1, self._groups.pop().whole())

    def _quantifier(self, char: str) -> None:
        counted = _COUNTED.match(self._pattern, self._at) if char == "{" else None
        if char == "{" and (counted is None or counted[0] in ("{}", "{,}")):
            self._item(r"\{", 1, _FIXED)
            return
        text, most, is_endless = char, 1, char in "*+"
        if counted:
            low, comma, high = counted[1] or "0", counted[2], counted[3]
            most = max(int(low[:9]), int(high[:9] or "0"))
            is_endless = bool(comma) and not high
            text = "{" + low + comma + high + "}"
        self._last = self._repeated(most, is_endless)
        self._out.append(text)
        self._at += len(counted[0]) if counted else 1
        following = self._pattern[self._at : self._at + 1]
        if following == "+":
            raise self._refused("a possessive quantifier")
        if following == "?":  # lazy: the same texts match
            self._at += 1

    def _repeated(self, most: int, is_endless: bool) -> _Part:
        """The last item, up to `most` times or without end."""
        item = self._last
        cost = item.cost * max(most, 1)
        limit = MAX_NESTED_REPETITIONS if cost > max(most, 1) else MAX_REPETITIONS
        if cost > limit:
            nested = ", counting repetitions inside one another" if cost > most else ""
            raise GrammarError(
                f"{self._where} repeats {cost} times at character {self._at}{nested}; at most {limit} are allowed"
            )
        if is_endless and not item.has_choice:
            self._repeats_fixed = True
        times = most + is_endless
        if item.has_choice:  # which ends what is fixed
            times = min(times, 2)
        return _Part(cost, item.num_fixed * times, item.has_choice and most > 0)


@lru_cache(maxsize=1_024)
def _has_two(text: str) -> bool:
    """Whether a class is known to contain two characters; False where only the automaton library can tell."""
    if "[:" in text or "||" in text:  # Python warns of them
        return False
    try:
        return len(set(re.findall(text, _SAMPLE))) > 1
    except re.error:
        return False
