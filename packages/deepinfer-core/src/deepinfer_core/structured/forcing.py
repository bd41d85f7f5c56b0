r"""Whether llguidance may follow text that is forced: where only one byte can come, it takes it, and so on.

    "name": │ free text          the mask allows the first token of `"name":` alone, split as the tokenizer splits it,
                                 and the rest are drafts
    A: "a"+   start: A "a"       A takes every a, so that a second terminal never begins: forced for ever

It follows such text at every mask, to its end, however long. So a grammar with long fixed texts is compiled without
forcing, and so is Lark whose terminals may repeat a fixed text without end. Its masks then allow every way to split
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
    patterns = [_regex(token) for token in tokens if token.lastgroup == "regex"]
    if any(pattern.repeats_fixed for pattern in patterns) or _a_terminal_repeats(tokens):
        return Fixed.ENDLESS
    lengths = [pattern.num_fixed for pattern in patterns]
    lengths += [len(token[0]) for token in tokens if token.lastgroup == "string"]
    for token in tokens:
        if token.lastgroup in ("counted", "tilde"):
            lengths += [int(number[:9]) for number in _NUMBER.findall(token[0])]
    return fixed_of(max(lengths, default=0))


def _a_terminal_repeats(tokens: _Tokens) -> bool:
    """Whether a terminal may repeat a fixed text without end. What is not understood counts as fixed."""
    choices = _names_of_choices(tokens)
    in_terminal = False
    for at, (before, token) in enumerate(pairwise(tokens)):
        if token[0] == ":":
            in_terminal = before[0].strip("?!_").isupper()
        in_terminal |= before[0] == "%ignore"
        if not in_terminal or not _ENDLESS.fullmatch(token[0]):
            continue
        if not (before[0] in choices or _is_choice(before) or _is_range(tokens[max(0, at - 2) : at + 1])):
            return True
    return False


def _names_of_choices(tokens: _Tokens) -> set[str]:
    """Terminals that are a single expression with a choice, or a range of characters; those of the library."""
    own = {before[0] for before, token in pairwise(tokens) if token[0] == ":"}
    own |= {token[0].removeprefix("->").strip() for token in tokens if token.lastgroup == "alias"}
    names = set(_COMMON - own)
    for at, token in enumerate(tokens):
        body = tokens[at + 2 : at + 5]
        signs = [other[0] for other in tokens[at + 1 : at + 7]] + [":"] * 6  # ":" comes after the name of the next
        is_expression = signs[3] == ":" and body and _is_choice(body[0])
        if signs[0] == ":" and (is_expression or (signs[5] == ":" and _is_range(body))):
            names.add(token[0])
    return names


def _is_range(tokens: _Tokens) -> bool:
    """Whether these are two different characters, written as such, with .. between them."""
    texts = [token[0] for token in tokens]
    return len(texts) == 3 and texts[1] == ".." and len(texts[0]) == len(texts[2]) == 3 and texts[0] != texts[2]


def _is_choice(token: re.Match[str]) -> bool:
    return token.lastgroup == "regex" and _regex(token).has_choice


def _regex(token: re.Match[str]) -> PortableRegex:
    body, _, flags = token[0][1:].rpartition("/")
    return portable_regex(f"(?{flags})" * bool(flags) + body, "a regular expression")
