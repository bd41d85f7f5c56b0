"""What becomes of `format`: a format of strings is enforced or refused, one of numbers is a pair of bounds.

date, uuid, ipv4, ..          by llguidance; dates and times as the calendar has them, without leap seconds
json-pointer, uuid4, byte ..  by a pattern
password, binary, path        every string has them
int32, uint64, ..             minimum and maximum; float, double, decimal: every number has them
anything else                 of a schema that a string can satisfy: refused; otherwise without effect, and reported
"""

from __future__ import annotations

from typing import Any, Final, cast

from deepinfer_core.config.checks import shown
from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.bounds import MAX_BOUND

__all__ = ["check_format", "spell_out_format"]

_BY_LLGUIDANCE: Final = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
})  # fmt: skip
_FREE: Final = frozenset({"binary", "password", "path"})
_BITS: Final = (8, 16, 32, 64)
_INTEGERS: Final = {
    f"int{bits}": (max(-(2 ** (bits - 1)), -MAX_BOUND), min(2 ** (bits - 1) - 1, MAX_BOUND)) for bits in _BITS
} | {f"uint{bits}": (0, min(2**bits - 1, MAX_BOUND)) for bits in _BITS}
_NUMBERS: Final = frozenset({"float", "double", "decimal"})

# llguidance's dates have a 29th of February in every year; this holds for those that the calendar has.
_CALENDAR: Final = (
    "^(?:[0-9]{4}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|"
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
# A 60th second exists in few minutes of the past, and few readers take it.
_CLOCK: Final = "^[^:]+:[0-9]{2}:[0-5]"
_POINTER: Final = "(?:/(?:[^/~]|~[01])*)*"
_HEX: Final = "[0-9a-fA-F]"
_BASE64: Final = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_PATTERNS: Final = {
    "date": (_CALENDAR,),
    "time": (_CLOCK,),
    "date-time": (_CALENDAR, _CLOCK),
    "json-pointer": (f"^{_POINTER}$",),
    "relative-json-pointer": (f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",),
    "byte": (_BASE64,),
    "base64": (_BASE64,),
    "base64url": ("^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}(?:==)?|[A-Za-z0-9_-]{3}=?)?$",),
} | {
    f"uuid{version}": (f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$",)
    for version in (1, 3, 4, 5, 6, 7, 8)
}
_OF_STRINGS: Final = tuple(sorted(_BY_LLGUIDANCE | _FREE | _PATTERNS.keys()))
_OF_NUMBERS: Final = _NUMBERS | _INTEGERS.keys()


def check_format(node: dict[str, Any], where: str) -> str | None:
    """The name of a format that says nothing known about the values that a schema allows; None if it is enforced.

    Raises GrammarError for a format of strings that cannot be enforced.
    """
    if "format" not in node:
        return None
    name: Any = node["format"]
    allows_strings = _allows_strings(node)
    if not isinstance(name, str) or (allows_strings and name not in _OF_STRINGS):
        raise GrammarError(
            f"structured.json has the format {shown(name)} at {where}, which cannot be enforced for strings; known are "
            f"{', '.join(_OF_STRINGS)}: use one of them or a pattern, or leave it out"
        )
    return None if allows_strings or name in _OF_NUMBERS else name


def spell_out_format(node: dict[str, Any]) -> None:
    """Patterns and bounds beside or in place of the format; llguidance is left with those that it knows."""
    name: Any = node.get("format")
    parts: list[dict[str, Any]] = [{"pattern": pattern} for pattern in _PATTERNS.get(name, ())]
    if name in _INTEGERS:
        low, high = _INTEGERS[name]
        parts.append({"minimum": low, "maximum": high})
    if parts:
        node["allOf"] = [*node.get("allOf", []), *parts]
    if name not in _BY_LLGUIDANCE:
        node.pop("format", None)


def _allows_strings(node: dict[str, Any]) -> bool:
    types: Any = node.get("type", "string")
    return types == "string" or "string" in cast("list[str]", types)
