"""What bounds the work on JSON Schemas that clients send: size, and time."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["DEFAULT_TIME_LIMIT_S", "MAX_NODES", "SchemaError", "TimeLimit"]

MAX_NODES = 100_000
"""Subschemas of one schema."""
DEFAULT_TIME_LIMIT_S = 2.0
"""Seconds for all schemas of a request; one of `MAX_NODES` subschemas takes about 0.2 on an idle core."""


class SchemaError(ValueError):
    """A value that is not a usable JSON Schema; the message names the place and the rule."""


class TimeLimit:
    """`seconds` from now on, by a clock that never goes back."""

    __slots__ = ("_clock", "_end_s", "_seconds")

    def __init__(self, seconds: float = DEFAULT_TIME_LIMIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._end_s = clock() + seconds

    def left_s(self) -> float:
        """Seconds until the time is over."""
        return max(self._end_s - self._clock(), 0.0)

    def check(self) -> None:
        """Raises `SchemaError` when the time is over."""
        if self._clock() > self._end_s:
            raise self.error()

    def error(self) -> SchemaError:
        """What is said when the time is over."""
        return SchemaError(
            f"the schemas of this request take longer than the limit of {self._seconds:g} s to check; "
            "send smaller ones, or raise the limit: ConversionOptions(schema_time_limit_s=...), check(time_limit_s=...)"
        )
