"""`convert`: what a user asks for, as one grammar in llguidance's own form, with a list of what it enforces.

    json, json_object ─► check_schema ─► {"json_schema": ...}
    regex             ─► portable_regex ─► one terminal
    grammar           ─► GBNF or Lark ─► llguidance's Lark dialect
    choice            ─► one terminal of alternatives

Pure functions; nothing here imports llguidance. They run in the child process, under its deadline.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.forcing import NO_FORCING, Fixed, fixed_of
from deepinfer_core.structured.gbnf import parse_gbnf
from deepinfer_core.structured.json_schema import check_schema
from deepinfer_core.structured.lark import is_lark, lark_dialect
from deepinfer_core.structured.lexemes import rules_to_lark
from deepinfer_core.structured.limits import MAX_ENUM_VALUES
from deepinfer_core.structured.regex import portable_regex

__all__ = ["Form", "GrammarSource", "GrammarText", "convert", "grammar_text"]

type Form = Literal["json", "json_object", "regex", "grammar", "choice"]


@dataclass(frozen=True, slots=True)
class GrammarText:
    """What the user wrote, without trigger and end: all that a compiled grammar depends on."""

    form: Form
    text: str  # JSON for json and choice


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A converted grammar.

    enforced: keywords or kinds. ignored: keys of a schema that JSON Schema doesn't know, and formats of numbers.
    trial: the same grammar with its long fixed texts followed, to be tried out first (forcing.py).
    """

    text: str
    enforced: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    trial: str | None = None


def grammar_text(structured: StructuredOutput) -> GrammarText:
    """The part of a request that is compiled."""
    if structured.json is not None:
        return GrammarText("json", cast("str", structured.json))
    if structured.regex is not None:
        return GrammarText("regex", structured.regex)
    if structured.grammar is not None:
        return GrammarText("grammar", structured.grammar)
    if structured.choice is not None:
        return GrammarText("choice", json.dumps(list(structured.choice), ensure_ascii=False))
    return GrammarText("json_object", "")


def convert(given: GrammarText) -> GrammarSource:
    """The grammar as llguidance reads it. Raises GrammarError with the reason and the place."""
    match given.form:
        case "json":
            return _from_schema(given.text)
        case "json_object":
            return _from_schema('{"type":"object"}')
        case "regex":
            pattern = portable_regex(given.text, "structured.regex")
            return _source(f"start: /{_slashes_escaped(pattern.text)}/", fixed_of(pattern.num_fixed), ("regex",))
        case "choice":
            return _from_choice(json.loads(given.text))
        case "grammar":
            if is_lark(given.text):
                return _source(*lark_dialect(given.text), ("Lark",))
            text, num_fixed = rules_to_lark(parse_gbnf(given.text))
            return _source(text, fixed_of(num_fixed), ("GBNF",))


def _from_schema(text: str) -> GrammarSource:
    schema = check_schema(text)
    compiled = schema.compiled()
    enforced, ignored = tuple(sorted(schema.enforced)), tuple(sorted(schema.ignored))
    if schema.fixed is not Fixed.SHORT:  # only Lark can say so
        return _source("start: %json " + json.dumps(compiled, ensure_ascii=False), schema.fixed, enforced, ignored)
    return GrammarSource(json.dumps({"grammars": [{"json_schema": compiled}]}, ensure_ascii=False), enforced, ignored)


def _from_choice(choices: Sequence[str]) -> GrammarSource:
    if len(choices) > MAX_ENUM_VALUES:
        raise GrammarError(f"structured.choice has {len(choices)} strings; at most {MAX_ENUM_VALUES} are allowed")
    alternatives = "|".join(_regex_literal(choice) for choice in choices)
    return _source(f"start: /{alternatives}/", fixed_of(max(map(len, choices))), ("choice",))


def _regex_literal(text: str) -> str:
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):X}}}" for char in text)


def _slashes_escaped(pattern: str) -> str:
    """`pattern` for use between slashes: newlines and slashes are written as escapes."""
    out: list[str] = []
    escaped = False
    for char in pattern:
        if escaped:
            out.append({"\n": "n", "\r": "r"}.get(char, char))
        else:
            out.append({"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(char, char))
        escaped = char == "\\" and not escaped
    return "".join(out)


def _source(text: str, fixed: Fixed, enforced: tuple[str, ...], ignored: tuple[str, ...] = ()) -> GrammarSource:
    """From Lark."""
    if fixed is Fixed.SHORT:
        return GrammarSource(_lark(text), enforced, ignored)
    return GrammarSource(
        _lark(text + NO_FORCING), enforced, ignored, trial=_lark(text) if fixed is Fixed.LONG else None
    )


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]}, ensure_ascii=False)
