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
from typing import Any, Literal, cast

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.errors import GrammarError
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
    """A converted grammar. enforced: keywords or kinds; ignored: keys of a schema that JSON Schema doesn't know."""

    text: str
    enforced: tuple[str, ...]
    ignored: tuple[str, ...] = ()


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
            return GrammarSource(_lark("start: /" + _slashes_escaped(pattern) + "/"), ("regex",))
        case "choice":
            return _from_choice(json.loads(given.text))
        case "grammar":
            if is_lark(given.text):
                return GrammarSource(_lark(lark_dialect(given.text)), ("Lark",))
            return GrammarSource(_lark(rules_to_lark(parse_gbnf(given.text))), ("GBNF",))


def _from_schema(text: str) -> GrammarSource:
    schema = check_schema(text)
    return GrammarSource(
        json.dumps({"grammars": [{"json_schema": schema.compiled()}]}, ensure_ascii=False),
        tuple(sorted(schema.enforced)),
        tuple(sorted(schema.ignored)),
    )


def _from_choice(choices: Sequence[str]) -> GrammarSource:
    if len(choices) > MAX_ENUM_VALUES:
        raise GrammarError(f"structured.choice has {len(choices)} strings; at most {MAX_ENUM_VALUES} are allowed")
    alternatives = "|".join(_regex_literal(choice) for choice in choices)
    return GrammarSource(_lark(f"start: /{alternatives}/"), ("choice",))


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


def _lark(text: str) -> str:
    grammar: dict[str, Any] = {"grammars": [{"lark_grammar": text}]}
    return json.dumps(grammar, ensure_ascii=False)
