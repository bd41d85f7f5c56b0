"""Type checks of constructor arguments (a wrong type is a `TypeError` that names it), and values in error texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, cast

__all__ = [
    "clipped",
    "quoted",
    "require_bool",
    "require_bytes",
    "require_instance",
    "require_int_in",
    "require_list",
    "require_number_in",
    "require_str",
    "shown",
]

T = TypeVar("T")
_SHOWN_CHARS = 200


def clipped(text: str) -> str:
    """What an error text shows of a text that others wrote."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…, {len(text)} characters"


def shown(value: object) -> str:
    """What an error text shows of a value that others sent."""
    try:
        return clipped(repr(value))
    except (RecursionError, ValueError):  # nested too deep; an integer of thousands of digits
        return f"a {type(value).__name__} that is too large to show"


def quoted(text: str) -> str:
    """`text` between double quotes, as the reprs show it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _wrong_type(name: str, value: object, wanted: str) -> TypeError:
    return TypeError(f"argument {name!r} must be {wanted}, not {type(value).__name__}")


def require_str(name: str, value: object, *, optional: bool = False) -> None:
    """Refuses anything but text that can be written as UTF-8 (lone surrogates: `UnicodeEncodeError`)."""
    if isinstance(value, str):
        if not value.isascii():
            value.encode()
    elif value is not None or not optional:
        raise _wrong_type(name, value, "a str or None" if optional else "a str")


def require_bool(name: str, value: object, *, optional: bool = False) -> None:
    """Refuses anything but True and False: an integer is more likely a mistake than a flag."""
    if not isinstance(value, bool) and (value is not None or not optional):
        raise _wrong_type(name, value, "a bool or None" if optional else "a bool")


def require_bytes(name: str, value: object) -> bytes:
    """An immutable copy of `value`, if it is a bytes-like object."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise _wrong_type(name, value, "bytes")
    return bytes(cast("bytes", value))


def require_instance(name: str, value: object, kind: type[T]) -> T:
    """`value`, if it is a `kind`."""
    if not isinstance(value, kind):
        raise _wrong_type(name, value, f"a {kind.__name__}")
    return value


def require_int_in(name: str, value: object, low: int, high: int) -> None:
    """Refuses anything but an integer in [low, high]: `OverflowError` outside the range."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(name, value, "an int")
    if not low <= value <= high:
        raise OverflowError(f"argument {name!r} is {shown(value)}; it must be in [{low}, {high}]")


def require_number_in(name: str, value: object, low: float, high: float) -> None:
    """Refuses anything but a number in [low, high]: `OverflowError` outside the range."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong_type(name, value, "a number")
    if not low <= value <= high:  # NaN is in no range
        raise OverflowError(f"argument {name!r} is {value}; it must be in [{low:g}, {high:g}]")


def require_list(name: str, value: Any, kind: type[T]) -> list[T]:
    """A new list of the items of `value`, each of them a `kind`."""
    # A list is known at once: asking for an iterable goes through an abstract class.
    if type(value) is not list and (isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable)):
        raise _wrong_type(name, cast("object", value), f"a list of {kind.__name__}")
    items = list(cast("Iterable[T]", value))
    for index, item in enumerate(items):
        if not isinstance(item, kind):
            raise _wrong_type(f"{name}[{index}]", item, f"a {kind.__name__}")
    return items
