"""What becomes of each keyword: enforced, without effect, or refused with its name and place."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.errors import GrammarError
from deepinfer_core.structured import GrammarCompiler, check_text
from deepinfer_core.structured.keywords import ANNOTATIONS, ENFORCED, REFUSED


def _accepts(compiler: GrammarCompiler, schema: Any, text: str) -> bool:
    return check_text(StructuredOutput(json=schema), text, compiler=compiler).accepted


_DEMANDING: dict[str, Any] = {
    "not": {"type": "string"},
    "if": {"type": "string"},
    "contains": {"type": "null"},
    "uniqueItems": True,
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "dependencies": {"a": ["b"]},
    "propertyNames": {"maxLength": 2},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "$dynamicRef": "#node",
    "$recursiveRef": "#",
    "divisibleBy": 2,
    "disallow": "string",
    "extends": {"type": "string"},
}


@pytest.mark.bad_input
@pytest.mark.parametrize("keyword", _DEMANDING)
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name_and_place(
    keyword: str, byte_grammars: GrammarCompiler
) -> None:
    inner = {keyword: _DEMANDING[keyword]} | ({"then": {"minLength": 1}} if keyword == "if" else {})
    schema = {"type": "object", "properties": {"p": {"anyOf": [{"type": "null"}, inner]}}}
    with pytest.raises(GrammarError, match=re.escape(f"'{keyword}' at #/properties/p/anyOf/1")):
        byte_grammars.compile(StructuredOutput(json=schema))


@pytest.mark.bad_input
def test_a_keyword_behind_a_reference_is_refused_too(byte_grammars: GrammarCompiler) -> None:
    schema = {"$ref": "#/components/x", "components": {"x": {"not": {"type": "null"}}}}
    with pytest.raises(GrammarError, match="'not' at #/components/x"):
        byte_grammars.compile(StructuredOutput(json=schema))


@pytest.mark.parametrize(
    "neutral",
    [
        {"uniqueItems": False},
        {"uniqueItems": True, "maxItems": 1},
        {"not": False},
        {"if": {"type": "string"}},
        {"then": {"type": "null"}},
        {"if": {"type": "string"}, "then": True, "else": {}},
        {"minContains": 2},
        {"unevaluatedProperties": True},
        {"propertyNames": {}},
        {"dependentRequired": {}},
    ],
)
def test_a_keyword_that_demands_nothing_is_left_out(neutral: dict[str, Any], byte_grammars: GrammarCompiler) -> None:
    assert _accepts(byte_grammars, {"type": "array", "items": {"const": 1}} | neutral, "[1]")


def test_every_keyword_has_one_fate() -> None:
    assert not ENFORCED & REFUSED
    assert not ANNOTATIONS & (ENFORCED | REFUSED)


def test_annotations_are_ignored_and_unknown_words_are_reported(byte_grammars: GrammarCompiler) -> None:
    schema = {"type": "integer", "title": "t", "minLenght": 3, "x-note": 1}
    verdict = check_text(StructuredOutput(json=schema), "7", compiler=byte_grammars)
    assert verdict.accepted
    assert verdict.enforced == ("type",)
    assert verdict.ignored == ("minLenght", "x-note")


@pytest.mark.bad_input
def test_a_schema_cannot_switch_the_checks_off(byte_grammars: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="'contains'"):
        byte_grammars.compile(
            StructuredOutput(json={"x-guidance": {"lenient": True}, "type": "array", "contains": {"type": "null"}})
        )
    schema = {"x-guidance": {"whitespace_flexible": True, "coerce_one_of": True}, "type": "object"}
    assert not _accepts(byte_grammars, schema, '{ "a": 1}')


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (False, "no value satisfies"),
        ({"type": "text"}, "Invalid type"),
        ({"type": 5}, "type 5"),
        ({"properties": []}, "#/properties"),
        ({"items": 3}, "#/items"),
        ({"anyOf": {}}, "#/anyOf"),
        ({"anyOf": []}, "anyOf is empty"),
        ({"minItems": -1}, "#/minItems"),
        ({"minLength": 1.5}, "#/minLength"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength (5)"),
        ({"type": "integer", "minimum": 1.2, "maximum": 1.7}, "contains no integer"),
        (
            {"type": "string", "format": "fancy"},
            "format 'fancy' at #, which cannot be enforced for strings; known are base64, ",
        ),
        ({"type": "string", "format": "int64"}, "format 'int64' at #"),
        ({"type": ["null", "string"], "format": 7}, "format 7 at #"),
        ({"type": "string", "format": "unknown"}, "format 'unknown' at #"),
        ({"type": "integer", "multipleOf": -3}, "-3 at #/multipleOf"),
        ({"type": "number", "multipleOf": 0}, "0 at #/multipleOf"),
        ({"type": "string", "pattern": "(?=a)"}, "look-ahead"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "branches of oneOf may overlap; make them exclusive"),
        ({"patternProperties": {"^a": True, "b$": False}, "type": "object"}, "not disjoint"),
        ({"type": "object", "minProperties": 2}, "come twice"),
        ({"const": 2**60}, "2**53"),
        ({"enum": [1e300]}, "2**53"),
        ({"enum": ["bell \x07"]}, "control character"),
        ({"type": "string", "pattern": "a\\x01"}, "control character"),
        ({"type": "object", "required": ["x"], "additionalProperties": False}, "what it requires is forbidden"),
        ({"$ref": "#/$defs/none"}, "'#/$defs/none' at #"),
        ({"$ref": "other.json"}, "nothing is fetched"),
        ({"$ref": 5}, "at #"),
        ({"minimum": "3"}, "'3' at #/minimum; it must be a number"),
        ({"items": {"exclusiveMaximum": None}}, "None at #/items/exclusiveMaximum"),
        ({"type": "integer", "minimum": 2**63}, "bound at #/minimum beyond 64 bits"),
        ({"type": "number", "exclusiveMaximum": -1e30}, "bound at #/exclusiveMaximum beyond 64 bits"),
    ],
)
def test_a_schema_that_makes_no_sense_is_refused_with_the_reason(
    schema: Any, reason: str, byte_grammars: GrammarCompiler
) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)):
        byte_grammars.compile(StructuredOutput(json=schema))


@pytest.mark.parametrize(
    ("endless", "text"),
    [
        ({"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]}, '{"a":{"x":'),
        ({"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1}, '{"a":[['),
        ({"type": "array", "prefixItems": [{"$ref": "#/$defs/x"}], "minItems": 1}, '{"a":[['),
        # Nor one that asks for a property that no pattern allows, or that its pattern makes endless.
        (
            {"type": "object", "required": ["b"], "patternProperties": {"^c": {}}, "additionalProperties": False},
            '{"a":{"',
        ),
        ({"type": "object", "required": ["b"], "patternProperties": {"^b": {"$ref": "#/$defs/x"}}}, '{"a":{"b":{"'),
    ],
)
def test_an_endless_part_that_need_not_be_written_cannot_be_begun(
    endless: Any, text: str, byte_grammars: GrammarCompiler
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"type": "null"}},
        "$defs": {"x": endless},
    }
    assert _accepts(byte_grammars, schema, '{"b":null}')
    assert check_text(StructuredOutput(json=schema), text, compiler=byte_grammars).position in range(2, 6)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "items": [{"const": 1}, {"$ref": "#/items/0"}], "additionalItems": False}, "[1,1]", "[1,2]"),
        ({"type": "integer", "maximum": 5, "exclusiveMaximum": True}, "4", "5"),
        ({"$ref": "#x", "definitions": {"x": {"$id": "#x", "type": "null"}}}, "null", "1"),
        ({"type": "array", "additionalItems": {"type": "null"}}, "[1]", "{}"),
    ],
)
def test_older_drafts_mean_what_they_meant(schema: Any, good: str, bad: str, byte_grammars: GrammarCompiler) -> None:
    assert _accepts(byte_grammars, schema, good)
    assert not _accepts(byte_grammars, schema, bad)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # "if" demands nothing here and is left out, but what it holds is referred to.
        ({"$ref": "#/if", "if": {"items": {"$ref": "#/if/$defs/q"}, "$defs": {"q": {"const": 1}}}}, "[1]", "[2]"),
        ({"$ref": "x:y", "then": {"$id": "x:y", "type": "integer"}}, "5", '"a"'),
        # An identifier among values is a value.
        ({"$ref": "#a", "$defs": {"e": {"enum": [{"$anchor": "a", "type": "null"}]},
                                  "s": {"$anchor": "a", "const": 1}}}, "1", "null"),
        ({"properties": {"enum": {"$anchor": "a", "const": 1}}, "$ref": "#/$defs/x", "$defs": {"x": {
            "type": "object", "additionalProperties": {"$ref": "#a"}}}}, '{"enum":1}', '{"enum":2}'),
        # A base that urljoin does not know.
        ({"$ref": "urn:x", "$defs": {"a": {"$id": "urn:x", "$ref": "#/$defs/b", "$defs": {"b": {"const": 1}}},
                                     "b": {"const": 2}}}, "1", "2"),
    ],
)  # fmt: skip
def test_references_lead_where_the_specification_says(
    schema: Any, good: str, bad: str, byte_grammars: GrammarCompiler
) -> None:
    assert _accepts(byte_grammars, schema, good)
    assert not _accepts(byte_grammars, schema, bad)


def test_a_key_cannot_be_spelled_in_a_second_way_to_escape_its_schema(byte_grammars: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert _accepts(byte_grammars, schema, '{"a":1,"b":"x"}')
    assert not _accepts(byte_grammars, schema, '{"\\u0061":"x"}')


def test_json_is_compact(byte_grammars: GrammarCompiler) -> None:
    structured = StructuredOutput(json_object=True)
    assert check_text(structured, '{"a":[1,{"b":"x y"}]}', compiler=byte_grammars).accepted
    assert check_text(structured, '{"a": 1}', compiler=byte_grammars).position == 5
    assert check_text(structured, "[]", compiler=byte_grammars).position == 0


_PATTERNS = [
    '^[^"\\\\]*$', '^[^"]*$', r"^[^\\]*$", r"^[^x\\]$", '^[^\\s"]*$', r"^[^a-z]+$", '^[^"\\n]*$', r"^[\x00-!]*$",
    r"^[\S]*$", '^(?:[^"\\\\]|\\\\.)*$', r"^[^\W]*$", r"^\D*$", r"^.*$", r"^[\s\S]*$", r"^(a|\\)*$",
    r"^[ -!#-\[\]-~]*$", r"\\", '"', r"^[^\n]*$", r"^[\b\f]*$", r"^[^\b\f\\]*$", '^[^:*?"<>|]+$', r"^[\t-\r]*$",
    r"^[^\u0041\x22]*$",
]  # fmt: skip
_STRINGS = [
    "",
    "a",
    "n",
    "\\",
    '"',
    "a\\",
    "\\\\",
    'a"b',
    "\n",
    "\t",
    "\b",
    "\f",
    "a\nb",
    "x",
    "\\n",
    "[",
    "~",
    '\\"',
    "n\\",
    "A",
]


@pytest.mark.parametrize("pattern", _PATTERNS)
def test_a_pattern_is_about_the_string_and_not_about_how_it_is_written(
    pattern: str, byte_grammars: GrammarCompiler
) -> None:
    schema = {"type": "string", "pattern": pattern}
    for text in _STRINGS:
        expected = re.search(pattern.replace("$", r"\Z"), text) is not None
        assert _accepts(byte_grammars, schema, json.dumps(text)) == expected, text


def test_properties_of_characters_are_about_the_string_too(byte_grammars: GrammarCompiler) -> None:
    for pattern in (r"^\p{C}$", r"^[\p{C}]$", r"^[^\p{P}\p{S}]$", r"^\PP$", r"^[[:cntrl:]]$"):
        assert _accepts(byte_grammars, {"type": "string", "pattern": pattern}, r'"\n"')
        assert not _accepts(byte_grammars, {"type": "string", "pattern": pattern}, r'"\""')
        assert not _accepts(byte_grammars, {"type": "string", "pattern": pattern}, r'"\\"')


def test_a_pattern_of_names_is_about_the_name(byte_grammars: GrammarCompiler) -> None:
    schema = {"type": "object", "patternProperties": {'^[^"]*$': {"type": "null"}}, "additionalProperties": False}
    assert _accepts(byte_grammars, schema, r'{"a\nb":null}')
    assert not _accepts(byte_grammars, schema, r'{"a\"b":null}')


def test_a_required_property_may_be_one_that_a_pattern_allows(byte_grammars: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "required": ["b1"],
        "patternProperties": {"^b[\\d-z]$": {"const": 1}},
        "additionalProperties": False,
    }
    assert _accepts(byte_grammars, schema, '{"b1":1}')
    assert not _accepts(byte_grammars, schema, '{"b2":1}')


@pytest.mark.parametrize("form", ["date", "date-time"])
def test_dates_are_those_of_the_calendar(form: str, byte_grammars: GrammarCompiler) -> None:
    schema = {"format": form}
    tail = "T12:00:00Z" if form == "date-time" else ""
    days = [f"{year}-02-{day}" for year in range(1890, 2012) for day in (28, 29, 30)] + ["2023-04-30", "2023-04-31"]
    for day in days:
        try:
            exists = bool(datetime.date.fromisoformat(day))
        except ValueError:
            exists = False
        assert _accepts(byte_grammars, schema, f'"{day}{tail}"') == exists, day
    verdict = check_text(StructuredOutput(json=schema), "7", compiler=byte_grammars)
    assert verdict.accepted  # a format says nothing about numbers
    assert verdict.enforced == ("format",)
