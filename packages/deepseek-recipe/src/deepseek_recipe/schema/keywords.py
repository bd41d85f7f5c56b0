"""The meta-schemas of JSON Schema as tables keyword → rule, one a draft.

A rule looks at the argument of its keyword, fails the check where it is not what the draft wants, and goes on into the
subschemas that it holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urldefrag

from deepseek_recipe.json_text import compact, is_array, is_object
from deepseek_recipe.schema.ecma_regex import check_pattern

if TYPE_CHECKING:
    from deepseek_recipe.schema.check import SchemaCheck

__all__ = ["RULES", "Path"]

Path = tuple["Path", "str | int"] | None
"""A place in a schema: the last step behind the place before."""
Rule = Callable[["SchemaCheck", Any, Path, str], None]

_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_ANCHOR = re.compile(r"[A-Za-z_][-A-Za-z0-9._]*")
_SEGMENT = r"A-Za-z0-9\-._~!$&'()*+,;=:@%"
_URI_REFERENCE = re.compile(  # RFC 3986, section 4.1
    rf"(?:[A-Za-z][A-Za-z0-9+.\-]*:|(?![^/?#]*:))"
    rf"(?://(?:[{_SEGMENT}]*@)?(?:\[[0-9A-Za-z:.]*\]|[{_SEGMENT.replace(':@', '')}]*)(?::[0-9]*)?(?![^/?#])|(?!//))"
    rf"[{_SEGMENT}/]*(?:\?[{_SEGMENT}/?]*)?(?:#[{_SEGMENT}/?]*)?"
)
_MAX_URI_CHARS = 65_536
_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


def _schema(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    check.schema(value, path, base)


def _schema_or_bool(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    if not isinstance(value, bool):
        check.schema(value, path, base)


def _schemas(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    if not is_array(value) or not value:
        check.fail(value, path, "a non-empty array of schemas")
    for index, item in enumerate(value):
        check.schema(item, (path, index), base)


def _schema_or_schemas(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    if is_array(value):
        if not value:
            check.fail(value, path, "a schema or a non-empty array of schemas")
        for index, item in enumerate(value):
            check.schema(item, (path, index), base)
    else:
        check.schema(value, path, base)


def _schema_map(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    if not is_object(value):
        check.fail(value, path, "an object of schemas")
    for name, item in value.items():
        check.schema(item, (path, name), base)


def _pattern_map(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    _schema_map(check, value, path, base)
    for pattern in value:
        _pattern(check, pattern, (path, pattern), base)


def _string_list(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    strings = is_array(value) and all(isinstance(item, str) for item in value)
    if not strings or len(set(value)) != len(value) or (check.draft == 4 and not value):
        check.fail(value, path, "an array of different strings")


def _string_list_map(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    if not is_object(value):
        check.fail(value, path, "an object of arrays of strings")
    for name, item in value.items():
        _string_list(check, item, (path, name), base)


def _dependencies(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    if not is_object(value):
        check.fail(value, path, "an object of schemas or arrays of strings")
    for name, item in value.items():
        rule = _string_list if is_array(item) else _schema
        rule(check, item, (path, name), base)


def _type(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    if isinstance(value, str) and value in _TYPES:
        return
    names = is_array(value) and value and all(isinstance(item, str) and item in _TYPES for item in value)
    if not names or len(set(value)) != len(value):
        check.fail(value, path, f"one of {', '.join(sorted(_TYPES))}, or an array of different ones")


def _string(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    if not isinstance(value, str):
        check.fail(value, path, "a string")


def _boolean(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    if not isinstance(value, bool):
        check.fail(value, path, "true or false")


def _array(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    if not is_array(value):
        check.fail(value, path, "an array")


def _enum(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    _array(check, value, path, base)
    if check.draft != 4:  # the later ones only recommend the rest
        return
    texts: set[str] = set()
    for item in value:
        check.limit.check()
        texts.add(compact(item))
    if not value or len(texts) != len(value):
        check.fail(value, path, "a non-empty array of different values")


def _number(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not is_finite:
        check.fail(value, path, "a number")


def _positive(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    _number(check, value, path, base)
    if not value > 0:
        check.fail(value, path, "a number above 0")


def _count(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, float) and math.isfinite(value) and check.draft != 4:  # draft 4 has no integer 2.0
        is_integer = value.is_integer()
    if not is_integer or value < 0:
        check.fail(value, path, "an integer from 0 up")


def _pattern(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    _string(check, value, path, base)
    check.limit.check()
    problem = check_pattern(value)
    if problem is not None:
        check.fail(value, path, f"a regular expression ({problem})")


def _uri(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    _string(check, value, path, base)
    if len(value) > _MAX_URI_CHARS:
        check.fail(value, path, f"a URI reference of at most {_MAX_URI_CHARS} characters")
    if _URI_REFERENCE.fullmatch(value) is None or _PERCENT.search(value):
        check.fail(value, path, "a URI reference (other characters are written as % and two digits)")


def _reference(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    _uri(check, value, path, base)
    check.refer(value, path, base)


def _anchor(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    if not isinstance(value, str) or not _ANCHOR.fullmatch(value):
        check.fail(value, path, "a name of letters, digits, '-', '.' and '_'")


def _identifier(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    _uri(check, value, path, base)
    if check.draft >= 2019 and urldefrag(str(value)).fragment:
        check.fail(value, path, "a URI without a fragment")


def _vocabulary(check: SchemaCheck, value: Any, path: Path, base: str) -> None:
    if not is_object(value) or not all(isinstance(item, bool) for item in value.values()):
        check.fail(value, path, "an object of booleans")


_SHARED: dict[str, Rule] = {
    **dict.fromkeys(("not",), _schema),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _schemas),
    **dict.fromkeys(("properties", "definitions"), _schema_map),
    **dict.fromkeys(("title", "description", "format"), _string),
    **dict.fromkeys(("maximum", "minimum"), _number),
    **dict.fromkeys(("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"), _count),
    "$ref": _reference,
    "$schema": _string,
    "enum": _enum,
    "multipleOf": _positive,
    "pattern": _pattern,
    "patternProperties": _pattern_map,
    "required": _string_list,
    "type": _type,
    "uniqueItems": _boolean,
    "dependencies": _dependencies,
}
_DRAFT4: dict[str, Rule] = {
    **_SHARED,
    **dict.fromkeys(("additionalItems", "additionalProperties"), _schema_or_bool),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), _boolean),
    "id": _uri,
    "items": _schema_or_schemas,
}
_DRAFT6: dict[str, Rule] = {
    **_SHARED,
    **dict.fromkeys(("additionalItems", "additionalProperties", "contains", "propertyNames"), _schema),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), _number),
    "$id": _identifier,
    "examples": _array,
    "items": _schema_or_schemas,
}
_DRAFT7: dict[str, Rule] = {
    **_DRAFT6,
    **dict.fromkeys(("if", "then", "else"), _schema),
    **dict.fromkeys(("$comment", "contentEncoding", "contentMediaType"), _string),
    **dict.fromkeys(("readOnly", "writeOnly"), _boolean),
}
_DRAFT2019: dict[str, Rule] = {
    **_DRAFT7,
    **dict.fromkeys(("contentSchema", "unevaluatedItems", "unevaluatedProperties"), _schema),
    **dict.fromkeys(("$defs", "dependentSchemas"), _schema_map),
    **dict.fromkeys(("maxContains", "minContains"), _count),
    "$anchor": _anchor,
    "$recursiveAnchor": _boolean,
    "$recursiveRef": _uri,  # it leads to the root whatever it says
    "$vocabulary": _vocabulary,
    "dependentRequired": _string_list_map,
    "deprecated": _boolean,
}
_DRAFT2020: dict[str, Rule] = {
    **_DRAFT2019,
    "$dynamicAnchor": _anchor,
    "$dynamicRef": _reference,
    "$recursiveAnchor": _anchor,  # of the draft before, without a meaning here
    "$recursiveRef": _string,
    "items": _schema,
    "prefixItems": _schemas,
}
del _DRAFT2020["additionalItems"]
RULES = {4: _DRAFT4, 6: _DRAFT6, 7: _DRAFT7, 2019: _DRAFT2019, 2020: _DRAFT2020}
