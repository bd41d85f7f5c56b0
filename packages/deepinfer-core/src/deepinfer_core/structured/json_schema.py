"""`check_schema`: a JSON Schema (draft 2020-12, and what older drafts say differently) made ready for llguidance.

    schema ─► every keyword enforced, an annotation, or refused by name and place
           ─► $ref resolved within the document; loops and schemas that no finite value satisfies found
           ─► regular expressions rewritten, older spellings modernised

What llguidance adds to the refusals: `oneOf` whose branches may overlap,
`patternProperties` that may overlap, bounds that contradict each other.

The answer is compact JSON whose properties come in the order of the schema. Strings are written without \\u escapes:
with them a key could be spelled in a second way and slip past `properties`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final, cast

from deepinfer_core.config.checks import shown
from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.bounds import MAX_EXACT, exact_bounds
from deepinfer_core.structured.forcing import Fixed, fixed_of
from deepinfer_core.structured.formats import check_format, spell_out_format
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

_WRITABLE_CONTROLS: Final = "\b\f\n\r\t"
_CONTROLS: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]|\\(?:x|u00)(?:0[0-7BbEeFf]|1[0-9A-Fa-f])")
_CLASSES: Final = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_IDENTIFIERS: Final = frozenset({"$anchor", "$id", "$schema", "id"})

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
        self._longest_fixed = self._total_fixed = 0  # characters of texts that values, names and patterns fix

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
            spell_out_format(node)
        self._rewrite_references()

    def _check_node(self, node: dict[str, Any], where: str) -> Iterator[tuple[dict[str, Any], str]]:
        self._check_keywords(node, where)
        if "$ref" in node:
            target = self._targets[id(node)] = self._references.target(node, where)
            yield from _schema(target, str(node["$ref"]))
        _modernise(node)
        _check_shapes(node, where)
        exact_bounds(node, where)
        unknown_format = check_format(node, where)
        if unknown_format is not None:
            self.ignored.add(f"format {unknown_format}")
        elif "format" in node:
            self.enforced.add("format")
        self._check_values(node, where)
        self._rewrite_patterns(node, where)
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
        self.enforced |= (ENFORCED & node.keys()) - {"format"}  # `check_format` knows which
        self.ignored |= node.keys() - ENFORCED - REFUSED - ANNOTATIONS

    @property
    def fixed(self) -> Fixed:
        """What its fixed texts are."""
        return fixed_of(self._longest_fixed, self._total_fixed)

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
                schema = cast("dict[str, Any]", target)
                node["$ref"] = pointers.get(id(schema)) or self._moved(schema, pointers)
            elif target is False:
                node["enum"] = []

    def _moved(self, target: dict[str, Any], pointers: dict[int, str]) -> str:
        """The pointer of a target that stood in a keyword without effect, which was left out."""
        definitions: dict[str, Any] = self.root.setdefault("$defs", {})
        name = next(name for name in map(str, itertools.count()) if name not in definitions)
        definitions[name] = target
        pointers |= pointers_of(target, f"#/$defs/{name}")
        return pointers[id(target)]

    def _check_values(self, node: dict[str, Any], where: str) -> None:
        values = [*_list(node.get("enum", []), where, "enum"), *([node["const"]] if "const" in node else [])]
        self._num_enum_values += len(values)
        if self._num_enum_values > MAX_ENUM_VALUES:
            raise GrammarError(
                f"structured.json has more than {MAX_ENUM_VALUES} enum values; shorten the list at {where}/enum"
            )
        sizes = [_check_constant(value, where) for value in values]
        properties = _mapping(node.get("properties", {}), where, "properties")
        self._num_properties += len(properties)
        if self._num_properties > MAX_PROPERTIES:
            raise GrammarError(f"structured.json has more than {MAX_PROPERTIES} properties; make it smaller")
        names = [_check_constant(name, where) for name in properties]
        self._longest_fixed = max([self._longest_fixed, *sizes, *names])
        self._total_fixed += sum(names) + max(sizes, default=0)
        required = _list(node.get("required", []), where, "required")
        least = node.get("minProperties", 0)
        if least > max(1, len(required)) and _may_repeat_keys(node):
            raise GrammarError(
                f"structured.json asks for {least} properties at {where} and names {len(required)} required ones: a "
                "key could come twice to fill up; name more in required, or set additionalProperties to false"
            )

    def _rewrite_patterns(self, node: dict[str, Any], where: str) -> None:
        if isinstance(node.get("pattern"), str):
            node["pattern"] = self._portable(node["pattern"], f"the pattern at {where}")
            if _CONTROLS.search(_CLASSES.sub("", node["pattern"])):
                raise GrammarError(
                    f"structured.json has a pattern at {where} that asks for a control character; they are not written "
                    "in strings, apart from \\b \\f \\n \\r \\t"
                )
        if "patternProperties" in node:
            node["patternProperties"] = {
                self._portable(pattern, f"the patternProperties at {where}"): child
                for pattern, child in _mapping(node["patternProperties"], where, "patternProperties").items()
            }

    def _portable(self, pattern: str, where: str) -> str:
        found = portable_regex(pattern, where, in_json=True)
        self._longest_fixed = max(self._longest_fixed, found.num_fixed)
        return found.text


def check_schema(text: str) -> CheckedSchema:
    """Check and rewrite a schema given as JSON text. Raises GrammarError with keyword and place."""
    schema = CheckedSchema(text)
    schema.check()
    return schema


def _modernise(node: dict[str, Any]) -> None:
    """Drop what demands nothing; `items` as a list becomes that of draft 2020-12."""
    # x-guidance would switch llguidance to ignoring what it cannot enforce.
    for keyword in [k for k in node if k in REFUSED or k in _IDENTIFIERS or k == "x-guidance"]:
        del node[keyword]
    if isinstance(node.get("items"), list):
        node["prefixItems"] = node.pop("items")
        if "additionalItems" in node:
            node["items"] = node.pop("additionalItems")
    node.pop("additionalItems", None)  # without a list of items it has no effect


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


def _may_repeat_keys(node: dict[str, Any]) -> bool:
    return node.get("additionalProperties", {}) is not False or bool(node.get("patternProperties"))


def _check_constant(value: Any, where: str) -> int:
    """Raise GrammarError for a value that cannot be written; how many characters its texts have."""
    num_fixed = 0
    open_values: list[Any] = [value]
    while open_values:
        item = open_values.pop()
        if isinstance(item, dict):
            members = cast("dict[str, Any]", item)
            open_values += [*members, *members.values()]
        elif isinstance(item, list):
            open_values += cast("list[Any]", item)
        elif isinstance(item, str):
            num_fixed += len(item)
            _check_text(item, where)
        elif isinstance(item, (int, float)) and not isinstance(item, bool) and abs(item) > MAX_EXACT:
            raise GrammarError(
                f"structured.json has the number {shown(item)} at {where}; beyond 2**53 its value depends on who "
                "reads it: use a string, or a smaller number"
            )
    return num_fixed


def _check_text(text: str, where: str) -> None:
    if any(char < " " and char not in _WRITABLE_CONTROLS for char in text):
        raise GrammarError(f"structured.json has the text {shown(text)} at {where} with a control character")


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
