"""Is a JSON value a JSON Schema that this side can stand behind?

The rules are those of the meta-schemas of drafts 4, 6, 7, 2019-09 and 2020-12 (the default), as one table keyword →
rule, so that checking a tool costs microseconds. Beyond them: patterns must be valid, every `$ref` must resolve inside
the schema or to a meta-schema, nothing is fetched, and size is bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import msgspec

from deepseek_recipe.checks import clipped, shown
from deepseek_recipe.json_text import compact, is_array, is_object
from deepseek_recipe.schema.ecma_regex import check_pattern
from deepseek_recipe.schema.limits import MAX_NODES, SchemaError, TimeLimit

__all__ = ["check_schema", "draft_of"]

_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_DRAFTS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
_ANCHOR = re.compile(r"[A-Za-z_][-A-Za-z0-9._]*")
_SEGMENT = r"A-Za-z0-9\-._~!$&'()*+,;=:@%"
_URI_REFERENCE = re.compile(  # RFC 3986, section 4.1
    rf"(?:[A-Za-z][A-Za-z0-9+.\-]*:|(?![^/?#]*:))"
    rf"(?://(?:[{_SEGMENT}]*@)?(?:\[[0-9A-Za-z:.]*\]|[{_SEGMENT.replace(':@', '')}]*)(?::[0-9]*)?(?![^/?#])|(?!//))"
    rf"[{_SEGMENT}/]*(?:\?[{_SEGMENT}/?]*)?(?:#[{_SEGMENT}/?]*)?"
)
_INDEX = re.compile("[0-9]{1,9}")
_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_MAX_REMEMBERED = 1024
_MAX_REMEMBERED_BYTES = 16_384

_Path = tuple["_Path", "str | int"] | None


_valid_texts: dict[bytes, None] = {}  # texts of valid schemas, the latest last: tools come again and again


def check_schema(schema: Any, limit: TimeLimit | None = None) -> None:
    """Raises `SchemaError` unless `schema` is a valid, self-contained JSON Schema, and when the time is over."""
    text = msgspec.json.encode(schema)
    if text in _valid_texts:
        return
    _Check(schema, limit or TimeLimit()).run()
    if len(text) <= _MAX_REMEMBERED_BYTES:
        if len(_valid_texts) >= _MAX_REMEMBERED:
            _valid_texts.pop(next(iter(_valid_texts)), None)
        _valid_texts[text] = None


class _Check:
    """One pass over a schema: rules of keywords, then references."""

    def __init__(self, schema: Any, limit: TimeLimit) -> None:
        self._root = schema
        self.limit = limit
        self.draft = draft_of(schema)
        self._rules = _RULES[self.draft]
        self._num_nodes = 0
        self._seen: set[int] = set()
        self._references: list[tuple[str, str, _Path]] = []  # (reference, base URI, place)
        self._resources: dict[str, Any] = {}  # absolute URI without fragment -> subschema
        self._anchors: set[str] = set()

    def run(self) -> None:
        self._resources[""] = self._root
        self.schema(self._root, None, "")
        for reference, base, path in self._references:
            self._resolve(reference, base, path)

    def schema(self, value: Any, path: _Path, base: str) -> None:
        """Checks `value` as a schema."""
        self.limit.check()
        if is_object(value):
            self._num_nodes += 1
            self._seen.add(id(value))
            if self._num_nodes > MAX_NODES:
                raise SchemaError(f"more than {MAX_NODES} subschemas")
            if "$id" in value or "$anchor" in value or "id" in value or "$dynamicAnchor" in value:
                base = self._identify(value, path, base)
            rules = self._rules
            for keyword, argument in value.items():
                rule = rules.get(keyword)
                if rule is not None:
                    rule(self, argument, (path, keyword), base)
            if self.draft == 4:
                self._check_draft4_bounds(value, path)
        elif not isinstance(value, bool) or self.draft == 4:
            self.fail(value, path, "an object" if self.draft == 4 else "an object or a boolean")

    def fail(self, value: Any, path: _Path, wanted: str) -> None:
        """Raises the error for a value that is not what its keyword wants."""
        raise SchemaError(f"{_pointer(path)} must be {wanted}, not {clipped(compact(value))}")

    def refer(self, reference: str, path: _Path, base: str) -> None:
        """Notes a reference, to be resolved when every identifier is known."""
        self._references.append((reference, base, path))

    def _identify(self, value: dict[str, Any], path: _Path, base: str) -> str:
        identifier = value.get("id" if self.draft == 4 else "$id")
        if isinstance(identifier, str) and not identifier.startswith("#"):
            base = urldefrag(urljoin(base, identifier)).url
            self._resources[base] = value
        elif isinstance(identifier, str):
            self._anchors.add(f"{base}{identifier}")
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(value.get(keyword), str):
                self._anchors.add(f"{base}#{value[keyword]}")
        return base

    def _resolve(self, reference: str, base: str, path: _Path) -> None:
        self.limit.check()
        target, fragment = urldefrag(urljoin(base, reference)) if base else urldefrag(reference)
        if target in _DRAFTS:
            return
        if target not in self._resources:
            raise SchemaError(f"{_pointer(path)}: {shown(reference)} is not in this schema, and nothing is fetched")
        if fragment and not fragment.startswith("/"):
            if f"{target}#{fragment}" not in self._anchors:
                raise SchemaError(f"{_pointer(path)}: no anchor is named {shown(fragment)}")
            return
        value = self._resources[target]
        for step in unquote(fragment).split("/")[1:]:
            value = _step(value, step.replace("~1", "/").replace("~0", "~"))
            if value is _MISSING:
                raise SchemaError(f"{_pointer(path)}: {shown(reference)} points at nothing")
        if is_object(value):
            if id(value) not in self._seen:  # it stands where no keyword looks for a schema
                self.schema(value, path, target)
        elif not isinstance(value, bool):
            raise SchemaError(f"{_pointer(path)}: {shown(reference)} does not point at a schema")

    def _check_draft4_bounds(self, value: dict[str, Any], path: _Path) -> None:
        for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if exclusive in value and bound not in value:
                raise SchemaError(f"{_pointer(path)}: {exclusive} needs {bound}")


_Rule = Callable[[_Check, Any, _Path, str], None]
_MISSING = object()


def _step(value: Any, name: str) -> Any:
    if is_object(value):
        return value.get(name, _MISSING)
    if is_array(value) and _INDEX.fullmatch(name) and int(name) < len(value):
        return value[int(name)]
    return _MISSING


def draft_of(schema: Any) -> int:
    """The draft that a schema declares (4, 6, 7, 2019 or 2020), the latest if it declares none."""
    declared = schema.get("$schema") if is_object(schema) else None
    if not isinstance(declared, str):
        return 2020
    draft = _DRAFTS.get(declared.rstrip("#"))
    if draft is None:
        raise SchemaError(f"$schema: {shown(declared)} is no known meta-schema; use one of {', '.join(_DRAFTS)}")
    return draft


def _pointer(path: _Path) -> str:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(str(step).replace("~", "~0").replace("/", "~1"))
    return clipped("/".join(["#", *reversed(steps)]))


# ---- rules of keywords -----------------------------------------------------------------------------------------------


def _schema(check: _Check, value: Any, path: _Path, base: str) -> None:
    check.schema(value, path, base)


def _schema_or_bool(check: _Check, value: Any, path: _Path, base: str) -> None:
    if not isinstance(value, bool):
        check.schema(value, path, base)


def _schemas(check: _Check, value: Any, path: _Path, base: str) -> None:
    if not is_array(value) or not value:
        check.fail(value, path, "a non-empty array of schemas")
    for index, item in enumerate(value):
        check.schema(item, (path, index), base)


def _schema_or_schemas(check: _Check, value: Any, path: _Path, base: str) -> None:
    if is_array(value):
        if not value:
            check.fail(value, path, "a schema or a non-empty array of schemas")
        for index, item in enumerate(value):
            check.schema(item, (path, index), base)
    else:
        check.schema(value, path, base)


def _schema_map(check: _Check, value: Any, path: _Path, base: str) -> None:
    if not is_object(value):
        check.fail(value, path, "an object of schemas")
    for name, item in value.items():
        check.schema(item, (path, name), base)


def _pattern_map(check: _Check, value: Any, path: _Path, base: str) -> None:
    _schema_map(check, value, path, base)
    for pattern in value:
        _pattern(check, pattern, (path, pattern), base)


def _string_list(check: _Check, value: Any, path: _Path, base: str) -> None:
    strings = is_array(value) and all(isinstance(item, str) for item in value)
    if not strings or len(set(value)) != len(value) or (check.draft == 4 and not value):
        check.fail(value, path, "an array of different strings")


def _string_list_map(check: _Check, value: Any, path: _Path, base: str) -> None:
    if not is_object(value):
        check.fail(value, path, "an object of arrays of strings")
    for name, item in value.items():
        _string_list(check, item, (path, name), base)


def _dependencies(check: _Check, value: Any, path: _Path, base: str) -> None:
    if not is_object(value):
        check.fail(value, path, "an object of schemas or arrays of strings")
    for name, item in value.items():
        rule = _string_list if is_array(item) else _schema
        rule(check, item, (path, name), base)


def _type(check: _Check, value: Any, path: _Path, base: str) -> None:
    if isinstance(value, str) and value in _TYPES:
        return
    names = is_array(value) and value and all(isinstance(item, str) and item in _TYPES for item in value)
    if not names or len(set(value)) != len(value):
        check.fail(value, path, f"one of {', '.join(sorted(_TYPES))}, or an array of different ones")


def _string(check: _Check, value: Any, path: _Path, base: str) -> None:
    if not isinstance(value, str):
        check.fail(value, path, "a string")


def _boolean(check: _Check, value: Any, path: _Path, base: str) -> None:
    if not isinstance(value, bool):
        check.fail(value, path, "true or false")


def _array(check: _Check, value: Any, path: _Path, base: str) -> None:
    if not is_array(value):
        check.fail(value, path, "an array")


def _enum(check: _Check, value: Any, path: _Path, base: str) -> None:
    _array(check, value, path, base)
    if check.draft == 4 and (not value or len({compact(item) for item in value}) != len(value)):
        check.fail(value, path, "a non-empty array of different values")


def _number(check: _Check, value: Any, path: _Path, base: str) -> None:
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not is_finite:
        check.fail(value, path, "a number")


def _positive(check: _Check, value: Any, path: _Path, base: str) -> None:
    _number(check, value, path, base)
    if not value > 0:
        check.fail(value, path, "a number above 0")


def _count(check: _Check, value: Any, path: _Path, base: str) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, float) and math.isfinite(value) and check.draft != 4:  # draft 4 has no integer 2.0
        is_integer = value.is_integer()
    if not is_integer or value < 0:
        check.fail(value, path, "an integer from 0 up")


def _pattern(check: _Check, value: Any, path: _Path, base: str) -> None:
    _string(check, value, path, base)
    check.limit.check()
    problem = check_pattern(value)
    if problem is not None:
        check.fail(value, path, f"a regular expression ({problem})")


def _uri(check: _Check, value: Any, path: _Path, base: str) -> None:
    _string(check, value, path, base)
    if _URI_REFERENCE.fullmatch(value) is None or _PERCENT.search(value):
        check.fail(value, path, "a URI reference (other characters are written as % and two digits)")


def _reference(check: _Check, value: Any, path: _Path, base: str) -> None:
    _uri(check, value, path, base)
    check.refer(value, path, base)


def _anchor(check: _Check, value: Any, path: _Path, base: str) -> None:
    if not isinstance(value, str) or not _ANCHOR.fullmatch(value):
        check.fail(value, path, "a name of letters, digits, '-', '.' and '_'")


def _identifier(check: _Check, value: Any, path: _Path, base: str) -> None:
    _uri(check, value, path, base)
    if check.draft >= 2019 and urldefrag(str(value)).fragment:
        check.fail(value, path, "a URI without a fragment")


def _vocabulary(check: _Check, value: Any, path: _Path, base: str) -> None:
    if not is_object(value) or not all(isinstance(item, bool) for item in value.values()):
        check.fail(value, path, "an object of booleans")


_SHARED: dict[str, _Rule] = {
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
_DRAFT4: dict[str, _Rule] = {
    **_SHARED,
    **dict.fromkeys(("additionalItems", "additionalProperties"), _schema_or_bool),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), _boolean),
    "id": _uri,
    "items": _schema_or_schemas,
}
_DRAFT6: dict[str, _Rule] = {
    **_SHARED,
    **dict.fromkeys(("additionalItems", "additionalProperties", "contains", "propertyNames"), _schema),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), _number),
    "$id": _identifier,
    "examples": _array,
    "items": _schema_or_schemas,
}
_DRAFT7: dict[str, _Rule] = {
    **_DRAFT6,
    **dict.fromkeys(("if", "then", "else"), _schema),
    **dict.fromkeys(("$comment", "contentEncoding", "contentMediaType"), _string),
    **dict.fromkeys(("readOnly", "writeOnly"), _boolean),
}
_DRAFT2019: dict[str, _Rule] = {
    **_DRAFT7,
    **dict.fromkeys(("contentSchema", "unevaluatedItems", "unevaluatedProperties"), _schema),
    **dict.fromkeys(("$defs", "dependentSchemas"), _schema_map),
    **dict.fromkeys(("maxContains", "minContains"), _count),
    "$anchor": _anchor,
    "$vocabulary": _vocabulary,
    "dependentRequired": _string_list_map,
    "deprecated": _boolean,
}
_DRAFT2020: dict[str, _Rule] = {
    **_DRAFT2019,
    "$dynamicAnchor": _anchor,
    "$dynamicRef": _reference,
    "items": _schema,
    "prefixItems": _schemas,
}
del _DRAFT2020["additionalItems"]
_RULES = {4: _DRAFT4, 6: _DRAFT6, 7: _DRAFT7, 2019: _DRAFT2019, 2020: _DRAFT2020}
