"""What becomes of each JSON Schema keyword: enforced, an annotation, or refused unless its value demands nothing."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["ANNOTATIONS", "ENFORCED", "REFUSED", "SCHEMAS_BY_NAME", "SCHEMA_LISTS", "SINGLE_SCHEMAS", "demands_nothing"]

ENFORCED: Final = frozenset({
    "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength",
    "minProperties", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties", "prefixItems", "properties",
    "required", "type",
})  # fmt: skip

# They constrain nothing: what the specification calls annotations, identifiers and comments.
ANNOTATIONS: Final = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "contentEncoding", "contentMediaType",
    "contentSchema", "default", "definitions", "deprecated", "description", "discriminator", "example", "examples",
    "id", "readOnly", "title", "writeOnly",
})  # fmt: skip

REFUSED: Final = frozenset({
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "disallow",
    "divisibleBy", "else", "extends", "if", "maxContains", "minContains", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
})  # fmt: skip

SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE_SCHEMAS: Final = ("items", "additionalItems", "additionalProperties")


def demands_nothing(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
    """Whether a keyword of `REFUSED` can be left out of `schema`, since every value that passes without it passes."""
    match keyword:
        case "uniqueItems":
            most: Any = schema.get("maxItems")
            return value is False or (isinstance(most, int) and most <= 1)
        case "not":
            return value is False
        case "if":
            return all(_allows_all(schema.get(branch, True)) for branch in ("then", "else"))
        case "then" | "else":
            return "if" not in schema or _allows_all(value)
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "unevaluatedItems" | "unevaluatedProperties" | "propertyNames":
            return _allows_all(value)
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return value == {}
        case _:
            return False


def _allows_all(schema: Any) -> bool:
    return schema is True or schema == {}
