r"""Syntax check of regular expressions, in the common ground of ECMA-262 and the official codec's engine.

    pattern := alternative ("|" alternative)*         term := atom quantifier?
    atom    := "." | "^" | "$" | escape | class | "(?" flags ")" | "(" [?: ?= ?! ?<= ?<! ?<name> ?flags:] pattern ")"
             | character

A pattern is only read, in one pass and without recursion: none is ever run, so none can be made to backtrack. What it
would be with its counted repetitions written out is bounded, for the sake of the engine that enforces it.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache

from deepseek_recipe.checks import clipped, shown

__all__ = ["check_pattern"]

MAX_PATTERN_CHARS = 65_536
MAX_WRITTEN_OUT = 300_000
"""Characters and sets of a pattern whose counted repetitions are written out."""
_MAX_GROUP_DEPTH = 200
_MAX_DIGITS = 9  # of a number in a pattern

_SWITCHES = r"(?=[imsxuUR-])[imsxuUR]*(?:-[imsxUR]+)?"
_FLAGS = re.compile(rf"\(\?{_SWITCHES}\)")
_GROUP = re.compile(
    rf"\((?:\?(?:[:=!]|<[=!]|P?<(?P<name>[A-Za-z_$][\w$]*)>|{_SWITCHES}:|(?P<bad>.?)))?",
    re.DOTALL,
)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\s*(?P<low>[0-9]+)\s*(?:,\s*(?P<high>[0-9]*)\s*)?\})[?+]?")
_ESCAPE = re.compile(
    r"\\(?:[dDsSwWbBAz]|[fnrtv]|c[A-Za-z]|[xuU](?:\{(?P<braced>[0-9A-Fa-f]{1,8})\}"
    r"|(?<=x)(?P<x>[0-9A-Fa-f]{2})|(?<=u)(?P<u>[0-9A-Fa-f]{4})|(?<=U)(?P<U>[0-9A-Fa-f]{8}))"
    r"|(?P<property>[pP](?:\{\^?[A-Za-z0-9_=.]+\}|[A-Z]))|(?P<group>[1-9][0-9]*)|(?P<itself>[ -/:-@\[-`{-~]))"
)
_CLASS_SET = re.compile(r"\\(?:[dDsSwW]|[pP](?:\{[^}]*\}|[A-Z]))")
_NOT_QUANTIFIABLE = re.compile(r"\(\?<?[=!]")
_CAPTURING = re.compile(r"\((?!\?)|\(\?P?<[A-Za-z_$]")


def check_pattern(pattern: str) -> str | None:
    """None for a valid pattern, otherwise what is wrong with it and where."""
    if len(pattern) > MAX_PATTERN_CHARS:
        return f"{len(pattern)} characters are more than the limit of {MAX_PATTERN_CHARS}"
    return _Reader(pattern).problem()


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._open_groups: list[int] = []
        self._names: set[str] = set()
        self._num_captures = 0
        self._sizes = [0]  # what each open group holds, written out
        self._last_size = 0  # of what a quantifier would repeat

    def problem(self) -> str | None:
        """Reads the whole pattern."""
        can_repeat = was_quantifier = False
        while self._at < len(self._pattern):
            char = self._pattern[self._at]
            if (quantifier := _QUANTIFIER.match(self._pattern, self._at)) is not None:
                is_counted = quantifier["low"] is not None
                if not can_repeat and not (was_quantifier and is_counted):
                    return f"nothing to repeat at {self._at}"
                if is_counted and (problem := self._count(quantifier)) is not None:
                    return problem
                self._at = quantifier.end()
                can_repeat = False
                was_quantifier = True
                continue
            was_quantifier = False
            if (flags := _FLAGS.match(self._pattern, self._at)) is not None:
                self._at = flags.end()
                can_repeat = False
            elif char == "{":
                return f"a {{ that counts nothing at {self._at}"
            elif char == "(":
                if (problem := self._open_group()) is not None:
                    return problem
                can_repeat = False
            elif char == ")":
                if not self._open_groups:
                    return f"unmatched ) at {self._at}"
                opened_at = self._open_groups.pop()
                self._add(self._sizes.pop())
                can_repeat = _NOT_QUANTIFIABLE.match(self._pattern, opened_at) is None
                self._at += 1
            elif char == "[":
                if (problem := self._read_class()) is not None:
                    return problem
                self._add(1)
                can_repeat = True
            elif char == "\\":
                if (problem := self._read_escape()) is not None:
                    return problem
                self._add(1)
                can_repeat = True
            elif char == "|":
                self._at += 1
                can_repeat = False
            else:
                self._at += 1
                self._add(1)
                can_repeat = True
        return f"unclosed ( at {self._open_groups[-1]}" if self._open_groups else None

    def _add(self, size: int) -> None:
        self._sizes[-1] += size
        self._last_size = size

    def _count(self, quantifier: re.Match[str]) -> str | None:
        """Repeats what stands before a quantifier with numbers."""
        low, high = quantifier["low"].lstrip("0"), (quantifier["high"] or "").lstrip("0")
        if max(len(low), len(high)) > _MAX_DIGITS:
            return f"a number of more than {_MAX_DIGITS} digits at {self._at}"
        least, most = int(low or 0), int(high or 0)
        if quantifier["high"] and most < least:
            return f"the numbers of {quantifier[0]} are out of order at {self._at}"
        times = max(least, most, 1)
        self._sizes[-1] += self._last_size * (times - 1)
        self._last_size *= times
        if self._sizes[-1] > MAX_WRITTEN_OUT:
            return f"written out, the repetition at {self._at} is over the limit of {MAX_WRITTEN_OUT} characters"
        return None

    def _open_group(self) -> str | None:
        group = _GROUP.match(self._pattern, self._at)
        if group is None or group["bad"] is not None:
            return f"unknown kind of group at {self._at}"
        if group["name"] is not None:
            if group["name"] in self._names:
                return f"two groups are named {shown(group['name'])}"
            self._names.add(group["name"])
        if len(self._open_groups) >= _MAX_GROUP_DEPTH:
            return f"more than {_MAX_GROUP_DEPTH} groups inside one another"
        self._num_captures += _CAPTURING.match(self._pattern, self._at) is not None
        self._open_groups.append(self._at)
        self._sizes.append(0)
        self._at = group.end()
        return None

    def _read_escape(self) -> str | None:
        escape = _ESCAPE.match(self._pattern, self._at)
        if escape is None:
            return f"unknown escape at {self._at}"
        group = escape["group"]
        if group is not None and (len(group) > _MAX_DIGITS or int(group) > self._num_captures):
            return f"no group {clipped(group)} before {self._at}"
        if escape["property"] is not None and not _is_property(escape["property"]):
            return f"unknown property {escape[0]} at {self._at}"
        if (code := _code(escape)) is not None and not _is_character(code):
            return f"{escape[0]} is no character at {self._at}"
        self._at = escape.end()
        return None

    def _read_class(self) -> str | None:
        """Reads `[...]`; a range needs two single characters in order."""
        start = self._at
        self._at += 2 if self._pattern.startswith("[^", start) else 1
        previous: str | None = None  # a single character that may begin a range
        while self._at < len(self._pattern):
            if self._pattern[self._at] == "]" and previous is not None:  # the first ] is a member
                self._at += 1
                return None
            item_at = self._at
            is_range = (
                self._pattern[item_at] == "-"
                and previous is not None
                and self._pattern[item_at + 1 : item_at + 2] not in ("]", "")
                and previous != "range"
                and previous != ""
            )
            if is_range:
                self._at += 1
                first = previous
                second, problem = self._class_item()
                if problem is not None:
                    return problem
                if first is None or first == "set" or second == "set":
                    return f"a range with a set at {item_at}"
                if len(first) == len(second) == 1 and first > second:
                    return f"a range out of order at {item_at}"
                previous = "range"
                continue
            previous, problem = self._class_item()
            if problem is not None:
                return problem
        return f"unclosed [ at {start}"

    def _class_item(self) -> tuple[str, str | None]:
        """Reads one member of a class: its character, or "set" for \\d and the like, or "escape" for other escapes."""
        if self._pattern[self._at] != "\\":
            self._at += 1
            return self._pattern[self._at - 1], None
        if _CLASS_SET.match(self._pattern, self._at) is not None:
            return "set", self._read_escape()
        escape = _ESCAPE.match(self._pattern, self._at)
        if escape is None or escape["group"] is not None or escape[0][1] in "bBAz":
            return "", f"unknown escape at {self._at} in a class"
        problem, code = self._read_escape(), _code(escape)
        if problem is not None or code is not None:
            return "" if code is None or problem is not None else chr(code), problem
        return escape["itself"] or "escape", None


def _code(escape: re.Match[str]) -> int | None:
    """The code point of a hexadecimal escape."""
    digits = escape["braced"] or escape["x"] or escape["u"] or escape["U"]
    return None if digits is None else int(digits, 16)


def _is_character(code: int) -> bool:
    return code <= sys.maxunicode and not 0xD800 <= code <= 0xDFFF


@lru_cache(maxsize=256)
def _is_property(spelling: str) -> bool:
    """Whether Unicode has such a property, as the `regex` library knows them."""
    import regex  # 10 ms that only patterns with a property take

    try:
        regex.compile(f"\\p{{{spelling[1:].strip('{}')}}}")
    except regex.error:
        return False
    return True
