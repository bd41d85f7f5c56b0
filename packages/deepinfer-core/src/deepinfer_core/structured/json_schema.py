"""`check_schema`: a JSON Schema (draft 2020-12, and what older drafts say differently) made ready for llguidance.

    schema ─► every keyword enforced, an annotation, or refused by name and place
           ─► $ref resolved within the document; loops and schemas that no finite value satisfies found
           ─► regular expressions rewritten, older spellings modernised

What llguidance adds to the refusals: formats that it doesn't know, `oneOf` whose branches may overlap,
`patternProperties` that may overlap, bounds that contradict each other.

The answer is compact JSON whose properties come in the order of the schema. Strings are written without \\u escapes:
with them a key could be spelled in a second way and slip past `properties`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final, cast

from deepinfer_core.config.checks import shown
from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.keywords import (
    ANNOTATIONS,
    ENFORCED,
    REFUSED,
    SCHEMA_LISTS,
    SCHEMAS_BY_NAME,
    SINGLE_SCHEMAS,
    demands_nothing,
)
from deepinfer_core.structured.limits import MAX_ENUM_VALUES, MAX_PROPERTIES, MAX_SCHEMA_NODES
from deepinfer_core.structured.references import ReferenceTable, pointers_of
from deepinfer_core.structured.regex import portable_regex
from deepinfer_core.structured.satisfiable import remove_impossible

__all__ = ["CheckedSchema", "check_schema"]

# Above this JSON readers that use float64 disagree about a number's value, llguidance among them.
_MAX_EXACT_INTEGER: Final = 2**53
_WRITABLE_CONTROLS: Final = "\b\f\n\r\t"
_CONTROLS: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]|\\(?:x|u00)(?:0[0-7BbEeFf]|1[0-9A-Fa-f])")
_CLASSES: Final = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_IDENTIFIERS: Final = frozenset({"$anchor", "$id", "$schema", "id"})
# llguidance's dates have a 29th of February in every year; this holds for those that the calendar has.
_CALENDAR: Final = (
    "^(?:[0-9]{4}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|"
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)

# Compact JSON, every keyword enforced, one spelling for every string (the docstring says why no \u escapes).
_JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',
}


class CheckedSchema:
    """The schema to compile, and what was found in it."""

    def __init__(self, text: str) -> None:
        root: Any = json.loads(text)
        if root is False:
            raise GrammarError("structured.json is false, which no value satisfies")
        self.root: dict[str, Any] = {} if root is True else root
        self.enforced: set[str] = set()
        self.ignored: set[str] = set()
        self._references = ReferenceTable(self.root)
        self._nodes: dict[int, dict[str, Any]] = {}
        self._targets: dict[int, Any] = {}  # by id of the node that has the $ref
        self._num_enum_values = self._num_properties = 0

    def check(self) -> None:
        """Walk every subschema, also those that only a $ref leads to."""
        open_nodes: list[tuple[dict[str, Any], str]] = [(self.root, "#")]
        while open_nodes:
            node, where = open_nodes.pop()
            if id(node) in self._nodes:
                continue
            self._nodes[id(node)] = node
            if len(self._nodes) > MAX_SCHEMA_NODES:
                raise GrammarError(f"structured.json has more than {MAX_SCHEMA_NODES} subschemas; make it smaller")
            open_nodes += self._check_node(node, where)
        remove_impossible(self.root, list(self._nodes.values()), self._targets)
        for node in self._nodes.values():
            if node.get("format") in ("date", "date-time"):
                node["allOf"] = [*node.get("allOf", []), {"pattern": _CALENDAR}]
        self._rewrite_references()

    def _check_node(self, node: dict[str, Any], where: str) -> Iterator[tuple[dict[str, Any], str]]:
        self._check_keywords(node, where)
        if "$ref" in node:
            target = self._targets[id(node)] = self._references.target(node, where)
            yield from _schema(target, str(node["$ref"]))
        _modernise(node)
        _check_shapes(node, where)
        self._check_values(node, where)
        _rewrite_patterns(node, where)
        for keyword in SCHEMAS_BY_NAME:
            for name, child in _mapping(node.get(keyword, {}), where, keyword).items():
                yield from _schema(child, f"{where}/{keyword}/{name}")
        for keyword in SCHEMA_LISTS:
            for index, child in enumerate(_list(node.get(keyword, []), where, keyword)):
                yield from _schema(child, f"{where}/{keyword}/{index}")
        for keyword in SINGLE_SCHEMAS:
            if keyword in node:
                yield from _schema(node[keyword], f"{where}/{keyword}")

    def _check_keywords(self, node: dict[str, Any], where: str) -> None:
        for keyword, value in node.items():
            if keyword in REFUSED and not demands_nothing(keyword, value, node):
                raise GrammarError(
                    f"structured.json has the keyword {keyword!r} at {where}, which cannot be enforced while tokens "
                    "are drawn; leave it out and check the answer afterwards"
                )
        self.enforced |= ENFORCED & node.keys()
        self.ignored |= node.keys() - ENFORCED - REFUSED - ANNOTATIONS

    def compiled(self) -> dict[str, Any]:
        """The checked schema with llguidance's options: what is compiled."""
        return self.root | {"x-guidance": _JSON_OPTIONS}

    def _rewrite_references(self) -> None:
        """Every $ref as a pointer from the root, so that identifiers and drafts no longer matter."""
        pointers = pointers_of(self.root)
        for number, target in self._targets.items():
            node = self._nodes[number]
            if "$ref" not in node:  # it was impossible
                continue
            del node["$ref"]
            if isinstance(target, dict):
                node["$ref"] = pointers[id(cast("dict[str, Any]", target))]
            elif target is False:
                node["enum"] = []

    def _check_values(self, node: dict[str, Any], where: str) -> None:
        values = [*_list(node.get("enum", []), where, "enum"), *([node["const"]] if "const" in node else [])]
        self._num_enum_values += len(values)
        if self._num_enum_values > MAX_ENUM_VALUES:
            raise GrammarError(
                f"structured.json has more than {MAX_ENUM_VALUES} enum values; shorten the list at {where}/enum"
            )
        for value in values:
            _check_constant(value, where)
        properties = _mapping(node.get("properties", {}), where, "properties")
        self._num_properties += len(properties)
        if self._num_properties > MAX_PROPERTIES:
            raise GrammarError(f"structured.json has more than {MAX_PROPERTIES} properties; make it smaller")
        for name in properties:
            _check_constant(name, where)
        required = _list(node.get("required", []), where, "required")
        least = node.get("minProperties", 0)
        if least > max(1, len(required)) and _may_repeat_keys(node):
            raise GrammarError(
                f"structured.json asks for {least} properties at {where} and names {len(required)} required ones: a "
                "key could come twice to fill up; name more in required, or set additionalProperties to false"
            )


def check_schema(text: str) -> CheckedSchema:
    """Check and rewrite a schema given as JSON text. Raises GrammarError with keyword and place."""
    schema = CheckedSchema(text)
    schema.check()
    return schema


def _modernise(node: dict[str, Any]) -> None:
    """Drop what demands nothing; `items` as a list and boolean exclusive bounds become those of draft 2020-12."""
    # x-guidance would switch llguidance to ignoring what it cannot enforce.
    for keyword in [k for k in node if k in REFUSED or k in _IDENTIFIERS or k == "x-guidance"]:
        del node[keyword]
    if isinstance(node.get("items"), list):
        node["prefixItems"] = node.pop("items")
        if "additionalItems" in node:
            node["items"] = node.pop("additionalItems")
    node.pop("additionalItems", None)  # without a list of items it has no effect
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(exclusive), bool):
            is_exclusive = node.pop(exclusive)
            if is_exclusive and bound in node:
                node[exclusive] = node.pop(bound)


def _check_shapes(node: dict[str, Any], where: str) -> None:
    """Values that later steps compute with have the right types."""
    types: Any = node.get("type", [])
    if not isinstance(types, str) and not (
        isinstance(types, list) and all(isinstance(name, str) for name in cast("list[Any]", types))
    ):
        raise GrammarError(
            f"structured.json has the type {shown(node['type'])} at {where}; give a name or a list of names"
        )
    for keyword in ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"):
        value = node.get(keyword, 0)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or value != int(value):
            raise GrammarError(f"structured.json has {shown(value)} at {where}/{keyword}; it must be an integer from 0")
        if keyword in node:
            node[keyword] = int(value)

    step = node.get("multipleOf", 1)
    if isinstance(step, (int, float)) and step <= 0:
        raise GrammarError(f"structured.json has {shown(step)} at {where}/multipleOf; it must be above 0")
    if node.get("format") == "unknown":  # to llguidance the name of a format that every text has
        raise GrammarError(f"structured.json has the format 'unknown' at {where}, which nothing defines; leave it out")


def _rewrite_patterns(node: dict[str, Any], where: str) -> None:
    if isinstance(node.get("pattern"), str):
        node["pattern"] = portable_regex(node["pattern"], f"the pattern at {where}")
        if _CONTROLS.search(_CLASSES.sub("", node["pattern"])):
            raise GrammarError(
                f"structured.json has a pattern at {where} that asks for a control character; they are not written in "
                "strings, apart from \\b \\f \\n \\r \\t"
            )
    if "patternProperties" in node:
        node["patternProperties"] = {
            portable_regex(pattern, f"the patternProperties at {where}"): child
            for pattern, child in _mapping(node["patternProperties"], where, "patternProperties").items()
        }


def _may_repeat_keys(node: dict[str, Any]) -> bool:
    return node.get("additionalProperties", {}) is not False or bool(node.get("patternProperties"))


def _check_constant(value: Any, where: str) -> None:
    open_values: list[Any] = [value]
    while open_values:
        item = open_values.pop()
        if isinstance(item, dict):
            members = cast("dict[str, Any]", item)
            open_values += [*members, *members.values()]
        elif isinstance(item, list):
            open_values += cast("list[Any]", item)
        elif isinstance(item, str):
            if any(char < " " and char not in _WRITABLE_CONTROLS for char in item):
                raise GrammarError(f"structured.json has the text {shown(item)} at {where} with a control character")
        elif isinstance(item, (int, float)) and not isinstance(item, bool) and abs(item) > _MAX_EXACT_INTEGER:
            raise GrammarError(
                f"structured.json has the number {shown(item)} at {where}; beyond 2**53 its value depends on who reads "
                "it: use a string, or a smaller number"
            )


def _schema(value: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    if isinstance(value, dict):
        yield cast("dict[str, Any]", value), where
    elif not isinstance(value, bool):
        raise GrammarError(f"structured.json has {shown(value)} at {where}; a schema is an object or a boolean")


def _mapping(value: Any, where: str, keyword: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GrammarError(f"structured.json has {shown(value)} at {where}/{keyword}; it must be an object")
    return cast("dict[str, Any]", value)


def _list(value: Any, where: str, keyword: str) -> list[Any]:
    if not isinstance(value, list):
        raise GrammarError(f"structured.json has {shown(value)} at {where}/{keyword}; it must be a list")
    return cast("list[Any]", value)
