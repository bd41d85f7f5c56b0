"""The restricted schema language of `strict: true`, and its normal form.

A node is one of the kinds below, chosen by `type`, else `anyOf`, else `$ref`; of each kind only the named keys survive,
in this order. Objects forbid other properties and require all of theirs.

    string         type, description, pattern, format, enum
    number         type, description, const, default, minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf
    integer        as number
    boolean, null  type, description
    array          type, items, description
    type list      type, description                      (of scalar types)
    object         type, properties, additionalProperties, required, description
    anyOf          anyOf, description
    $ref           $ref
"""

from __future__ import annotations

from typing import Any

from deepseek_recipe.checks import clipped
from deepseek_recipe.json_text import compact, is_array, is_object
from deepseek_recipe.schema.limits import MAX_NODES, SchemaError, TimeLimit

__all__ = ["strict_parameters", "strict_schema"]

_SCALARS = ("string", "number", "integer", "boolean", "null")
_STRING_FORMATS = ("email", "hostname", "ipv4", "ipv6", "uuid")
_NUMBER_KEYS = (
    "const",
    "default",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
)


def strict_parameters(parameters: Any, limit: TimeLimit | None = None) -> dict[str, Any]:
    """The normal form of a strict tool's parameters; none at all are an object without properties.

    Raises `SchemaError` that names the place, and when the time is over.
    """
    if parameters is None:
        parameters = {"type": "object"}
    return _top_object(parameters, limit, may_be_empty=True)


def strict_schema(schema: Any, limit: TimeLimit | None = None) -> dict[str, Any]:
    """The normal form of a strict answer schema: an object with at least one property."""
    return _top_object(schema, limit, may_be_empty=False)


def _top_object(schema: Any, limit: TimeLimit | None, *, may_be_empty: bool) -> dict[str, Any]:
    if not is_object(schema) or schema.get("type") != "object":
        raise SchemaError('a strict schema must be of type "object" at the top')
    return _Normalizer(limit or TimeLimit()).object(schema, "#", may_be_empty=may_be_empty)


class _Normalizer:
    def __init__(self, limit: TimeLimit) -> None:
        self._limit = limit
        self._num_nodes = 0

    def node(self, schema: Any, path: str) -> dict[str, Any]:
        """The normal form of one node."""
        self._limit.check()
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise SchemaError(f"more than {MAX_NODES} subschemas")
        if not is_object(schema):
            raise SchemaError(f"{clipped(path)} must be an object, not {clipped(compact(schema))}")
        kind = schema.get("type")
        if is_array(kind):
            return self._type_list(schema, path)
        if "type" in schema:
            return self._typed(schema, kind, path)
        if "anyOf" in schema:
            return self._any_of(schema, path)
        if "$ref" in schema:
            return {"$ref": _typed_value(schema, "$ref", str, path)}
        raise SchemaError(f"{clipped(path)} needs a type, anyOf or $ref")

    def object(self, schema: dict[str, Any], path: str, *, may_be_empty: bool) -> dict[str, Any]:
        """The normal form of an object."""
        given = schema.get("properties")
        properties: dict[str, Any] = {} if given is None else _typed_value(schema, "properties", dict, path)
        if not properties and not may_be_empty:
            raise SchemaError(f"{clipped(path)} is an object without properties")
        if schema.get("additionalProperties") not in (None, False):
            raise SchemaError(f"{clipped(path)}/additionalProperties must be false in a strict schema")
        normal = {name: self.node(value, f"{path}/properties/{name}") for name, value in properties.items()}
        _check_required(schema.get("required"), list(normal), path)
        return {
            "type": "object",
            "properties": normal,
            "additionalProperties": False,
            "required": list(normal),
            **_description(schema, path),
        }

    def _typed(self, schema: dict[str, Any], kind: Any, path: str) -> dict[str, Any]:
        if kind == "object":
            return self.object(schema, path, may_be_empty=False)
        if kind == "array":
            if "items" not in schema:
                raise SchemaError(f"{clipped(path)} is an array without items")
            return {"type": "array", "items": self.node(schema["items"], f"{path}/items"), **_description(schema, path)}
        if kind == "string":
            return _string(schema, path)
        if kind in ("number", "integer"):
            return _number(schema, kind, path)
        if kind in ("boolean", "null"):
            return {"type": kind, **_description(schema, path)}
        raise SchemaError(f"{clipped(path)}/type: {clipped(compact(kind))} is not a type of strict schemas")

    def _type_list(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        kinds = schema["type"]
        if any(kind not in _SCALARS for kind in kinds):
            raise SchemaError(f"{clipped(path)}/type: a list of types may hold only {', '.join(_SCALARS)}")
        return {"type": kinds, **_description(schema, path)}

    def _any_of(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        options = _typed_value(schema, "anyOf", list, path)
        normal = [self._option(option, f"{path}/anyOf/{index}") for index, option in enumerate(options)]
        return {"anyOf": normal, **_description(schema, path)}

    def _option(self, schema: Any, path: str) -> dict[str, Any]:
        """The normal form of a member of anyOf, which must have one type."""
        if not is_object(schema) or not isinstance(schema.get("type"), str):
            raise SchemaError(f"{clipped(path)} must be an object with one type")
        return self.node(schema, path)


def _string(schema: dict[str, Any], path: str) -> dict[str, Any]:
    normal: dict[str, Any] = {"type": "string", **_description(schema, path)}
    if schema.get("pattern") is not None:
        normal["pattern"] = _typed_value(schema, "pattern", str, path)
    if schema.get("format") is not None:
        if schema["format"] not in _STRING_FORMATS:
            raise SchemaError(f"{clipped(path)}/format must be one of {', '.join(_STRING_FORMATS)}")
        normal["format"] = schema["format"]
    if schema.get("enum") is not None:
        values = _typed_value(schema, "enum", list, path)
        if not all(isinstance(value, str) for value in values):
            raise SchemaError(f"{clipped(path)}/enum may hold only strings")
        normal["enum"] = values
    return normal


def _number(schema: dict[str, Any], kind: str, path: str) -> dict[str, Any]:
    normal: dict[str, Any] = {"type": kind, **_description(schema, path)}
    for key in _NUMBER_KEYS:
        value = schema.get(key)
        if value is None:
            continue
        if not _is_number(value, kind):
            raise SchemaError(f"{clipped(path)}/{key} must be of type {kind}, not {clipped(compact(value))}")
        normal[key] = value
    return normal


def _is_number(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return kind == "number" or (isinstance(value, int) and -(2**63) <= value < 2**63)


def _description(schema: dict[str, Any], path: str) -> dict[str, str]:
    if schema.get("description") is None:
        return {}
    return {"description": _typed_value(schema, "description", str, path)}


def _typed_value(schema: dict[str, Any], key: str, kind: type, path: str) -> Any:
    value = schema[key]
    if not isinstance(value, kind):
        raise SchemaError(f"{clipped(path)}/{key} must be a {kind.__name__}, not {clipped(compact(value))}")
    return value


def _check_required(required: Any, names: list[str], path: str) -> None:
    """`required`, where given, must name every property once and nothing else."""
    if required is None:
        return
    if not is_array(required) or not all(isinstance(name, str) for name in required):
        raise SchemaError(f"{clipped(path)}/required must be an array of strings")
    if sorted(required) != sorted(names):
        raise SchemaError(
            f"{clipped(path)}/required must list every property exactly once: {clipped(', '.join(names))}"
        )
