"""The engine settings that only the extended dialect honours, checked when a request is converted.

| field | range | where it goes |
| --- | --- | --- |
| max_completion_tokens | [1, bound] | `max_tokens`; both given must agree |
| n | [1, 128] | `n` |
| top_k | [-1, 2^31): -1 and 0 are off | `top_k` |
| min_p | [0, 1] | `min_p` |
| repetition_penalty | (0, 10] | `repetition_penalty` |
| frequency_penalty, presence_penalty | [-2, 2] | the same names |
| seed | [-2^63, 2^64) | `seed` |
| parallel_tool_calls | true, false | `parallel_tool_calls`, and the grammar of tool calls |
"""

from __future__ import annotations

from typing import Any

from deepseek_recipe.checks import shown
from deepseek_recipe.errors import ConversionError

__all__ = ["extended_inference", "merged_max_tokens", "optional_flag"]

_MAX_N = 128


def extended_inference(body: Any) -> dict[str, Any]:
    """Keyword arguments of `InferenceOptions` from the fields of a parsed body that are set."""
    settings: dict[str, Any] = {
        "seed": _integer(body, "seed", -(2**63), 2**64 - 1),
        "top_k": _integer(body, "top_k", -1, 2**31 - 1),
        "n": _integer(body, "n", 1, _MAX_N),
        "min_p": _number(body, "min_p", 0.0, 1.0),
        "repetition_penalty": _number(body, "repetition_penalty", 0.0, 10.0, above=True),
        "frequency_penalty": _number(body, "frequency_penalty", -2.0, 2.0),
        "presence_penalty": _number(body, "presence_penalty", -2.0, 2.0),
        "parallel_tool_calls": optional_flag(body, "parallel_tool_calls"),
    }
    return {name: value for name, value in settings.items() if value is not None}


def merged_max_tokens(body: Any) -> tuple[str, int | None]:
    """The name and the value of `max_completion_tokens` or `max_tokens`; different values of the two are an error."""
    newer = _integer(body, "max_completion_tokens", 1, 2**32 - 1)
    if newer is not None and body.max_tokens is not None and newer != body.max_tokens:
        raise ConversionError(
            f"max_completion_tokens: {newer} disagrees with max_tokens: {body.max_tokens}; give one of them"
        )
    return ("max_tokens", body.max_tokens) if newer is None else ("max_completion_tokens", newer)


def optional_flag(body: Any, name: str) -> bool | None:
    """A field that is true, false or absent."""
    value = getattr(body, name, None)
    if value is not None and not isinstance(value, bool):
        raise ConversionError(f"{name}: expected true or false, got {shown(value)}")
    return value


def _integer(body: Any, name: str, low: int, high: int) -> int | None:
    value = getattr(body, name, None)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConversionError(f"{name}: {shown(value)} is not an integer in [{low}, {high}]")
    return value


def _number(body: Any, name: str, low: float, high: float, *, above: bool = False) -> float | None:
    value = getattr(body, name, None)
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (above and value == low):
        raise ConversionError(f"{name}: {shown(value)} is not a number in {'(' if above else '['}{low}, {high}]")
    return float(value)
