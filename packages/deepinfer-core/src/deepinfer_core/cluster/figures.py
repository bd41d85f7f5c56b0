"""A number and how it is known: every input and every printed figure of a cluster plan carries its mark."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Figure", "Mark"]

type Mark = Literal["measured", "published", "fitted", "assumed"]  # fitted: to published points


class Figure(NamedTuple):
    """`value` in the unit that its name says; `source` is where it was read, or why it is assumed."""

    value: float
    mark: Mark
    source: str
