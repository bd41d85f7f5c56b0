r"""`parse_gbnf`: GBNF, the EBNF of llama.cpp and XGrammar, into rules over characters.

    root   ::= object                        # a comment
    object ::= "{" pair ("," pair)* "}"
    pair   ::= "\"" [^"\\\x00-\x1F]{1,20} "\"" ":" [0-9]+ .?

`|` binds weakest, then sequence, then `* + ? {n} {n,} {n,m}`. A rule ends where the next `name ::=` begins.
"""

from __future__ import annotations

import re
from typing import Final

from deepinfer_core.config.checks import shown
from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.limits import MAX_NESTING, MAX_REPETITIONS, MAX_RULES
from deepinfer_core.structured.rules import (
    MAX_CODE_POINT,
    Chars,
    Choice,
    Expression,
    Reference,
    Repeat,
    Rules,
    Sequence,
    references_in,
)

__all__ = ["parse_gbnf"]

_TOKEN: Final = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
      | (?P<rule>[\w-]+)(?=\s*::=)
      | (?P<name>[\w-]+)
      | (?P<defines>::=)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<class>\[(?:[^\]\\]|\\.)*\])
      | (?P<counted>\{\s*\d*\s*,?\s*\d*\s*\})
      | (?P<sign>[|()*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_ANY: Final = Chars(((0, 0xD7FF), (0xE000, MAX_CODE_POINT)))


def parse_gbnf(text: str) -> Rules:
    """Rules by name, with a rule "root". Raises GrammarError that names the line."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GrammarError(f"structured.grammar has the rules {shown(sorted(rules))} but none named root to start from")
    for name, expression in rules.items():
        for used in references_in(expression):
            if used not in rules:
                raise GrammarError(f"structured.grammar uses {used!r} in the rule {name!r} and does not define it")
    return rules


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [*self._tokenize(), ("end", "", len(text))]
        self._next = 0
        self._depth = 0

    def rules(self) -> Rules:
        rules: Rules = {}
        while self._kind() != "end":
            name = self._take("rule", "a rule, name ::= ...")
            self._take("defines", "::=")
            if name in rules:
                raise self._refused(f"defines {name!r} twice")
            if len(rules) == MAX_RULES:
                raise self._refused(f"has more than {MAX_RULES} rules")
            rules[name] = self._choice()
        return rules

    def _tokenize(self) -> list[tuple[str, str, int]]:
        tokens: list[tuple[str, str, int]] = []
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None or match.lastgroup is None:
                raise GrammarError(f"structured.grammar has {shown(self._text[at : at + 20])} {_place(self._text, at)}")
            if match.lastgroup != "space":
                tokens.append((match.lastgroup, match[0], at))
            at = match.end()
        return tokens

    def _kind(self) -> str:
        return self._tokens[self._next][0]

    def _sign(self, sign: str) -> bool:
        """Take the sign if it comes next."""
        found = self._tokens[self._next][:2] == ("sign", sign)
        self._next += found
        return found

    def _take(self, kind: str, wanted: str) -> str:
        found, text, _ = self._tokens[self._next]
        if found != kind:
            raise self._refused(f"has {shown(text) if text else 'its end'} where {wanted} belongs")
        self._next += 1
        return text

    def _refused(self, what: str) -> GrammarError:
        return GrammarError(f"structured.grammar {what} {_place(self._text, self._tokens[self._next][2])}")

    def _choice(self) -> Expression:
        options = [self._sequence()]
        while self._sign("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while (item := self._repeated()) is not None:
            items.append(item)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _repeated(self) -> Expression | None:
        item = self._item()
        while item is not None:
            if self._sign("*"):
                item = Repeat(item, 0, None)
            elif self._sign("+"):
                item = Repeat(item, 1, None)
            elif self._sign("?"):
                item = Repeat(item, 0, 1)
            elif self._kind() == "counted":
                item = self._counted(item)
            else:
                break
        return item

    def _counted(self, item: Expression) -> Repeat:
        low, comma, high = re.sub(r"[{}\s]", "", self._tokens[self._next][1]).partition(",")
        first = int(low[:9] or "0")
        last = (int(high[:9]) if high else None) if comma else first
        if not low + high or max(first, last or 0) > MAX_REPETITIONS or (last is not None and last < first):
            raise self._refused(f"repeats {self._tokens[self._next][1]}; counts go up to {MAX_REPETITIONS}")
        self._next += 1
        return Repeat(item, first, last)

    def _item(self) -> Expression | None:
        kind, text, _ = self._tokens[self._next]
        if kind == "sign" and text == "(":
            return self._group()
        if kind == "sign" and text == ".":
            self._next += 1
            return _ANY
        if kind == "name":
            self._next += 1
            return Reference(text)
        if kind == "string":
            self._next += 1
            chars = tuple(Chars(((code, code),)) for code, _ in _characters(text[1:-1]))
            return chars[0] if len(chars) == 1 else Sequence(chars)
        if kind == "class":
            found = _class(text[1:-1])
            if not found.ranges:
                raise self._refused(f"has the class {text}, which no character is in,")
            self._next += 1
            return found
        return None

    def _group(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._refused(f"nests groups deeper than {MAX_NESTING}")
        self._next += 1
        inner = self._choice()
        if not self._sign(")"):
            raise self._refused("has a group that is not closed")
        self._depth -= 1
        return inner


def _place(text: str, at: int) -> str:
    return f"in line {text.count(chr(10), 0, at) + 1}"


def _characters(text: str) -> list[tuple[int, bool]]:
    """(code point, whether it was escaped) of each character."""
    found: list[tuple[int, bool]] = []
    for match in _ESCAPED.finditer(text):
        if match[4] and match[4].isalnum() and match[4] not in _CONTROLS:
            raise GrammarError(
                f"structured.grammar has the escape {match[0]}, which GBNF does not know; write classes out, [0-9]"
            )
        number = match[1] or match[2] or match[3]
        code = int(number, 16) if number else ord(_CONTROLS.get(match[4], match[4]) if match[4] else match[5])
        if code > MAX_CODE_POINT or 0xD800 <= code <= 0xDFFF:
            raise GrammarError(f"structured.grammar has the character {match[0]}, which is not in Unicode")
        found.append((code, match[5] is None))
    return found


def _class(text: str) -> Chars:
    negated = text.startswith("^")
    characters = _characters(text[negated:])
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(characters):
        low = high = characters[at][0]
        if at + 2 < len(characters) and characters[at + 1] == (ord("-"), False):
            high = characters[at + 2][0]
            at += 2
        if high < low:
            raise GrammarError(f"structured.grammar has the range {chr(low)}-{chr(high)}, which is empty")
        ranges.append((low, high))
        at += 1
    return Chars(_complement(_merged(ranges)) if negated else _merged(ranges))


def _merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    rest: list[tuple[int, int]] = []
    start = 0
    for low, high in _merged([*ranges, (0xD800, 0xDFFF)]):
        if low > start:
            rest.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE_POINT:
        rest.append((start, MAX_CODE_POINT))
    return tuple(rest)
