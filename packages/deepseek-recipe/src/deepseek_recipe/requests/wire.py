"""Reading of request bodies: strict JSON, then shape and types by msgspec structs.

The structs of `wire_chat`, `wire_responses` and `wire_messages` are the tables of what each API reads. Fields that they
do not name are ignored at every level. A failure is a `ValueError` whose text starts with "invalid JSON request:" or
"invalid request body:" and goes on with the path of the field, the rule and the value.
"""

from __future__ import annotations

import re
import struct
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from deepseek_recipe.checks import clipped
from deepseek_recipe.json_text import JsonTextError, json_value, loads_body

__all__ = ["U8", "U32", "U64", "EffortWord", "TextPart", "as_f32", "parse_body", "parse_value"]

U8 = Annotated[int, msgspec.Meta(ge=0, le=2**8 - 1)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgspec has no bound beyond int64: the structs check the upper one
EffortWord = Literal["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"]

_Body = TypeVar("_Body")
_AT_PATH = re.compile(r" - at `\$(.*)`$")
_FOUND_TYPE = re.compile(r", got `[^`]+`$")
_MISSING_FIELD = re.compile("missing required field `(.*)`")
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


class TextPart(msgspec.Struct, tag="text", tag_field="type"):
    """A part of a content list that is text."""

    text: str


def parse_body(body: bytes | str | dict[str, Any], shape: type[_Body]) -> _Body:
    """The body as a `shape`; a dict is taken as the JSON object that it would be written as.

    Raises: ValueError (bad JSON or shape), TypeError and OverflowError (a dict that is not JSON), UnicodeEncodeError
    (lone surrogates in a str or dict).
    """
    if isinstance(body, (bytes, str)):
        try:
            value = loads_body(body)
        except JsonTextError as error:
            raise ValueError(f"invalid JSON request: {error}") from None
    else:
        value = json_value(body)
    return parse_value(value, shape, "")


def parse_value(value: Any, shape: type[_Body], path: str) -> _Body:
    """The JSON value found at `path` of a body as a `shape`; ValueError names the path of what does not fit."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        own = error.__cause__  # a rule of a struct itself, which names its field and value
        text = str(own) if isinstance(own, ValueError) else _explained(str(error), value, shape, path)
        raise ValueError(f"invalid request body: {text}") from None


def as_f32(value: float) -> float:
    """The nearest single-precision number, which is what the protocol keeps of a number."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _explained(message: str, whole: Any, shape: Any, path: str) -> str:
    """The place, the rule and the value of a failure that msgspec reports."""
    from deepseek_recipe.requests.wire_choices import choices_at  # not needed as long as bodies are valid

    found = _AT_PATH.search(message)
    inner = found[1] if found else ""
    rule = clipped(message[: found.start()] if found else message)
    place = clipped((path + inner).lstrip(".")) or "the body"
    steps = [name or int(index) for name, index in _PATH_STEP.findall(inner)]
    value = whole
    try:
        for step in steps:
            value = value[step]
    except (KeyError, IndexError, TypeError):
        return f"{place}: {rule}"
    rule = _FOUND_TYPE.sub("", rule)  # the value itself says more
    missing = _MISSING_FIELD.search(rule)
    words = ", ".join(choices_at(shape, [*steps, missing[1]] if missing else steps, whole))
    if missing is not None:
        return f"{place}: {rule}{words and f' (one of {words})'}, in {_shown(value)}"
    return f"{place}: {_shown(value)} is not one of {words}" if words else f"{place}: {rule}, not {_shown(value)}"


def _shown(value: Any) -> str:
    return clipped(msgspec.json.encode(value).decode())
