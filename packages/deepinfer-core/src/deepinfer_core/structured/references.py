"""`ReferenceTable`: where each `$ref` of a JSON Schema leads. Nothing is ever fetched.

"#"  "#/$defs/a"  "#anchor"  "other-id"  "other-id#/$defs/a"      within the document: found
"https://example.com/schema.json"                                 elsewhere: refused, unless a part of the document
                                                                  has that $id
"""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import quote, unquote, urldefrag, urljoin

from deepinfer_core.config.checks import shown
from deepinfer_core.errors import GrammarError

__all__ = ["ReferenceTable", "pointers_of"]


class ReferenceTable:
    """Identifiers and anchors of a document, and the base address of each object in it."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._by_address: dict[str, Any] = {"": root}
        # Resolved at once: what a pointer finds must not depend on what is rewritten later.
        self._targets: dict[int, Any] = {}
        references: list[tuple[dict[str, Any], str]] = []
        open_values: list[tuple[Any, str]] = [(root, "")]
        while open_values:
            value, base = open_values.pop()
            if isinstance(value, dict):
                node = cast("dict[str, Any]", value)
                base = self._enter(node, base)
                if isinstance(node.get("$ref"), str):
                    references.append((node, base))
                open_values += [(child, base) for name, child in node.items() if not _is_value(name, child)]
            elif isinstance(value, list):
                open_values += [(child, base) for child in cast("list[Any]", value)]
        for node, base in references:
            reference: str = node["$ref"]
            # urljoin knows no base of the form urn:..
            self._targets[id(node)] = self._find(
                base + reference if reference.startswith("#") else urljoin(base, reference)
            )

    def _enter(self, node: dict[str, Any], base: str) -> str:
        given = node.get("$id", node.get("id"))
        if isinstance(given, str) and given:
            address, fragment = urldefrag(urljoin(base, given))
            if fragment:  # how drafts 4 to 7 write an anchor
                self._by_address.setdefault(f"{address}#{fragment}", node)
            else:
                base = address
                self._by_address.setdefault(base, node)
        if isinstance(node.get("$anchor"), str):
            self._by_address.setdefault(f"{base}#{node['$anchor']}", node)
        return base

    def _find(self, uri: str) -> Any:
        address, fragment = urldefrag(uri)
        if fragment and not fragment.startswith("/"):
            return self._by_address.get(f"{address}#{fragment}")
        return _follow(self._by_address.get(address), unquote(fragment))

    def target(self, node: dict[str, Any], where: str) -> Any:
        """What the `$ref` of `node` means: a schema object or a boolean. Raises GrammarError."""
        found = self._targets.get(id(node))
        if not isinstance(found, (dict, bool)):
            raise GrammarError(
                f"structured.json refers to {shown(node['$ref'])} at {where}, which is not a schema in this document; "
                "nothing is fetched: put it under $defs"
            )
        return cast("Any", found)


def _is_value(name: str, child: Any) -> bool:
    """Whether `child` lists values, in which "$id" and "$anchor" mean nothing."""
    return name == "enum" and isinstance(child, list)


def pointers_of(root: dict[str, Any], start: str = "#") -> dict[int, str]:
    """id of each object in `root`, which stands at `start` -> its JSON pointer as a URI fragment, "#/$defs/a"."""
    pointers: dict[int, str] = {}
    open_values: list[tuple[Any, str]] = [(root, start)]
    while open_values:
        value, pointer = open_values.pop()
        if isinstance(value, dict):
            node = cast("dict[str, Any]", value)
            pointers.setdefault(id(node), pointer)
            for name, child in node.items():
                open_values.append((child, f"{pointer}/{quote(name.replace('~', '~0').replace('/', '~1'))}"))
        elif isinstance(value, list):
            children = cast("list[Any]", value)
            open_values += [(child, f"{pointer}/{index}") for index, child in enumerate(children)]
    return pointers


def _follow(value: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = cast("dict[str, Any]", value).get(name)
        elif isinstance(value, list) and name.isascii() and name.isdigit() and len(name) < 10:
            items = cast("list[Any]", value)
            value = items[int(name)] if int(name) < len(items) else None
        else:
            return None
    return value
