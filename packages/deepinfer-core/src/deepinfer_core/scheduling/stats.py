"""Counters of the scheduler: constant time a step, a request is counted when it ends. `--stats` prints `as_dict`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from deepinfer_core.scheduling.replay import HitOutcome
from deepinfer_core.scheduling.request import Finished

__all__ = ["SchedulerStats"]

_MILLISECONDS = 1e3


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start."""

    steps: int = 0
    rows: int = 0
    prefill_rows: int = 0
    verified_drafts: int = 0
    accepted_drafts: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    peak_used_blocks: int = 0
    lookups: Counter[HitOutcome] = field(default_factory=Counter[HitOutcome])
    hit_tokens: int = 0
    replayed_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter[str])
    queue_s: float = 0.0  # sums over requests that finished with at least one token
    first_token_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0
    timed_requests: int = 0

    def request_finished(self, end: Finished) -> None:
        """Count the end of a request."""
        self.finished[end.reason.value] += 1
        if end.output_tokens:
            self.timed_requests += 1
            self.queue_s += end.queue_s
            self.first_token_s += end.first_token_s
            self.decode_s += end.total_s - end.first_token_s
            self.decode_tokens += end.output_tokens - 1

    def as_dict(self) -> dict[str, object]:
        """Flat names with units; means are None where nothing was counted."""
        requests, verified = self.timed_requests, self.verified_drafts
        return {
            "steps": self.steps,
            "rows": self.rows,
            "prefill_rows": self.prefill_rows,
            "output_tokens": self.output_tokens,
            "verified_drafts": verified,
            "accepted_drafts": self.accepted_drafts,
            "acceptance": self.accepted_drafts / verified if verified else None,
            "preemptions": self.preemptions,
            "failed_steps": self.failed_steps,
            "peak_used_blocks": self.peak_used_blocks,
            "hit_tokens": self.hit_tokens,
            "replayed_tokens": self.replayed_tokens,
            "prefix_lookups": {outcome.name.lower(): self.lookups[outcome] for outcome in HitOutcome},
            "finished": dict(self.finished),
            "mean_queue_ms": _mean_ms(self.queue_s, requests),
            "mean_prefill_ms": _mean_ms(self.first_token_s - self.queue_s, requests),
            "mean_first_token_ms": _mean_ms(self.first_token_s, requests),
            "mean_inter_token_ms": _mean_ms(self.decode_s, self.decode_tokens),
        }


def _mean_ms(total_s: float, count: int) -> float | None:
    return total_s / count * _MILLISECONDS if count else None
