"""Which words may stand in a field of a body: what an error says when another one does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import inspect

from deepseek_recipe.json_text import is_object

__all__ = ["choices_at"]


def choices_at(shape: Any, steps: Sequence[str | int], value: Any) -> list[str]:
    """The words that `shape` allows at the end of `steps`, a path of field names and indices into `value`.

    Empty where any text may stand, and behind steps that the shape does not know.
    """
    types = [*_alternatives(inspect.type_info(shape))]
    for index, step in enumerate(steps):
        structs = [kind for kind in types if isinstance(kind, inspect.StructType)]
        tags = sorted(str(struct.tag) for struct in structs if struct.tag_field == step)
        if tags and index == len(steps) - 1:
            return tags
        types = [*_alternatives(*_members(types, step, _tag(structs, value)))]
        try:
            value = value[step]
        except (IndexError, KeyError, TypeError):
            return []
    words = {word for kind in types if isinstance(kind, inspect.LiteralType) for word in kind.values}
    return sorted(map(str, words))


def _tag(structs: Sequence[inspect.StructType], value: Any) -> Any:
    """What tells which of the structs a value is."""
    field = structs[0].tag_field if structs else None
    return value.get(field) if field is not None and is_object(value) else None


def _members(types: Iterable[inspect.Type], step: str | int, tag: Any) -> Iterator[inspect.Type]:
    """The types that a field or an item of these types may have."""
    for kind in types:
        if isinstance(kind, inspect.ListType) and isinstance(step, int):
            yield kind.item_type
        elif isinstance(kind, inspect.StructType) and kind.tag in (None, tag):
            yield from (field.type for field in kind.fields if field.encode_name == step)


def _alternatives(*types: inspect.Type) -> Iterator[inspect.Type]:
    for kind in types:
        if isinstance(kind, inspect.UnionType):
            yield from _alternatives(*kind.types)
        elif isinstance(kind, inspect.Metadata):
            yield from _alternatives(kind.type)
        else:
            yield kind
