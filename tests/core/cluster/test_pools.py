"""The pools against closed forms of queueing theory and against a simulation of every single step."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections import deque

import pytest

from deepinfer_core.cluster.decode_pool import DecodeGroup
from deepinfer_core.cluster.drafting import DraftTable
from deepinfer_core.cluster.plan_file import ClusterPlan, ClusterSettings
from deepinfer_core.cluster.prefill_pool import PrefillGroup
from deepinfer_core.cluster.prefix_store import PrefixStore, StoreSettings
from deepinfer_core.cluster.request import Request
from deepinfer_core.cluster.simulation import ClusterSimulation
from deepinfer_core.cluster.traffic import Session, TrafficSettings

NO_TIME = 1e-9
RATE, SPREAD = 20.0, 0.8
SECONDS = 650.0


def one_kind(**traffic: float) -> ClusterPlan:
    """Single questions, nothing reused, no transfer."""
    settings = {
        "requests_per_s": RATE, "turns": 1.0, "shared_tokens": 0, "first_tokens": 1_000.0, "output_tokens": 1_000.0,
        "spread": SPREAD, "think_s": 0.0,
    }  # fmt: skip
    plan = ClusterPlan(
        cluster=ClusterSettings(seconds=SECONDS, warmup_seconds=50.0, scale_down=1),
        store=StoreSettings(terabytes=0.0, latency_s=0.0),
        traffic=(TrafficSettings(**settings | traffic),),  # pyright: ignore[reportArgumentType] -- by name
    )
    return dataclasses.replace(plan, transfer=dataclasses.replace(plan.transfer, gigabytes_per_s=1e5, latency_s=0.0))


def simulated(plan: ClusterPlan, prefill: PrefillGroup, decode: DecodeGroup) -> ClusterSimulation:
    simulation = ClusterSimulation(
        plan, [prefill], [decode], PrefixStore(0), max_tokens=1 << 20, kv_bytes_per_token=890
    )
    simulation.run()
    return simulation


def instant_prefill() -> PrefillGroup:
    return PrefillGroup(1, 1 << 30, 0, False, lambda rows, kept, context: NO_TIME)


def decode_group(seconds: list[float], max_requests: int = 500, num_ranks: int = 1) -> DecodeGroup:
    """One token a step; a step of so many seconds, by requests of the fullest rank."""
    table = DraftTable(seconds, [1.0] * len(seconds), [0.0] * len(seconds))
    return DecodeGroup(num_ranks, max_requests, 1 << 40, lambda context, phase: table)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def pollaczek_khinchine(service_s: list[float]) -> float:
    """Mean wait of M/G/1, first come first served, from the service times of those who came in SECONDS."""
    rate = len(service_s) / SECONDS
    return rate * mean([s * s for s in service_s]) / (2 * (1 - rate * mean(service_s)))


# ---- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, SPREAD])
def test_prefill_in_small_chunks_waits_as_pollaczek_and_khinchine_say(spread: float) -> None:
    second = 0.5 / RATE / 1_000  # of a row
    prefill = PrefillGroup(1, 100, 0, False, lambda rows, kept, context: rows * second)
    done = simulated(one_kind(spread=spread), prefill, decode_group([NO_TIME] * 501)).records
    service_s = [r.rows * second for r in done.ended]
    expected = pollaczek_khinchine(service_s) + mean(service_s) + 50 * second  # it ends in the middle of a chunk
    assert mean([r.first_token_s - r.arrived_s for r in done.ended]) == pytest.approx(expected, rel=0.08)


def test_decode_with_steps_as_long_as_the_batch_is_processor_sharing() -> None:
    """M/G/1-PS: E[T] = E[S] / (1 - load), whatever the distribution of the work."""
    load = 0.7
    token_s = load / RATE / 1_000
    decode = decode_group([max(m, 1) * token_s for m in range(501)])
    done = simulated(one_kind(), instant_prefill(), decode).records
    measured = mean([r.finished_s - r.decoding_s for r in done.ended if r.output_tokens > 1])
    assert measured == pytest.approx(load / RATE / (1 - load), rel=0.08)


def test_decode_with_steps_of_one_length_serves_everybody_at_once() -> None:
    """M/G/infinity: the mean number is rate times mean time."""
    decode = decode_group([2e-3] * 501)
    simulation = simulated(one_kind(), instant_prefill(), decode)
    records = simulation.records
    number = records.place_seconds["decode"] / (records.end_s - records.begin_s)
    assert number == pytest.approx(RATE * 1_000 * 2e-3, rel=0.03)
    assert records.place_seconds["decode queue"] == 0


def test_one_place_in_the_decode_pool_is_a_queue_with_one_server() -> None:
    """M/G/1, first come first served: the Pollaczek-Khinchine wait before decoding."""
    token_s = 0.5 / RATE / 1_000
    decode = decode_group([token_s] * 2, max_requests=1)
    done = simulated(one_kind(), instant_prefill(), decode).records
    expected = pollaczek_khinchine([(r.output_tokens - 1) * token_s for r in done.ended])
    waits = [r.decoding_s - r.handed_over_s for r in done.ended if r.output_tokens > 1]
    assert mean(waits) == pytest.approx(expected, rel=0.1)


# ---- every step ------------------------------------------------------------------------------------------------------


def request(number: int, prompt: int, output: int) -> Request:
    session = Session(0, number, TrafficSettings(), [])
    asked = Request(number, session, prompt, output, 0, 0.0)
    asked.rows = asked.rows_left = prompt
    return asked


def test_jumping_from_change_to_change_ends_where_single_steps_end() -> None:
    """Many requests on four ranks, against a loop over the steps; they differ by the step that is cut short."""
    rng = random.Random(1)
    seconds = [0.01 + 0.001 * m for m in range(65)]
    table = DraftTable(seconds, [2.0] * 65, [0.0] * 65)
    arrivals = [(rng.uniform(0, 20), rng.randint(2, 2_000)) for _ in range(150)]
    group = DecodeGroup(4, 64, 1 << 40, lambda context, phase: table)
    jumped: dict[int, float] = {}
    ranks: dict[int, int] = {}
    events = deque(sorted((time_s, number) for number, (time_s, _) in enumerate(arrivals)))
    while events or len(group):
        if events and events[0][0] <= group.next_leave_s:
            time_s, number = events.popleft()
            rank = group.rank_with_room(10)
            assert rank is not None
            ranks[number] = rank
            group.join(request(number, 10, arrivals[number][1]), rank, time_s)
        else:
            left = group.leave(group.next_leave_s)
            jumped[left.number] = left.finished_s
    stepped = step_by_step(arrivals, ranks, seconds)
    longest_step = max(seconds)
    for number, (time_s, output) in enumerate(arrivals):
        steps = math.ceil((output - 1) / 2)
        tolerance = 2 * longest_step + 0.01 * steps * longest_step  # others end up to a step later, too
        assert jumped[number] == pytest.approx(stepped[number], abs=tolerance), (time_s, output)


def step_by_step(arrivals: list[tuple[float, int]], ranks: dict[int, int], seconds: list[float]) -> dict[int, float]:
    waiting = sorted((time_s, number, output - 1) for number, (time_s, output) in enumerate(arrivals))
    heapq.heapify(waiting)
    left: dict[int, float] = {}
    ended: dict[int, float] = {}
    now_s = 0.0
    while waiting or left:
        if not left:
            now_s = max(now_s, waiting[0][0])
        while waiting and waiting[0][0] <= now_s:
            _, number, tokens = heapq.heappop(waiting)
            left[number] = tokens
        counts = [sum(ranks[number] == rank for number in left) for rank in range(4)]
        now_s += seconds[max(counts)]
        for number in list(left):
            left[number] -= 2.0
            if left[number] <= 0:
                del left[number]
                ended[number] = now_s
    return ended


# ---- prefill steps ---------------------------------------------------------------------------------------------------


def test_a_long_prompt_takes_several_steps_and_short_ones_fill_the_other_ranks() -> None:
    group = PrefillGroup(2, 100, 20, False, lambda rows, kept, context: rows + 1_000 * kept)
    queue = deque([request(0, 250, 5), request(1, 30, 5), request(2, 40, 5), request(3, 60, 5)])
    first = group.next_step(queue, 0.0)
    assert first is not None
    assert (first.rows, [r.number for r in first.finished], len(queue)) == (200, [1, 2], 0)
    assert first.seconds == 100 + 1_000 * 40
    assert group.carried_requests == 2
    second = group.next_step(queue, 0.0)
    assert second is not None
    assert (second.rows, [r.number for r in second.finished]) == (130, [3])
    third = group.next_step(queue, 0.0)
    assert third is not None
    assert (third.rows, [r.number for r in third.finished], third.seconds) == (50, [0], 50 + 1_000 * 20)
    assert group.next_step(queue, 0.0) is None


def test_balanced_context_spreads_a_prompt_over_the_ranks() -> None:
    group = PrefillGroup(4, 100, 20, True, lambda rows, kept, context: rows)
    step = group.next_step(deque([request(0, 90, 5)]), 0.0)
    assert step is not None
    assert step.seconds == 23


def test_rows_see_the_context_before_them() -> None:
    seen: list[float] = []

    def seconds(rows: float, kept: float, context: float) -> float:
        seen.append(context)
        return rows

    group = PrefillGroup(1, 100, 20, False, seconds)
    asked = request(0, 1_150, 5)
    asked.rows = asked.rows_left = 150  # the first 1,000 tokens were a hit
    queue = deque([asked])
    group.next_step(queue, 0.0)
    group.next_step(queue, 0.0)
    assert seen == [1_050, 1_125]


# ---- decode room -----------------------------------------------------------------------------------------------------


def test_a_request_joins_the_rank_with_the_fewest_that_has_room_for_its_tokens() -> None:
    table = DraftTable([1.0] * 4, [1.0] * 4, [0.0] * 4)
    group = DecodeGroup(2, 3, 1_000, lambda context, phase: table)
    for number, (prompt, rank) in enumerate([(300, 0), (700, 1), (100, 0), (100, 1)]):
        assert group.rank_with_room(prompt + 10) == rank
        group.join(request(number, prompt, 10), rank, 0.0)
    assert group.rank_with_room(300) == 0  # both have two; rank 1 has 180 tokens left, rank 0 has 580
    assert group.rank_with_room(600) is None
    group.join(request(9, 10, 10), 0, 0.0)
    assert group.rank_with_room(100) == 1
    assert group.fullest_rank == 3


def test_moving_experts_takes_its_time_and_the_balance_follows_the_interval() -> None:
    phases: list[int] = []

    def table(context: float, phase: int) -> DraftTable:
        phases.append(phase)
        return DraftTable([1.0] * 3, [1.0] * 3, [0.0] * 3)

    group = DecodeGroup(1, 2, 1 << 40, table, interval_steps=80, move_seconds=7.0)
    group.join(request(0, 1_000, 401), 0, 0.0)
    for time_s in range(1, 400):  # short ones that come and go let the group look at its steps
        if group.next_leave_s <= time_s:
            group.leave(group.next_leave_s)
        if len(group) < 2:
            group.join(request(time_s, 1_000, 2), 0, float(time_s))
    assert set(phases) == set(range(8))
    assert group.totals.stalled_s == pytest.approx(7.0 * 4)
