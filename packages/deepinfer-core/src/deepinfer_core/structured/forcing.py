r"""Whether llguidance may follow text that is forced: where only one byte can come, it takes it, and so on.

    "name": │ free text          the mask allows the first token of `"name":` alone, split as the tokenizer splits it,
                                 and the rest are drafts
    A: "a"+   start: A "a"       A takes every a, so that the next terminal never begins: forced for ever

It follows such text at every mask, to its end, however long. So a grammar with long fixed texts is compiled without
forcing, and so is Lark with a terminal that may take all that follows. Its masks then allow every way to split
a text into tokens, and it has no forced drafts; its language is the same. While it is tried out, long texts are
followed all the same: that shows at once what the rest of an answer would cost.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import Final

from deepinfer_core.structured.limits import MAX_FORCED_CHARS, MAX_FORCED_CHARS_TOGETHER
from deepinfer_core.structured.regex import PortableRegex, portable_regex

__all__ = ["NO_FORCING", "Fixed", "fixed_in_lark", "fixed_of"]

NO_FORCING: Final = '\n%llguidance {"no_forcing": true}\n'  # behind the rules, whose lines are counted in errors

type _Tokens = Sequence[re.Match[str]]
# Terminals of Lark's library that are one character of several.
_COMMON: Final = frozenset({"DIGIT", "HEXDIGIT", "LCASE_LETTER", "UCASE_LETTER", "LETTER"})
_ENDLESS: Final = re.compile(r"[*+]|\{[ \t]*\d+[ \t]*,[ \t]*\}")
_NUMBER: Final = re.compile(r"\d+")
_MANY_WAYS: Final = re.compile(r"\\[xup]|\.")  # to write a character


class Fixed(Enum):
    """The fixed texts of a grammar."""

    SHORT = "followed to their end at every mask"
    LONG = "followed only while the grammar is tried out"
    ENDLESS = "never followed"


def fixed_of(longest: int, total: int = 0) -> Fixed:
    """What texts are whose longest has so many characters, and all that may follow one another together."""
    return Fixed.LONG if longest > MAX_FORCED_CHARS or total > MAX_FORCED_CHARS_TOGETHER else Fixed.SHORT


def fixed_in_lark(tokens: _Tokens) -> Fixed:
    """The fixed texts of the Lark grammar with these tokens (of `structured/lark.py`), embedded schemas left out."""
    tokens = [token for token in tokens if token.lastgroup not in ("space", "newline", "priority")]
    if _takes_all(_definitions(tokens)):
        return Fixed.ENDLESS
    lengths = [_regex(token).num_fixed for token in tokens if token.lastgroup == "regex"]
    lengths += [len(token[0]) for token in tokens if token.lastgroup == "string"]
    for token in tokens:
        if token.lastgroup in ("counted", "tilde"):
            lengths += [int(number[:9]) for number in _NUMBER.findall(token[0])]
    return fixed_of(max(lengths, default=0))


def _definitions(tokens: _Tokens) -> list[tuple[str, _Tokens]]:
    """(name, body) of rules, terminals and directives."""
    starts = [at for at, token in enumerate(tokens) if token.lastgroup == "directive"]
    starts += [at - 1 for at, token in enumerate(tokens) if token[0] == ":" and at > 0]
    starts.sort()
    found: list[tuple[str, _Tokens]] = []
    for at, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        name = tokens[at][0].lstrip("?!")
        found.append((name, tokens[at + 1 if name.startswith("%") else at + 2 : end]))
    return found


def _takes_all(definitions: list[tuple[str, _Tokens]]) -> bool:
    """Whether a terminal may repeat a fixed text without end, where the next one may begin with it. What is not
    understood counts as such.
    """
    choices = _terminals_with_a_choice(definitions)
    endless = {name: body for name, body in definitions if _is_terminal(name) and _repeats(body, choices)}
    for name, body in definitions:
        if name == "%ignore" and (_repeats(body, choices) or any(token[0] in endless for token in body)):
            return True
        for at, token in enumerate(body):
            if _is_terminal(name) and token[0] not in endless:  # its own expressions: judged where it is used
                continue
            taken = endless.get(token[0], [token] if _repeats([token], choices) else [])
            if taken and (_is_terminal(name) or not _are_told_apart(taken, body[at + 1 : at + 3])):
                return True
    return False


def _is_terminal(name: str) -> bool:
    return name.strip("_").isupper() and not name.startswith("%")


def _repeats(body: _Tokens, choices: set[str]) -> bool:
    """Whether an expression of terminals may repeat a fixed text without end."""
    if any(token.lastgroup == "regex" and _regex(token).repeats_fixed for token in body):
        return True
    for at, (before, token) in enumerate(pairwise(body)):
        has_choice = before[0] in choices or _is_choice(before) or _is_range(body[max(0, at - 2) : at + 1])
        if _ENDLESS.fullmatch(token[0]) and not has_choice:
            return True
    return False


def _are_told_apart(taken: _Tokens, following: _Tokens) -> bool:
    """Whether what follows is a special token, or a text that begins with a character not in what repeats."""
    text = "".join(token[0] for token in taken).casefold()
    is_plain = not _MANY_WAYS.search(text) and all(token.lastgroup != "name" for token in taken)
    if not is_plain or not following or any(token.lastgroup in ("counted", "tilde") for token in following):
        return False
    first = following[0][0][1:2].casefold()
    is_other = following[0].lastgroup == "string" and first not in ('"', "\\") and first not in text
    return is_other or following[0].lastgroup == "special"


def _terminals_with_a_choice(definitions: list[tuple[str, _Tokens]]) -> set[str]:
    """Terminals that are a single expression with a choice, or a range of characters; those of the library."""
    own = {name for name, _ in definitions}
    own |= {
        token[0].removeprefix("->").strip() for _, body in definitions for token in body if token.lastgroup == "alias"
    }
    return set(_COMMON - own) | {
        name for name, body in definitions if _is_range(body) or (len(body) == 1 and _is_choice(body[0]))
    }


def _is_range(tokens: _Tokens) -> bool:
    """Whether these are two different characters, written as such, with .. between them."""
    texts = [token[0] for token in tokens]
    return len(texts) == 3 and texts[1] == ".." and len(texts[0]) == len(texts[2]) == 3 and texts[0] != texts[2]


def _is_choice(token: re.Match[str]) -> bool:
    return token.lastgroup == "regex" and _regex(token).has_choice


def _regex(token: re.Match[str]) -> PortableRegex:
    body, _, flags = token[0][1:].rpartition("/")
    return portable_regex(f"(?{flags})" * bool(flags) + body, "a regular expression")
