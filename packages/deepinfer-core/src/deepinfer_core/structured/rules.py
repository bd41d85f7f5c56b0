"""A context-free grammar over characters: what GBNF is parsed into.

root ::= "a" [0-9]+ tail      Sequence((Chars a, Repeat(Chars 0-9, 1, None), Reference tail))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Chars", "Choice", "Expression", "Reference", "Repeat", "Rules", "Sequence", "num_fixed", "references_in"]

MAX_CODE_POINT = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of any of these ranges, ends included; ascending and disjoint."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; empty = the empty text."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of them."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`item` from `low` to `high` times; None = without end."""

    item: Expression
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Reference:
    """Whatever the rule of that name derives."""

    name: str


type Expression = Chars | Sequence | Choice | Repeat | Reference
type Rules = dict[str, Expression]  # the first rule to apply is "root"


def children(expression: Expression) -> tuple[Expression, ...]:
    """Direct parts."""
    match expression:
        case Sequence(items):
            return items
        case Choice(options):
            return options
        case Repeat(item):
            return (item,)
        case _:
            return ()


def references_in(expression: Expression) -> Iterator[str]:
    """Names of the rules that `expression` mentions."""
    if isinstance(expression, Reference):
        yield expression.name
    for child in children(expression):
        yield from references_in(child)


def num_fixed(expression: Expression) -> int:
    """Characters that may follow one another without a choice between two, at most; for expressions without references.

    An endless repetition counts as its least: what follows it is a choice.
    """
    match expression:
        case Chars(ranges):
            return int(len(ranges) == 1 and ranges[0][0] == ranges[0][1])
        case Sequence(items):
            return sum(map(num_fixed, items))
        case Repeat(item, low, high):
            return num_fixed(item) * max(low, high or 1)
        case _:
            return max(map(num_fixed, children(expression)), default=0)
