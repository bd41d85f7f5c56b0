"""Signs of life, and the reasoning that names who holds a collective up. Pure: no clock, no sockets, no torch.

    rank 0   waits in ep  #7      ─►  rank 1 has entered only ep #6: is it the culprit?
    rank 1   waits in cp  #3      ─►  no, it waits itself: rank 2 has entered only cp #2
    rank 2   gives no sign        ─►  yes: stopped, dead or cut off

Each rank publishes a `Sign` a few times a second. `find_culprits` follows the chain from the collective that waits to
the ranks that wait for nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

__all__ = ["Culprit", "Sign", "decode_sign", "encode_sign", "find_culprits"]


class Sign(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank says about itself. `beat` grows by one with every publication."""

    rank: int
    host: str
    process_id: int
    beat: int
    step: int
    state: Literal["running", "failed", "ended"]
    entered: dict[str, int]  # group -> collectives entered so far
    inside: str | None  # group whose collective it waits in; None = it computes
    label: str  # of the last collective it entered
    blames: tuple[int, ...] = ()  # ranks that its failure comes from
    reason: str = ""  # of its failure

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.rank} on {self.host} (process {self.process_id})"


class Culprit(NamedTuple):
    """A rank that others wait for, and what is known about it. `is_certain`: waiting longer would be in vain."""

    rank: int
    is_certain: bool
    text: str


def encode_sign(sign: Sign) -> str:
    """JSON."""
    return msgspec.json.encode(sign).decode()


def decode_sign(data: bytes) -> Sign:
    """Raises msgspec.DecodeError for anything that is no sign."""
    return msgspec.json.decode(data, type=Sign)


def find_culprits(
    signs: Mapping[int, Sign],
    silent_s: Mapping[int, float],
    groups: Mapping[str, tuple[int, ...]],
    group: str,
    number: int,
    asking: int,
) -> tuple[Culprit, ...]:
    """Who keeps collective `number` of `group` from ending, by rank; () if everybody seems to have done their part.
    `asking` is the rank that wants to know, and no culprit to itself.

    silent_s: seconds since the last new sign, of ranks that ought to have given one. groups: ranks of every group.
    """
    found: dict[int, Culprit] = {}
    judged: set[int] = set()

    def judge(rank: int, waiting_in: str) -> None:
        """Find whoever `rank` itself waits for; where there is nobody, it is the culprit."""
        if rank in judged or rank == asking:
            return
        judged.add(rank)
        sign, waits_for_asking = signs[rank], False
        if sign.state == "failed":
            behind, waiting_in = list(sign.blames), sign.inside or ""
        elif sign.state == "running" and rank not in silent_s and sign.inside not in (None, waiting_in):
            waiting_in = sign.inside
            behind = suspects(waiting_in, sign.entered[waiting_in])
            waits_for_asking = asking in behind
        else:
            behind = []
        for other in behind:
            judge(other, waiting_in)
        if not waits_for_asking and not any(other in judged and other != rank for other in behind):
            found[rank] = Culprit(rank, sign.state != "running", _describe(sign, silent_s.get(rank)))

    def suspects(group: str, number: int) -> list[int]:
        return [rank for rank in groups[group] if is_suspect(rank, group, number)]

    def is_suspect(rank: int, group: str, number: int) -> bool:
        sign = signs[rank]
        return sign.state != "running" or rank in silent_s or sign.entered.get(group, 0) < number

    first = suspects(group, number)
    for rank in first:
        judge(rank, group)
    if not found:
        for rank in (rank for rank in first if rank != asking):
            text = f"{signs[rank].name} waits in group {signs[rank].inside}: ranks make their calls in different orders"
            found[rank] = Culprit(rank, False, text)
    return tuple(found[rank] for rank in sorted(found))


def _describe(sign: Sign, silent_s: float | None) -> str:
    if sign.state == "failed":
        return f"{sign.name} failed: {sign.reason}"
    if sign.state == "ended":
        return f"{sign.name} has ended"
    if silent_s is not None:
        return f"{sign.name} has given no sign for {silent_s:.1f} s: it is stopped, dead or cut off"
    last = f"its last collective was {sign.label}" if sign.label else "it has entered no collective yet"
    return f"{sign.name} is late: it is busy in step {sign.step}, {last}"
