"""Who asks what, when: sessions of several turns whose context grows.

    session   first prompt | answer |   think   | + new tokens | answer |   think   | ...
    prompt    shared prefix + first              everything so far + new tokens

Sessions of a class arrive as a Poisson process, or in bursts: a process that switches between a quiet and a busy rate
with the same mean. The number of turns is geometric, token counts are log-normal, thinking times exponential. A session
is drawn whole when it arrives, from one generator a class: what comes does not depend on how fast it is served, so two
clusters can be compared on the same traffic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from deepinfer_core.cluster.figures import Mark
from deepinfer_core.cluster.settings import Section, setting

__all__ = ["KINDS", "Session", "TrafficSettings", "Turn", "arriving_sessions", "running_sessions"]

_BUSY_SHARE = 0.1  # of the time is busy
_MAX_TURNS = 10_000
_NOMINAL_TOKENS_PER_S = 200.0  # for the first guess of how many sessions are under way; the warm-up corrects it

_SHAPE: Mark = "assumed"


@dataclass(frozen=True)
class TrafficSettings(Section):
    """One `[[traffic]]` class of a plan. Counts are means."""

    kind: str = setting("chat", 0, 0, _SHAPE, "sets the defaults of the class", choices=("chat", "agent"))
    requests_per_s: float = setting(400.0, 0.0, 1e6, _SHAPE, "turns a second of the whole cluster, before `load`")
    turns: float = setting(6.0, 1.0, 1e4, _SHAPE, "turns of a session")
    shared_tokens: int = setting(1_500, 0, 2**20, _SHAPE, "system prompt and tools, the same in all sessions")
    first_tokens: float = setting(600.0, 1.0, 2**20, _SHAPE, "a session's own first prompt")
    turn_tokens: float = setting(250.0, 1.0, 2**20, _SHAPE, "new input of each later turn")
    output_tokens: float = setting(700.0, 1.0, 2**20, _SHAPE, "answer of a turn, thinking included")
    spread: float = setting(0.8, 0.0, 3.0, _SHAPE, "deviation of the logarithm of token counts")
    think_s: float = setting(40.0, 0.0, 1e7, _SHAPE, "from an answer to the next turn")
    burst: float = setting(1.0, 1.0, 1 / _BUSY_SHARE, _SHAPE, "rate in bursts / mean rate; 1: Poisson")
    burst_s: float = setting(20.0, 1e-3, 1e6, _SHAPE, "mean length of a burst")
    retention_days: float = setting(7.0, 0.0, 3650.0, "published", "chat 7 days, agents 3, in production")


KINDS: dict[str, dict[str, float | int | str]] = {
    "chat": {"kind": "chat"},
    "agent": {
        "kind": "agent",
        "requests_per_s": 1_200.0,
        "turns": 20.0,
        "shared_tokens": 8_000,
        "first_tokens": 6_000.0,
        "turn_tokens": 2_000.0,
        "output_tokens": 400.0,
        "think_s": 4.0,
        "retention_days": 3.0,
    },
}


class Turn(NamedTuple):
    """One request of a session."""

    new_tokens: int
    output_tokens: int
    think_s: float  # before it; 0 for the first
    not_before_s: float = 0.0  # of a recorded trace


class Session:
    """A session of class `kind`: its turns, and how far it is."""

    __slots__ = ("context_tokens", "kind", "next_turn", "number", "traffic", "turns")

    def __init__(self, kind: int, number: int, traffic: TrafficSettings, turns: list[Turn]) -> None:
        self.kind = kind
        self.number = number
        self.traffic = traffic
        self.turns = turns
        self.next_turn = 0
        self.context_tokens = traffic.shared_tokens  # prompts and answers so far


class _Draws:
    """The random numbers of one class."""

    def __init__(self, kind: int, traffic: TrafficSettings, seed: int, purpose: str) -> None:
        self.random = random.Random(f"{seed} {kind} {purpose}")
        self.kind = kind
        self.traffic = traffic

    def tokens(self, mean: float) -> int:
        sigma = self.traffic.spread
        return max(1, round(self.random.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))

    def geometric(self) -> int:
        """1, 2, .. with the mean of `turns`."""
        stop = 1 / self.traffic.turns
        if stop >= 1:
            return 1
        return min(_MAX_TURNS, 1 + int(math.log(1 - self.random.random()) / math.log1p(-stop)))

    def turn(self, is_first: bool) -> Turn:
        t = self.traffic
        think_s = 0.0 if is_first or not t.think_s else self.random.expovariate(1 / t.think_s)
        return Turn(self.tokens(t.first_tokens if is_first else t.turn_tokens), self.tokens(t.output_tokens), think_s)

    def session(self, number: int, num_turns: int) -> Session:
        return Session(self.kind, number, self.traffic, [self.turn(i == 0) for i in range(num_turns)])


def arriving_sessions(kind: int, traffic: TrafficSettings, load: float, seed: int) -> Iterator[tuple[float, Session]]:
    """(seconds, session) of class number `kind`, without end; `load` scales the rate."""
    draws = _Draws(kind, traffic, seed, "arriving")
    rate = traffic.requests_per_s * load / traffic.turns
    times = _bursty(rate, traffic, draws.random) if traffic.burst > 1 else _poisson(rate, draws.random)
    for number, time_s in enumerate(times):
        yield time_s, draws.session(number, draws.geometric())


def running_sessions(kind: int, traffic: TrafficSettings, load: float, seed: int) -> Iterator[tuple[float, Session]]:
    """Sessions that are under way at time 0, with the time of their next turn: about as many as in the long run.

    A session that is met at a random time is long: its turns before and after are both geometric.
    """
    draws = _Draws(kind, traffic, seed, "running")
    turn_s = traffic.think_s + traffic.output_tokens / _NOMINAL_TOKENS_PER_S
    num_running = round(traffic.requests_per_s * load * turn_s)
    for number in range(-num_running, 0):
        done, ahead = draws.geometric() - 1, draws.geometric()
        session = draws.session(number, done + ahead)
        for turn in session.turns[:done]:
            session.context_tokens += turn.new_tokens + turn.output_tokens
        session.next_turn = done
        yield draws.random.random() * turn_s, session


def _poisson(rate: float, source: random.Random) -> Iterator[float]:
    time_s = 0.0
    while rate > 0:
        time_s += source.expovariate(rate)
        yield time_s


def _bursty(rate: float, traffic: TrafficSettings, source: random.Random) -> Iterator[float]:
    """A Poisson process whose rate switches: busy for a tenth of the time, quiet in the rest."""
    quiet = rate * (1 - _BUSY_SHARE * traffic.burst) / (1 - _BUSY_SHARE)
    quiet_s = traffic.burst_s * (1 - _BUSY_SHARE) / _BUSY_SHARE
    time_s, is_busy = 0.0, source.random() < _BUSY_SHARE
    while rate > 0:
        ends_s = time_s + source.expovariate(1 / (traffic.burst_s if is_busy else quiet_s))
        now_rate = rate * traffic.burst if is_busy else quiet
        while now_rate > 0:
            time_s += source.expovariate(now_rate)
            if time_s >= ends_s:  # memoryless: what is drawn beyond the switch is drawn anew
                break
            yield time_s
        time_s, is_busy = ends_s, not is_busy
