"""Is a JSON value a JSON Schema that this side can stand behind?

The rules are those of the meta-schemas of drafts 4, 6, 7, 2019-09 and 2020-12 (the default), as tables in `keywords`,
so that checking a tool costs microseconds. Beyond them: patterns must be valid, every `$ref` must resolve inside the
schema or to a meta-schema of its draft, nothing is fetched, and size and time are bounded.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import msgspec

from deepseek_recipe.checks import clipped, shown
from deepseek_recipe.json_text import compact, is_array, is_object
from deepseek_recipe.schema.keywords import RULES, Path
from deepseek_recipe.schema.limits import MAX_NODES, SchemaError, TimeLimit

__all__ = ["check_schema", "draft_of"]

# The folder of the meta-schemas of a draft. Declarations may write http for https, and the reverse.
_FOLDERS = {
    4: "http://json-schema.org/draft-04/",
    6: "http://json-schema.org/draft-06/",
    7: "http://json-schema.org/draft-07/",
    2019: "https://json-schema.org/draft/2019-09/",
    2020: "https://json-schema.org/draft/2020-12/",
}
_DRAFTS = {f"{folder.partition(':')[2]}schema": draft for draft, folder in _FOLDERS.items()}
_DRAFTS["//json-schema.org/schema"] = 2020  # whichever is the latest
_INDEX = re.compile("[0-9]{1,9}")
_MAX_REMEMBERED = 1024
_MAX_REMEMBERED_BYTES = 16_384

# Texts of valid schemas, the latest last: tools come again and again. No other thread can come between its `popitem`.
_valid_texts: OrderedDict[bytes, None] = OrderedDict()


def check_schema(schema: Any, limit: TimeLimit | None = None) -> None:
    """Raises `SchemaError` unless `schema` is a valid, self-contained JSON Schema, and when the time is over."""
    text = msgspec.json.encode(schema)
    if text in _valid_texts:
        return
    SchemaCheck(schema, limit or TimeLimit()).run()
    if len(text) <= _MAX_REMEMBERED_BYTES:
        _valid_texts[text] = None
        if len(_valid_texts) > _MAX_REMEMBERED:
            _valid_texts.popitem(last=False)


class SchemaCheck:
    """One pass over a schema: rules of keywords, then references."""

    def __init__(self, schema: Any, limit: TimeLimit) -> None:
        self._root = schema
        self.limit = limit
        self.draft = draft_of(schema)
        self._rules = RULES[self.draft]
        self._num_nodes = 0
        self._seen: set[int] = set()
        self._references: list[tuple[str, str, Path]] = []  # (reference, base URI, place)
        self._resources: dict[str, Any] = {}  # absolute URI without fragment -> subschema
        self._anchors: set[str] = set()

    def run(self) -> None:
        self._resources[""] = self._root
        self.schema(self._root, None, "")
        for reference, base, path in self._references:
            self._resolve(reference, base, path)

    def schema(self, value: Any, path: Path, base: str) -> None:
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

    def fail(self, value: Any, path: Path, wanted: str) -> None:
        """Raises the error for a value that is not what its keyword wants."""
        raise SchemaError(f"{_pointer(path)} must be {wanted}, not {clipped(compact(value))}")

    def refer(self, reference: str, path: Path, base: str) -> None:
        """Notes a reference, to be resolved when every identifier is known."""
        self._references.append((reference, base, path))

    def _identify(self, value: dict[str, Any], path: Path, base: str) -> str:
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

    def _resolve(self, reference: str, base: str, path: Path) -> None:
        self.limit.check()
        target, fragment = urldefrag(urljoin(base, reference)) if base else urldefrag(reference)
        is_own = target in self._resources
        value = self._resources[target] if is_own else _meta_schema(target, self.draft)
        if value is _MISSING:
            raise SchemaError(f"{_pointer(path)}: {shown(reference)} is not in this schema, and nothing is fetched")
        if fragment and not fragment.startswith("/"):
            if not (f"{target}#{fragment}" in self._anchors if is_own else value.get("$dynamicAnchor") == fragment):
                raise SchemaError(f"{_pointer(path)}: no anchor is named {shown(fragment)}")
            return
        for step in unquote(fragment).split("/")[1:]:
            value = _step(value, step.replace("~1", "/").replace("~0", "~"))
            if value is _MISSING:
                raise SchemaError(f"{_pointer(path)}: {shown(reference)} points at nothing")
        if is_object(value):
            if is_own and id(value) not in self._seen:  # it stands where no keyword looks for a schema
                self.schema(value, path, target)
        elif not isinstance(value, bool):
            raise SchemaError(f"{_pointer(path)}: {shown(reference)} does not point at a schema")

    def _check_draft4_bounds(self, value: dict[str, Any], path: Path) -> None:
        for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if exclusive in value and bound not in value:
                raise SchemaError(f"{_pointer(path)}: {exclusive} needs {bound}")


_MISSING: Any = object()


def _step(value: Any, name: str) -> Any:
    if is_object(value):
        return value.get(name, _MISSING)
    if is_array(value) and _INDEX.fullmatch(name) and int(name) < len(value):
        return value[int(name)]
    return _MISSING


def _meta_schema(address: str, draft: int) -> Any:
    """A meta-schema of `draft`, or one of its vocabularies; they come with the jsonschema library."""
    if not address.startswith(_FOLDERS[draft]):
        return _MISSING
    from jsonschema_specifications import REGISTRY  # pyright: ignore[reportMissingTypeStubs] - it has none

    resource = REGISTRY.get(address)
    return _MISSING if resource is None else resource.contents


def draft_of(schema: Any) -> int:
    """The draft that a schema declares (4, 6, 7, 2019 or 2020), the latest if it declares none."""
    declared = schema.get("$schema") if is_object(schema) else None
    if not isinstance(declared, str) or declared in ("", "#"):
        return 2020
    scheme, _, address = declared.partition(":")
    draft = _DRAFTS.get(address.rstrip("#")) if scheme in ("http", "https") else None
    if draft is None or (declared.endswith("##") and draft != 4):
        known = ", ".join(f"{folder}schema" for folder in _FOLDERS.values())
        raise SchemaError(f"$schema: {shown(declared)} is no known meta-schema; use one of {known}")
    return draft


def _pointer(path: Path) -> str:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(str(step).replace("~", "~0").replace("/", "~1"))
    return clipped("/".join(["#", *reversed(steps)]))
