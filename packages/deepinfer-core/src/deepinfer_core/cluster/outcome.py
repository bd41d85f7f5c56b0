"""What came out of a run, scaled up to the whole cluster: rates, times, queues, balance, and what each pool could do.

    wait      first token - arrival = store + queue + prefill        "time to first token"
    speed     tokens after the first / (finish - first token)        what a user sees; hand-over and queue included
    capacity  requests a second that a pool could do at this run's mean rows, context and answer: the smaller decides

Percentiles of times are of 50, 90 and 99 % of the requests; of speeds they are what 50, 90 and 99 % have at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from deepinfer_core.cluster.build import Cluster
from deepinfer_core.cluster.decode_pool import DecodeGroup
from deepinfer_core.cluster.records import Records
from deepinfer_core.cluster.request import Request
from deepinfer_core.errors import CapacityError

__all__ = ["Capacity", "ClassOutcome", "Outcome", "Percentiles", "simulate"]

_KEEPING_UP_S = 2.0  # arrivals of so many seconds may wait at the end


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of 50, 90 and 99 % of the requests."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float], *, at_least: bool = False) -> Percentiles:
        """`at_least`: the value that so many have at least, for quantities of which more is better."""
        shares = (50, 10, 1) if at_least else (50, 90, 99)
        found = np.fromiter(values, np.float64)
        return cls(*map(float, np.percentile(found, shares))) if len(found) else cls(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class ClassOutcome:
    """One class of traffic."""

    kind: str
    requests_per_s: float
    hit_share: float
    first_token_s: Percentiles
    user_tokens_per_s: Percentiles


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests a second that each pool of the whole cluster could do."""

    prefill_requests_per_s: float
    decode_requests_per_s: float
    balanced_prefill_share: float  # of all devices, if the two pools were to saturate together

    @property
    def bottleneck(self) -> str:
        """The pool that saturates first."""
        return "prefill" if self.prefill_requests_per_s < self.decode_requests_per_s else "decode"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rates are of the whole cluster unless they say a device."""

    requests_per_s: float
    input_tokens_per_s: float  # hits included
    computed_tokens_per_s: float  # rows of prefill, replay included
    output_tokens_per_s: float
    computed_tokens_per_s_a_prefill_device: float
    output_tokens_per_s_a_decode_device: float
    hit_share: float  # of input tokens
    first_token_s: Percentiles
    user_tokens_per_s: Percentiles
    prefill_wait_s: Percentiles
    decode_wait_s: Percentiles
    waiting_for_prefill: float  # mean
    waiting_for_decode: float  # mean
    keeps_up: bool
    requests_a_decode_rank: float  # mean while it works
    step_s: float  # mean of decode
    drafts_a_step: float
    tokens_a_step: float
    expert_balance: float  # mean / busiest rank, mean over time
    expert_balance_worst: float  # of the phases between two rearrangements
    rearrangements: float
    request_balance: float  # mean / fullest decode rank
    evicted_store_share: float  # of the blocks that the store can hold
    sessions_too_long: int
    classes: list[ClassOutcome]
    capacity: Capacity


def simulate(cluster: Cluster) -> Outcome:
    """Run the plan once. Raises CapacityError where no request could be finished in the time that is simulated."""
    simulation = cluster.simulation()
    simulation.run()
    records = simulation.records
    started = [request for request in records.measured if not math.isnan(request.first_token_s)]
    if not started or not records.ended:
        raise CapacityError(
            f"no request finished in the {cluster.plan.cluster.seconds:g} s that were simulated; raise cluster.seconds"
            " or the traffic"
        )
    scale = cluster.plan.cluster.scale_down
    seconds = records.end_s - records.begin_s
    waiting = records.places()["prefill queue"] + records.places()["decode queue"]
    totals = _Decode(simulation.decode)
    rate = scale / seconds
    return Outcome(
        requests_per_s=rate * len(records.measured),
        input_tokens_per_s=rate * sum(r.prompt_tokens for r in records.measured),
        computed_tokens_per_s=rate * records.prefill_rows,
        output_tokens_per_s=rate * (totals.tokens + len(started)),
        computed_tokens_per_s_a_prefill_device=rate * records.prefill_rows / cluster.plan.prefill.devices,
        output_tokens_per_s_a_decode_device=rate * (totals.tokens + len(started)) / cluster.plan.decode.devices,
        hit_share=_hit_share(records.measured),
        first_token_s=_first_token_s(started),
        user_tokens_per_s=_user_speed(records.ended),
        prefill_wait_s=Percentiles.of(r.started_s - r.ready_s for r in started),
        decode_wait_s=Percentiles.of(r.decoding_s - r.handed_over_s for r in records.ended if r.output_tokens > 1),
        waiting_for_prefill=records.place_seconds["prefill queue"] / seconds * scale,
        waiting_for_decode=records.place_seconds["decode queue"] / seconds * scale,
        keeps_up=waiting <= _KEEPING_UP_S * len(records.measured) / seconds,
        requests_a_decode_rank=totals.request_s / totals.busy_s / totals.ranks,
        step_s=(totals.busy_s - totals.stalled_s) / totals.steps,
        drafts_a_step=totals.drafts / totals.steps,
        tokens_a_step=totals.tokens / totals.request_steps,
        expert_balance=totals.mean_of_phases(cluster.decode_balance),
        expert_balance_worst=min(cluster.decode_balance),
        rearrangements=totals.steps / cluster.plan.balance.interval_steps / len(simulation.decode)
        if cluster.plan.balance.interval_steps
        else 0.0,
        request_balance=totals.request_s / totals.uneven_s,
        evicted_store_share=simulation.store.evicted_blocks / max(1, simulation.store.capacity_blocks),
        sessions_too_long=records.too_long,
        classes=_classes(records, rate),
        capacity=_capacity(cluster, records),
    )


class _Decode:
    """Totals of all decode groups."""

    def __init__(self, groups: list[DecodeGroup]) -> None:
        totals = [group.totals for group in groups]
        self.ranks = groups[0].num_ranks
        self.busy_s = sum(t.busy_s for t in totals)
        self.stalled_s = sum(t.stalled_s for t in totals)
        self.steps = sum(t.steps for t in totals)
        self.tokens = sum(t.tokens for t in totals)
        self.drafts = sum(t.drafts for t in totals)
        self.request_s = sum(t.request_s for t in totals)
        self.request_steps = sum(t.request_steps for t in totals)
        self.uneven_s = sum(t.uneven_s for t in totals)
        self._phase_s = [sum(seconds) for seconds in zip(*(t.phase_s for t in totals), strict=True)]

    def mean_of_phases(self, values: tuple[float, ...]) -> float:
        return sum(s * value for s, value in zip(self._phase_s, values, strict=True)) / sum(self._phase_s)


def _classes(records: Records, rate: float) -> list[ClassOutcome]:
    outcomes: list[ClassOutcome] = []
    for kind in sorted({r.session.kind for r in records.measured}):
        mine = [r for r in records.measured if r.session.kind == kind]
        outcomes.append(
            ClassOutcome(
                mine[0].session.traffic.kind,
                rate * len(mine),
                _hit_share(mine),
                _first_token_s([r for r in mine if not math.isnan(r.first_token_s)]),
                _user_speed([r for r in records.ended if r.session.kind == kind]),
            )
        )
    return outcomes


def _hit_share(requests: list[Request]) -> float:
    return sum(r.hit_tokens for r in requests) / sum(r.prompt_tokens for r in requests)


def _first_token_s(started: list[Request]) -> Percentiles:
    return Percentiles.of(r.first_token_s - r.arrived_s for r in started)


def _user_speed(ended: list[Request]) -> Percentiles:
    return Percentiles.of((r.tokens_per_s for r in ended if r.output_tokens > 1), at_least=True)


def _capacity(cluster: Cluster, records: Records) -> Capacity:
    """At the means of the requests that arrived; steps full of such requests."""
    plan, num = cluster.plan, len(records.measured)
    rows = sum(r.rows for r in records.measured) / num
    prompt = sum(r.prompt_tokens for r in records.measured) / num
    output = sum(r.output_tokens for r in records.measured) / num
    chunk = plan.prefill.chunk_tokens
    prefill_s = cluster.prefill_seconds(chunk, plan.prefill.keep_tokens * chunk / rows, prompt)
    prefill_rate = chunk / prefill_s / rows  # a device
    table = cluster.table_near(prompt + output / 2, 0)
    most = min(plan.decode.max_requests, int(cluster.kv_tokens / (prompt + output)))
    tokens_per_s = max(m * table.tokens[m] / table.seconds[m] for m in range(1, max(1, most) + 1))
    decode_rate = tokens_per_s / max(output - 1, 1.0)
    return Capacity(
        prefill_requests_per_s=prefill_rate * plan.prefill.devices,
        decode_requests_per_s=decode_rate * plan.decode.devices,
        balanced_prefill_share=decode_rate / (prefill_rate + decode_rate),
    )
