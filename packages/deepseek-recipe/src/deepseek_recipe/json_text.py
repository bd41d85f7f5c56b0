r"""JSON as the protocol reads and writes it.

    loads("-0")              -> -0.0            integers outside i64/u64 become floats, as does minus zero
    loads('"\ud800"')        -> JsonTextError   so do NaN, 1e400, control characters, a BOM, trailing data, depth > 127
    spaced({"a": [1, 1e-7]}) -> {"a": [1, 1e-07]}   as in V4.1 prompts: ", " and ": ", raw non-ASCII, Python's floats
    spaced_v4(...)           -> {"a": [1, 1e-7]}    as in V4 prompts: plain notation from 1e-5, exponent without padding
    compact({"a": [1]})      -> {"a":[1]}       as in bodies, constraints and tool-search results

The fast paths are msgspec and the C encoder of `json`; the numbers that those treat differently are found by a
cheap test on the text and take the slow path.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeGuard, cast

import msgspec

__all__ = [
    "MAX_DEPTH",
    "JsonTextError",
    "TrustedJson",
    "compact",
    "is_array",
    "is_object",
    "json_value",
    "loads",
    "loads_body",
    "spaced",
    "spaced_v4",
]

MAX_DEPTH = 127
"""Containers inside one another that a text may have; the next one is refused."""
MAX_BYTES = 128 * 2**20
"""Length of a text: 600 images of a request take at most 86 MiB in base64."""
MAX_VALUES = 2**23
"""Commas and opening brackets of a text, those inside strings included: a bound on what parsing can allocate."""

_TOO_DEEP = f"more than {MAX_DEPTH} containers inside one another"

_CONTAINERS = frozenset((dict, list))
_I64_MIN, _U64_MAX = -(2**63), 2**64 - 1

_READER_PATH = re.compile(r" - at `\$.*`$")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_BYTE_OFFSET = re.compile(r" \(byte (\d+)\)$")
_MINUS_ZERO = re.compile(rb"-0(?=[ \t\n\r]*(?:[,\]}]|$))")
_MINUS_ZERO_VALUE = re.compile(rb"(?:^|[:\[,])[ \t\n\r]*" + _MINUS_ZERO.pattern)
_LONG_INTEGER = re.compile(rb"[0-9][0-9]{18}")  # a set first is what `re` looks for fast
_HUGE_INTEGER = re.compile(rb"(?<![0-9])[0-9]{309}")  # tried once a number, not once a digit
_SAMPLED_DIGITS = re.compile(rb"[0-9]{6}")
_DECIMAL_WRITTEN = re.compile(r"[0-9](?:\.[0-9]|e|[0-9]{18})")  # perhaps a number that msgspec writes otherwise
_LONG_INTEGER_WRITTEN = re.compile("[0-9][0-9]{18}")
_SURROGATES = re.compile("[\ud800-\udfff]")


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a JSON value is an object."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[Any]]:
    """Whether a JSON value is an array."""
    return isinstance(value, list)


class JsonTextError(ValueError):
    """A text that is not strict JSON; the message names the place and the rule."""


def loads(text: str | bytes) -> Any:
    """The value of a strict JSON text.

    Raises `JsonTextError` for anything that RFC 8259 does not allow, for numbers outside the range of a double, for
    more than `MAX_DEPTH` nested containers and beyond the size limits above. Time and memory are linear in the length.
    """
    data = _utf8(text)
    value = _loads_fast(data)
    return _loads_exact(data) if _LONG_INTEGER.search(data) or _has_minus_zero(data) else value


def loads_body(text: str | bytes) -> Any:
    """As `loads`, at the speed that request bodies need: integers in the range of a double stay integers.

    A reader checks the range of every integer field, and passes free JSON values through `json_value`.
    """
    data = _utf8(text)
    value = _loads_fast(data)
    return _loads_exact(data) if _has_minus_zero(data) or _has_huge_integer(data) else value


def compact(value: Any) -> str:
    """A JSON value without any spaces; non-ASCII characters as they are, floats as in V4 prompts."""
    text = msgspec.json.encode(value).decode()
    return text if _DECIMAL_WRITTEN.search(text) is None else _write(value, _COMPACT, _float_v4)


def spaced(value: Any) -> str:
    """`value` as V4.1 prompts show it: `", "` and `": "`, floats as Python's `repr`."""
    return _write(value, _SPACED, float.__repr__)


def spaced_v4(value: Any) -> str:
    """`value` as V4 prompts show it: as `spaced`, but 0.00001 for 1e-05 and 1e-7 for 1e-07."""
    return _write(value, _SPACED, _float_v4)


class TrustedJson:
    """Wraps a value that a strict reader gave back, so that `json_value` need not look at it again."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def json_value(value: Any, *, depth: int = 0) -> Any:
    """A copy of `value` with tuples as lists, that any JSON reader would give back.

    Raises `ValueError` for NaN, infinities and nesting beyond `MAX_DEPTH`, `OverflowError` for integers outside
    i64/u64, `TypeError` for anything else that JSON cannot say, `UnicodeEncodeError` for lone surrogates.
    """
    if isinstance(value, str):
        return value if value.isascii() else _checked_unicode(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, TrustedJson):
        return value.value
    if isinstance(value, int):
        if not _I64_MIN <= value <= _U64_MAX:
            raise OverflowError(f"the integer {_shortened(value)} is outside the JSON number range [-2**63, 2**64)")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a finite JSON number")
        return value
    if depth >= MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    if is_object(value):
        for key in value:
            _require_str_key(key)
        return {json_value(k): json_value(v, depth=depth + 1) for k, v in value.items()}
    if is_array(value) or isinstance(value, tuple):
        items = cast("Sequence[Any]", value)
        return [json_value(v, depth=depth + 1) for v in items]
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _require_str_key(key: object) -> None:
    if not isinstance(key, str):
        raise TypeError(f"JSON object keys must be str, not {type(key).__name__}")


# ---- reading ---------------------------------------------------------------------------------------------------------


def _utf8(text: str | bytes) -> bytes:
    if isinstance(text, str):
        return text.encode()
    if not text.isascii():
        try:
            str(text, "utf-8")
        except UnicodeDecodeError as error:
            raise JsonTextError(f"not UTF-8 at {_place(text, error.start)}: {error.reason}") from None
    return text


def _loads_fast(data: bytes) -> Any:
    _check_size(data)
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise JsonTextError(_explained(str(error), data)) from None
    except RecursionError:
        raise JsonTextError(_TOO_DEEP) from None
    _check_depth(value, data)
    return value


def _loads_exact(data: bytes) -> Any:
    """The value of a text that `_loads_fast` accepted, with minus zero and long integers as floats."""
    try:
        return json.loads(data, parse_int=_parse_int)
    except OverflowError as error:
        raise JsonTextError(str(error)) from None


def _parse_int(digits: str) -> int | float:
    if digits == "-0":
        return -0.0
    if len(digits) < 19:
        return int(digits)
    number = float(digits)
    if math.isinf(number):
        raise OverflowError(f"a number of {len(digits)} digits is out of range")
    if len(digits) <= 20 and _I64_MIN <= int(digits) <= _U64_MAX:
        return int(digits)
    return number


def _check_size(data: bytes) -> None:
    """Refuses, before anything is built, a text whose value could take gigabytes."""
    if len(data) > MAX_BYTES:
        raise JsonTextError(f"{len(data)} bytes are more than the limit of {MAX_BYTES}; send images by URL")
    if len(data) > MAX_VALUES and sum(data.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:
        raise JsonTextError(f"more than {MAX_VALUES} values")


def _check_depth(value: Any, data: bytes) -> None:
    """Refuses more than `MAX_DEPTH` nested containers, level by level and so without recursion."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    level: list[Any] = [value] if type(value) in _CONTAINERS else []
    for _ in range(MAX_DEPTH):
        members: list[Iterable[Any]] = [one.values() if type(one) is dict else one for one in level]
        level = [child for child in chain.from_iterable(members) if type(child) in _CONTAINERS]
        if not level:
            return
    raise JsonTextError(_TOO_DEEP)


def _has_minus_zero(data: bytes) -> bool:
    """Whether a number of the text may be -0, which the fast reader gives back as 0 (text in strings may match too)."""
    return _MINUS_ZERO.search(data) is not None and _MINUS_ZERO_VALUE.search(data) is not None


def _has_huge_integer(data: bytes) -> bool:
    """Whether a number may have more digits than a double has range, which a look at every 50th byte tells."""
    return _SAMPLED_DIGITS.search(data[::50]) is not None and _HUGE_INTEGER.search(data) is not None


def _explained(message: str, data: bytes) -> str:
    lone = _LONE_SURROGATE.search(data) if message == "Input data was truncated" else None
    if lone is not None:
        return f"a surrogate escape without its other half at {_place(data, lone.start())}"
    message = _READER_PATH.sub("", message)
    found = _BYTE_OFFSET.search(message)
    return message if found is None else f"{message[: found.start()]} at {_place(data, int(found[1]))}"


def _place(data: bytes, offset: int) -> str:
    line = data.count(b"\n", 0, offset) + 1
    column = offset - data.rfind(b"\n", 0, offset)
    return f"line {line} column {column}"


# ---- writing ---------------------------------------------------------------------------------------------------------

_Separators = tuple[str, str]
_SPACED: _Separators = (", ", ": ")
_COMPACT: _Separators = (",", ":")
_ENCODERS: dict[_Separators, Callable[[Any], str]] = {
    separators: json.JSONEncoder(
        ensure_ascii=False, check_circular=False, allow_nan=False, separators=separators
    ).encode
    for separators in (_SPACED, _COMPACT)
}
_quoted = json.JSONEncoder(ensure_ascii=False).encode


def _write(value: Any, separators: _Separators, float_text: Callable[[float], str]) -> str:
    text = _ENCODERS[separators](value)
    if "e-0" in text or _LONG_INTEGER_WRITTEN.search(text):
        return _write_slowly(value, separators, float_text)
    return text


def _write_slowly(value: Any, separators: _Separators, float_text: Callable[[float], str]) -> str:
    if is_object(value):
        comma, colon = separators
        items = (f"{_quoted(k)}{colon}{_write_slowly(v, separators, float_text)}" for k, v in value.items())
        return "{" + comma.join(items) + "}"
    if is_array(value):
        return "[" + separators[0].join(_write_slowly(v, separators, float_text) for v in value) + "]"
    if isinstance(value, float):
        return float_text(value)
    if isinstance(value, int) and not isinstance(value, bool) and not _I64_MIN <= value <= _U64_MAX:
        return float_text(float(value))
    return _quoted(value)


def _float_v4(value: float) -> str:
    """Shortest round-trip digits: plain notation in [1e-5, 1e16), otherwise an exponent without zero padding."""
    text = repr(value)
    mantissa, exponent_mark, exponent = text.partition("e-")
    if not exponent_mark:
        return text
    if int(exponent) > 5:
        return f"{mantissa}e-{int(exponent)}"
    sign = "-" if mantissa.startswith("-") else ""
    return f"{sign}0.0000{mantissa.lstrip('-').replace('.', '')}"


def _checked_unicode(text: str) -> str:
    if _SURROGATES.search(text):
        text.encode()  # raises the UnicodeEncodeError that names the character
    return text


def _shortened(number: int) -> str:
    text = str(number) if number.bit_length() < 10_000 else "of more than 3,000 digits"
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"
