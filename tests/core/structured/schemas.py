"""300 JSON Schemas: 100 written by hand for every family of keywords, each also inside two other schemas.

A schema here may be hard, but a random walk through it should come to an end: strings and numbers are mostly bounded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

__all__ = ["SCHEMAS"]

Schema = dict[str, Any] | bool


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


_SHORT = {"type": "string", "maxLength": 5}
_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}

_STRINGS: list[Schema] = [
    {"type": "string", "maxLength": 12},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "minLength": 1, "maxLength": 1},
    {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "^[a-z]{2,6}$"},
    {"type": "string", "pattern": "^(\\+\\d{1,3} )?\\d{3}-\\d{4}$"},
    {"type": "string", "pattern": "^[A-Z][a-z]+( [A-Z][a-z]+)?$", "maxLength": 14},
    {"type": "string", "pattern": "[0-9]", "maxLength": 4},
    {"type": "string", "pattern": "^(a+)+$", "maxLength": 10},
    {"type": "string", "pattern": "^(foo|bar|ba[zx]){1,3}$"},
    {"type": "string", "pattern": '^[^\\s"\\\\]{1,5}$'},
    {"type": "string", "pattern": "^[\u00e0-\u00ff\u4e00-\u4e10]{1,4}$"},
    {"type": "string", "pattern": "^\\w{1,4}\\.(txt|md)$"},
    {"type": "string", "pattern": "^\\u0041\\x42\\/$"},
    {"type": "string", "pattern": "^[[a]{,2}b{$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "email", "maxLength": 30},
    {"type": "string", "format": "hostname", "maxLength": 20},
    {"type": "string", "format": "duration"},
]

_NUMBERS: list[Schema] = [
    {"type": "integer", "minimum": 0, "maximum": 150},
    {"type": "integer", "minimum": -20, "maximum": -3},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 12},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "integer", "minimum": 999_999, "maximum": 1_000_001},
    {"type": "integer"},
    {"type": "number"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0.5, "exclusiveMaximum": 2.25},
    {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 3},
    {"type": "number", "minimum": -0.001, "maximum": 0.001},
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 0, "exclusiveMinimum": True,
     "maximum": 4},
]  # fmt: skip

_CONSTANTS: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    {"const": "fixed"},
    {"const": {"a": [1, None, True], "b": {"c": -2.5}}},
    {"const": 0},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, 2.5, -3, "x", None, False, [1, 2], {"k": "v"}]},
    {"enum": ["\u00e9t\u00e9", "\u65e5\u672c", "\U0001f600", "tab\tnew\nline", 'quo"te', "back\\slash", "/"]},
    {"enum": ["a", "ab", "abc", "abcd"]},
    {"type": "string", "enum": ["one", 1, None]},
    {"enum": [f"value number {number}" for number in range(300)]},
]

_ARRAYS: list[Schema] = [
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "array", "items": _DIGIT, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 1},
    {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [_DIGIT, _SHORT], "items": False},
    {"type": "array", "prefixItems": [_DIGIT, {"type": "null"}], "items": {"type": "boolean"}, "minItems": 2,
     "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": _DIGIT, "maxItems": 2}, "maxItems": 3},
    {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 5, "uniqueItems": False},
    {"type": "array", "items": _SHORT, "maxItems": 1, "uniqueItems": True},
    {"type": "array", "items": _object(a=_DIGIT), "maxItems": 2},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [_DIGIT, {"type": "boolean"}],
     "additionalItems": False},
]  # fmt: skip

_OBJECTS: list[Schema] = [
    _object(),
    _object(name=_SHORT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    _object(["b"], a=_DIGIT, b=_DIGIT, c=_DIGIT),
    _object([], a=_DIGIT, b={"type": "null"}),
    _object(outer=_object(inner=_object(deep=_object(deeper={"type": "boolean"})))),
    {"type": "object", "properties": {"k": _DIGIT}, "maxProperties": 1, "required": ["k"]},
    {"type": "object", "additionalProperties": _DIGIT, "maxProperties": 2},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "properties": {"a": _DIGIT, "b": _DIGIT}, "minProperties": 1, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x[0-9]$": _DIGIT}, "additionalProperties": False, "maxProperties": 3},
    {"type": "object", "patternProperties": {"^s_": _SHORT, "^n_": _DIGIT}, "additionalProperties": False,
     "maxProperties": 2},
    {"type": "object", "properties": {"a": _DIGIT}, "required": ["a"],
     "additionalProperties": {"type": "null"}, "maxProperties": 3},
    {"type": "object", "properties": {"no": False, "yes": _DIGIT}, "required": ["yes"], "maxProperties": 1},
    _object(**{"\u00e9 \"q\"\n\\ /~": _DIGIT, "\u65e5\u672c": {"type": "boolean"}, "": {"type": "null"}}),
    {"type": "object", "required": ["z"], "properties": {"y": _DIGIT, "z": True}, "additionalProperties": False},
    {"title": "T", "description": "D", "type": "object", "properties": {"a": _DIGIT | {"default": 3, "examples": [1]}},
     "required": ["a"], "additionalProperties": False, "$comment": "c", "x-internal": 1, "deprecated": True},
    _object(**{f"field_{number}": {"type": "boolean"} for number in range(30)}),
]  # fmt: skip

_COMPOSED: list[Schema] = [
    {"anyOf": [_DIGIT, {"type": "boolean"}, _SHORT]},
    {"anyOf": [_object(kind={"const": "a"}, x=_DIGIT), _object(kind={"const": "b"}, y=_SHORT)]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}, {"type": "null"}]},
    {"oneOf": [_object(t={"const": 1}), _object(t={"const": 2}, u={"type": "null"})]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"allOf": [{"type": "object", "properties": {"a": _DIGIT}, "required": ["a"]},
               {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"], "maxProperties": 2}]},
    {"allOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "z$"}, {"maxLength": 6}]},
    {"type": ["string", "null", "integer"], "maxLength": 3, "minimum": 5, "maximum": 9},
    {"anyOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"allOf": [{"enum": [3, 4]}]}]},
    {"minimum": 3, "type": "number", "anyOf": [{"maximum": 4}, {"const": 100}]},
]  # fmt: skip

_REFERENCES: list[Schema] = [
    {"$defs": {"d": _DIGIT}, "$ref": "#/$defs/d"},
    {"$defs": {"d": _DIGIT}, "$ref": "#/$defs/d", "maximum": 4},
    {"definitions": {"a/b~c \u00e9%": {"type": "boolean"}}, "$ref": "#/definitions/a~1b~0c%20%C3%A9%25"},
    {"$defs": {"d": {"$anchor": "digit", **_DIGIT}}, "type": "array", "items": {"$ref": "#digit"}, "maxItems": 3},
    {"$id": "https://example.com/root.json", "$defs": {"d": {"$id": "part.json", **_DIGIT}},
     "anyOf": [{"$ref": "part.json"}, {"$ref": "https://example.com/root.json#/$defs/d"}]},
    _object(a=_DIGIT, b={"$ref": "#/properties/a"}, c={"$ref": "#/properties/b"}),
    {"$ref": "#/$defs/node", "$defs": {"node": _object(["v"], v=_DIGIT, next={"$ref": "#/$defs/node"})}},
    {"$ref": "#/$defs/tree", "$defs": {"tree": _object(
        ["v"], v=_DIGIT, kids={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2})}},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]},
    {"$ref": "#/$defs/even", "$defs": {
        "even": {"anyOf": [{"type": "null"}, _object(o={"$ref": "#/$defs/odd"})]},
        "odd": _object(e={"$ref": "#/$defs/even"})}},
    _object(a={"$ref": "#/$defs/x"}, b={"$ref": "#/$defs/x"}) | {"$defs": {"x": {"enum": [1, 2]}}},
]  # fmt: skip

_OPEN: list[Schema] = [True, {}, {"type": "object"}, {"type": "array", "maxItems": 2}]

_ALL: list[Schema] = [
    *_STRINGS, *_NUMBERS, *_CONSTANTS, *_ARRAYS, *_OBJECTS, *_COMPOSED, *_REFERENCES, *_OPEN,
]  # fmt: skip


def _has_address(schema: Schema) -> bool:
    """Whether it refers to its own root, so that it can't stand inside another schema as it is."""
    return isinstance(schema, dict) and any(word in str(schema) for word in ("'$ref'", "'$id'", "'$schema'"))


_WRAPPERS: list[Callable[[Schema], Schema]] = [
    lambda schema: _object(id=_DIGIT, value=schema),
    lambda schema: {"type": "array", "items": schema, "minItems": 1, "maxItems": 2},
    lambda schema: {"anyOf": [schema, {"const": "none"}]},
    lambda schema: _object([], maybe=schema, flag={"type": "boolean"}),
    lambda schema: {"type": "array", "prefixItems": [_DIGIT, schema], "items": False, "minItems": 2},
    lambda schema: {"$defs": {"part": schema}, **_object(first={"$ref": "#/$defs/part"}, last={"type": "null"})},
    lambda schema: {"type": "object", "patternProperties": {"^k[0-9]$": schema}, "additionalProperties": False,
                    "maxProperties": 2},
    lambda schema: _object(a=_object(b={"type": "array", "items": schema, "maxItems": 2})),
]  # fmt: skip


def _wrapped() -> list[Schema]:
    rng = random.Random(4)
    inner = [schema for schema in _ALL if not _has_address(schema)]
    once = [wrap(inner[index % len(inner)]) for index, wrap in enumerate(_WRAPPERS * 13)]
    twice = [rng.choice(_WRAPPERS[:5])(rng.choice(_WRAPPERS[:5])(rng.choice(inner))) for _ in range(120)]
    return once + twice


SCHEMAS: list[Schema] = list({json.dumps(schema): schema for schema in [*_ALL, *_wrapped()]}.values())[:300]
