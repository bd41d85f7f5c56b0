"""`exact_bounds`: bounds of numbers such that what llguidance makes of them is what they say.

    exclusiveMinimum 0, maximum 0.5     minimum 1e-9, maximum 0.5    it would let 0 pass: a whole number on the side of
                                                                     zero of bounds that share their integer part
    maximum 2**63 - 1                   maximum 2**63 - 1024         the next float64, inwards: it computes in them
    exclusiveMaximum 2**60              maximum 2**60 - 128          so that 2**60 - 1 is not 2**60
    minimum 3, exclusiveMinimum true    exclusiveMinimum 3           draft 4

Bounds only move inwards, so an answer within them is within the ones given.
"""

from __future__ import annotations

import math
from typing import Any, Final

from deepinfer_core.config.checks import shown
from deepinfer_core.errors import GrammarError

__all__ = ["MAX_BOUND", "MAX_EXACT", "exact_bounds"]

MAX_BOUND: Final = 2**63 - 1024  # the largest float64 that is a 64-bit integer
MAX_EXACT: Final = 2**53  # numbers with fractions are exact up to here
_MAX_DIGITS: Final = 15  # of a decimal number that float64 keeps

# (bound, its exclusive form, direction in which it points)
_KINDS: Final = (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1))


def exact_bounds(node: dict[str, Any], where: str) -> None:
    """Rewrite the bounds of a schema. Raises GrammarError for those that are no numbers, or beyond 64 bits."""
    types: Any = node.get("type", "number")
    is_whole = types != "number" and "number" not in types
    for inclusive, exclusive, sign in _KINDS:
        if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and inclusive in node:
            node[exclusive] = node.pop(inclusive)
        limits = {
            name: sign * _number(node.pop(name), f"{where}/{name}") for name in (inclusive, exclusive) if name in node
        }
        for name, limit in limits.items():  # seen as upper bounds
            if limit < -MAX_BOUND:
                raise GrammarError(
                    f"structured.json has a bound at {where}/{name} beyond 64 bits, where its value depends on who "
                    "reads it; use strings, or smaller numbers"
                )
            if name == exclusive and _is_kept(limit, is_whole):
                node[exclusive] = sign * limit
                continue
            found = sign * _at_most(limit, name == exclusive, is_whole)
            node[inclusive] = sign * min(sign * found, sign * node.get(inclusive, found))


def _is_kept(limit: float, is_whole: bool) -> bool:
    """Whether llguidance understands an exclusive upper bound."""
    return abs(limit) < MAX_EXACT and (is_whole or limit > 0 or limit != int(limit))


def _at_most(limit: float, is_exclusive: bool, is_whole: bool) -> int | float:
    """An inclusive upper bound that is exact, and says no more than `limit`."""
    if is_exclusive and abs(limit) < MAX_EXACT:
        return _below(limit)
    if is_exclusive:
        limit = math.ceil(limit) - 1
    most = MAX_BOUND if is_whole else MAX_EXACT
    if limit > most:
        return most
    if isinstance(limit, int) and float(limit) > limit:
        return int(math.nextafter(float(limit), -math.inf))
    return limit if abs(limit) <= MAX_EXACT else int(float(limit))


def _number(value: Any, where: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise GrammarError(f"structured.json has {shown(value)} at {where}; it must be a number")
    return value


def _below(limit: float) -> int | float:
    """A number just below `limit`, a whole one up to 0, of as many digits as float64 keeps."""
    num_decimals = min(9, _MAX_DIGITS - len(str(int(-limit))))
    return limit - 1 if num_decimals < 1 else round(limit - 10.0**-num_decimals, num_decimals)
