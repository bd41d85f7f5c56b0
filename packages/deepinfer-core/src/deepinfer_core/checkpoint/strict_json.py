"""JSON objects from files that strangers made: integers only, no name twice, bounded depth."""

from __future__ import annotations

import json
from typing import Any, cast

__all__ = ["parse_strict_object"]


def parse_strict_object(text: bytes) -> dict[str, Any]:
    """The object that `text` is. Raises ValueError, with a short reason, for anything else."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_float=_refuse, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:  # UnicodeDecodeError, too, whose text would repeat the whole input
        raise ValueError(f"it is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return cast("dict[str, Any]", value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"the name {name[:100]!r} occurs twice")
        entries[name] = value
    return entries


def _refuse(text: str) -> Any:
    raise ValueError(f"{text[:40]} is not an integer")
