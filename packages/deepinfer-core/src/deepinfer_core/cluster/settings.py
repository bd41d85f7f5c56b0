"""Declared settings: a field with its default, its range, and the mark and source of the default.

field  = setting(64, 1, 4096, "assumed", "why 64")       a dataclass field; its type is the default's
values of a FILE replace defaults; their mark becomes "assumed" unless the FILE's [marks] table says otherwise
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple, Self, cast

from deepinfer_core.cluster.figures import Mark
from deepinfer_core.config.checks import check_choice, check_flag, check_integer, check_number, shown
from deepinfer_core.errors import ConfigError

__all__ = ["Section", "declared", "list_at", "setting", "table_at"]

_KEY = "setting"


class Declared(NamedTuple):
    """What `setting` says about a field."""

    low: float
    high: float
    mark: Mark
    source: str
    choices: tuple[str, ...]


def setting(default: Any, low: float, high: float, mark: Mark, source: str, *, choices: tuple[str, ...] = ()) -> Any:
    """A field of a `Section`. Numbers lie in [low, high]; texts are one of `choices`; flags are free."""
    return field(default=default, metadata={_KEY: Declared(low, high, mark, source, choices)})


def declared(spec: Field[Any]) -> Declared:
    """What was declared for a field of a `Section`."""
    return spec.metadata[_KEY]


def table_at(name: str, value: Any) -> dict[str, Any]:
    """A decoded table of a FILE."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {shown(value)}; it must be a table")
    return cast("dict[str, Any]", value)


def list_at(name: str, value: Any, least: int, most: int, what: str) -> list[Any]:
    """A decoded list of a FILE, or a tuple from Python, of `least` to `most` of `what`."""
    items = list(cast("Sequence[Any]", value)) if isinstance(value, (list, tuple)) else None
    if items is None or not least <= len(items) <= most:
        raise ConfigError(f"{name} is {shown(cast('object', value))}; it must be a list of {least} to {most} {what}")
    return items


@dataclass(frozen=True)
class Section:
    """Base of the sections of a plan. Raises ConfigError for a value of the wrong type or out of range."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            object.__setattr__(self, spec.name, _checked(spec, getattr(self, spec.name)))

    @classmethod
    def from_table(cls, name: str, table: Any) -> Self:
        """The section `name` of a FILE. Raises ConfigError that names unknown keys."""
        known = [spec.name for spec in fields(cls)]
        values = table_at(name, table)
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ConfigError(f"{name} has no setting {', '.join(map(repr, unknown))}; it has {', '.join(known)}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{name}.{error}") from None


def _checked(spec: Field[Any], value: Any) -> Any:
    rule = declared(spec)
    if isinstance(spec.default, bool):
        return check_flag(spec.name, value, ConfigError)
    if isinstance(spec.default, str):
        return check_choice(spec.name, value, rule.choices, ConfigError)
    if isinstance(spec.default, int):
        return check_integer(spec.name, value, int(rule.low), int(rule.high), ConfigError)
    return check_number(spec.name, value, rule.low, rule.high, ConfigError)
