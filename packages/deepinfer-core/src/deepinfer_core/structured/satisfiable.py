"""`remove_impossible`: schemas that no finite value satisfies, found before a model starts to write one.

    {"$ref": "#"}                                                    means itself and nothing else
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}       an object without end

A schema can be satisfied if one of its types can: scalars always, an object if its required properties can, an array
if its first `minItems` elements can. The least fixed point of these rules is taken, so loops count as impossible.
An impossible part that need not be written becomes `false`; an impossible root is refused.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast

from deepinfer_core.errors import GrammarError

__all__ = ["remove_impossible"]

_NESTED: Final = frozenset({"object", "array"})


def remove_impossible(root: dict[str, Any], nodes: list[dict[str, Any]], targets: dict[int, Any]) -> None:
    """Make impossible schemas among `nodes` unsatisfiable in plain sight. Raises GrammarError if `root` is one.

    targets: what the $ref of a node means, by the node's id.
    """
    possible: set[int] = set()
    rules = _Rules(possible, targets)
    pending = list(nodes)
    while True:
        # Back and forth: chains are followed in one round, whichever way they were written.
        left = [node for node in reversed(pending) if not rules.holds(node)]
        if len(left) == len(pending):
            break
        pending = left
    if id(root) not in possible:
        raise GrammarError(
            "structured.json cannot be satisfied: what it requires is forbidden, or endless by way of $ref"
        )
    for node in pending:
        node.clear()
        node["enum"] = []


class _Rules:
    def __init__(self, possible: set[int], targets: dict[int, Any]) -> None:
        self._possible, self._targets = possible, targets

    def holds(self, node: dict[str, Any]) -> bool:
        """Whether `node` is possible given what is known to be; remembers it."""
        found = self._composed(node) and self._by_type(node)
        if found:
            self._possible.add(id(node))
        return found

    def _known(self, schema: Any) -> bool:
        return schema if isinstance(schema, bool) else id(schema) in self._possible

    def _composed(self, node: dict[str, Any]) -> bool:
        if "$ref" in node and not self._known(self._targets[id(node)]):
            return False
        if not all(self._known(part) for part in node.get("allOf", ())):
            return False
        branches: list[list[Any]] = [node[word] for word in ("anyOf", "oneOf") if node.get(word)]
        return all(any(self._known(part) for part in parts) for parts in branches)

    def _by_type(self, node: dict[str, Any]) -> bool:
        if "const" in node or "enum" in node:
            return True
        given: Any = node.get("type", "null")
        types = {given} if isinstance(given, str) else set(cast("list[str]", given))
        if types - _NESTED:  # scalars, and names that llguidance will refuse
            return True
        return ("object" in types and self._object(node)) or ("array" in types and self._array(node))

    def _object(self, node: dict[str, Any]) -> bool:
        return all(self._property(node, name) for name in node.get("required", ()))

    def _property(self, node: dict[str, Any], name: Any) -> bool:
        """Whether the property `name` can be written: by its own schema, those of patterns, or that of the rest."""
        if not isinstance(name, str):  # llguidance will refuse it
            return True
        properties: dict[str, Any] = node.get("properties", {})
        patterns: dict[str, Any] = node.get("patternProperties", {})
        schemas = [properties[name]] if name in properties else []
        schemas += [schema for pattern, schema in patterns.items() if _matches(pattern, name)]
        return all(self._known(schema) for schema in schemas or [node.get("additionalProperties", True)])

    def _array(self, node: dict[str, Any]) -> bool:
        first: list[Any] = node.get("prefixItems", [])
        least = int(node.get("minItems", 0))
        if not all(self._known(item) for item in first[:least]):
            return False
        return least <= len(first) or self._known(node.get("items", True))


def _matches(pattern: str, name: str) -> bool:
    """Whether a portable pattern matches; what Python does not understand does."""
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True
