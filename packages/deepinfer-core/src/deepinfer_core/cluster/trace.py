"""A recorded trace as traffic: who asked what when, served by the planned cluster.

    {"time_s": 0.0, "session": "a", "new_tokens": 9000, "output_tokens": 300, "class": "agent"}
    {"time_s": 7.5, "session": "a", "new_tokens": 1200, "output_tokens": 250}

One JSON object a line, in any order. A session's prompt is everything it has seen so far and its new tokens. A turn is
asked at its time, but not before the answer to the one before it. `load` replays the trace so many times faster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer_core.cluster.settings import table_at
from deepinfer_core.cluster.traffic import KINDS, Session, TrafficSettings, Turn
from deepinfer_core.config.checks import check_choice, check_integer, check_number, shown
from deepinfer_core.errors import ConfigError

__all__ = ["Trace", "read_trace"]

_MAX_FILE_BYTES = 1 << 28
_MAX_LINE_BYTES = 1 << 16
_MAX_TOKENS = 1 << 20
_KEYS = ("time_s", "session", "new_tokens", "output_tokens", "class")


class _Asked(NamedTuple):
    time_s: float
    new_tokens: int
    output_tokens: int
    kind: str


@dataclass(frozen=True)
class Trace:
    """The turns of every session, in order of time; sessions in the order in which they are first named."""

    path: str
    turns: tuple[tuple[_Asked, ...], ...]

    @property
    def num_requests(self) -> int:
        """Turns of all sessions."""
        return sum(map(len, self.turns))

    def sessions(self, first_kind: int, load: float, scale_down: int) -> Iterator[tuple[float, Session]]:
        """(seconds, session) of one in `scale_down` sessions; chat is class `first_kind`, agents are the next."""
        for number, asked in enumerate(self.turns[::scale_down]):
            kind = tuple(KINDS).index(asked[0].kind)
            turns = [Turn(one.new_tokens, one.output_tokens, 0.0, one.time_s / load) for one in asked]
            yield turns[0].not_before_s, Session(first_kind + kind, number, _class_of(asked[0].kind), turns)


def read_trace(path: Path) -> Trace:
    """The trace of a file. Raises ConfigError that names the line."""
    sessions: dict[str, list[_Asked]] = {}
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes; a trace has at most {_MAX_FILE_BYTES}")
        with path.open("rb") as file:  # by bounded lines: a device may have no end
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > _MAX_LINE_BYTES:
                    raise ConfigError(f"{path}, line {number} is longer than {_MAX_LINE_BYTES} bytes")
                if text := line.decode().strip():
                    session, asked = _turn(text, f"{path}, line {number}")
                    sessions.setdefault(session, []).append(asked)
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8: {error}") from error
    if not sessions:
        raise ConfigError(f"{path} has no requests; a trace has one JSON object a line with {', '.join(_KEYS)}")
    return Trace(str(path), tuple(tuple(sorted(turns, key=lambda t: t.time_s)) for turns in sessions.values()))


def _turn(line: str, where: str) -> tuple[str, _Asked]:
    try:
        values = table_at(where, json.loads(line))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{where} is no JSON: {error}") from error
    unknown = [key for key in values if key not in _KEYS]
    if unknown:
        raise ConfigError(f"{where} has {', '.join(map(repr, unknown))}; a request has {', '.join(_KEYS)}")
    session: Any = values.get("session")
    if not isinstance(session, (str, int)) or isinstance(session, bool):
        raise ConfigError(f"{where}: session is {shown(session)}; it must be a text or an integer")
    return f"{session!r}", _Asked(
        check_number(f"{where}: time_s", values.get("time_s"), 0, 1e8, ConfigError),
        check_integer(f"{where}: new_tokens", values.get("new_tokens"), 1, _MAX_TOKENS, ConfigError),
        check_integer(f"{where}: output_tokens", values.get("output_tokens"), 1, _MAX_TOKENS, ConfigError),
        check_choice(f"{where}: class", values.get("class", "chat"), tuple(KINDS), ConfigError),
    )


def _class_of(kind: str) -> TrafficSettings:
    """Retention of the class; a trace's prompts have no part that is known to be shared."""
    of_kind = KINDS[kind] | {"requests_per_s": 0.0, "shared_tokens": 0}
    return TrafficSettings(**of_kind)  # pyright: ignore[reportArgumentType] -- by name
