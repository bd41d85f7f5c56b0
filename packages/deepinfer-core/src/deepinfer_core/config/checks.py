"""Range checks for values from outside: each error names the value, the limit and so the way out. No torch.

Numbers of numpy pass as what they are; `bool` is never a number here, since `max_tokens=True` is a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any, cast

from deepinfer_core.errors import DeepInferError

__all__ = ["check_choice", "check_flag", "check_integer", "check_integers", "check_number", "shown"]

_MAX_SHOWN_CHARS = 80


def shown(value: object) -> str:
    """`repr(value)`, cut to a length that fits an error message; what it is where it has no such text."""
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python writes, or an object whose own repr fails
        size = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"<{type(value).__name__}{size}>"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}... ({len(text)} characters)"


def check_integer(name: str, value: Any, low: int, high: int, error: type[DeepInferError]) -> int:
    """`value` as an int of [low, high], else `error`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise error(f"{name} is {shown(value)}; it must be an integer from {low} to {high}")
    return int(value)


def check_number(
    name: str, value: Any, low: float, high: float, error: type[DeepInferError], *, above_low: bool = False
) -> float:
    """`value` as a finite float of [low, high], of (low, high] with `above_low`, else `error`."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:  # an integer beyond every float
        number = math.nan
    if not (low < number <= high if above_low else low <= number <= high):
        wanted = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
        raise error(f"{name} is {shown(value)}; it must be a number {wanted}")
    return number


def check_flag(name: str, value: Any, error: type[DeepInferError]) -> bool:
    """`value` as a bool, else `error`."""
    if not isinstance(value, bool):
        raise error(f"{name} is {shown(value)}; it must be True or False")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str], error: type[DeepInferError]) -> str:
    """`value` if it is one of `choices`, else `error`."""
    if not isinstance(value, str) or value not in choices:
        raise error(f"{name} is {shown(value)}; it must be one of {', '.join(map(repr, choices))}")
    return value


def check_integers(
    name: str, values: Any, low: int, high: int, max_count: int, error: type[DeepInferError]
) -> tuple[int, ...]:
    """A sequence of at most `max_count` integers of [low, high] as a tuple, else `error`."""
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, set, frozenset)):
        raise error(f"{name} is {shown(values)}; it must be a list of integers")
    items = cast("Collection[Any]", values)
    if len(items) > max_count:
        raise error(f"{name} has {len(items)} entries; at most {max_count} are allowed")
    # A prompt of a million tokens is not named one by one.
    if all(type(item) is int for item in items) and (not items or (low <= min(items) and max(items) <= high)):
        return tuple(items)
    return tuple(check_integer(f"{name}[{i}]", item, low, high, error) for i, item in enumerate(items))
