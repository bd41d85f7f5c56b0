"""`Request`: one turn on its way through the cluster, with the times at which it passed each place.

    arrived ─ store ─► ready ─ queue ─► started ─ prefill ─► first token ─ KV ─► handed over ─ queue ─► decoding ─► end

Times are in seconds of the simulation; not-a-number: it has not happened.
"""

from __future__ import annotations

import math

from deepinfer_core.cluster.traffic import Session

__all__ = ["Request"]

_NOT_YET = math.nan


class Request:
    """A turn of `session`: its tokens, the part of its prompt that was there already, and its times."""

    __slots__ = (
        "arrived_s",
        "decoding_s",
        "finished_s",
        "first_token_s",
        "handed_over_s",
        "hit_tokens",
        "number",
        "output_tokens",
        "prompt_tokens",
        "ready_s",
        "rows",
        "rows_left",
        "session",
        "started_s",
    )

    def __init__(
        self, number: int, session: Session, prompt_tokens: int, output_tokens: int, hit_tokens: int, arrived_s: float
    ) -> None:
        self.number = number
        self.session = session
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.hit_tokens = hit_tokens
        self.rows = self.rows_left = 0  # of prefill: new tokens, and those replayed after a hit
        self.arrived_s = arrived_s
        self.ready_s = self.started_s = self.first_token_s = _NOT_YET
        self.handed_over_s = self.decoding_s = self.finished_s = _NOT_YET

    @property
    def total_tokens(self) -> int:
        """Prompt and answer: what the decode pool holds at its end."""
        return self.prompt_tokens + self.output_tokens

    @property
    def tokens_per_s(self) -> float:
        """Speed that the user sees after the first token, waiting for the decode pool included."""
        return (self.output_tokens - 1) / (self.finished_s - self.first_token_s)
