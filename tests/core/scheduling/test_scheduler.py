"""What a scheduler must do, seen through an engine on the simulated device."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.runtime.simulated import Ticket
from deepinfer_core.scheduling.plan import RowKind, StepPlan, TokenSource, Writes
from deepinfer_core.scheduling.request import Finished, FinishReason
from deepinfer_core.scheduling.stats import SchedulerStats
from tests.core.scheduling.harness import VOCAB, Engine, alone, expect_short_answers, make_engine

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def submit(
    engine: Engine, prompt: list[int], params: SamplingParams, seed: int, **kwargs: int
) -> tuple[int, list[int]]:
    number = engine.scheduler.add(prompt, params, seed=seed, **kwargs)  # type: ignore[arg-type] # only priority
    return number, alone(prompt, params, seed, engine.scheduler.max_model_len)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_every_request_gets_the_tokens_it_gets_alone(overlap: bool, num_drafts: int) -> None:
    engine = make_engine(overlap=overlap, num_drafts=num_drafts)
    expected = dict(
        submit(engine, prompt_of(length, length), SamplingParams(max_tokens=length % 60 + 1), seed=length)
        for length in (1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 300, 600)
    )
    engine.run()
    assert engine.tokens == expected
    engine.scheduler.check_idle()


def test_a_seed_of_64_bits_reaches_the_device() -> None:
    engine = make_engine()
    number, expected = submit(engine, prompt_of(9), LONG, seed=2**64 - 1)
    engine.run()
    assert engine.tokens[number] == expected


def test_an_answer_ends_at_a_stop_token_inside_a_draft_block_and_no_later_token_counts() -> None:
    engine = make_engine(num_drafts=5)
    free = alone(prompt_of(9), LONG, 3, 2048)
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=[90, free[7], 91])
    number, expected = submit(engine, prompt_of(9), params, seed=3)
    engine.run()
    assert engine.tokens[number] == expected
    end = engine.finished[number]
    assert (end.reason, end.stop_reason, end.output_tokens) == (FinishReason.STOP, free[7], len(expected))


def test_stop_tokens_do_not_count_before_min_tokens() -> None:
    free = alone(prompt_of(9), LONG, 3, 2048)
    engine = make_engine()
    params = SamplingParams(max_tokens=40, min_tokens=20, ignore_eos=True, stop_token_ids=free[:3])
    number, expected = submit(engine, prompt_of(9), params, seed=3)
    engine.run()
    assert engine.tokens[number] == expected
    assert len(expected) > 20 or expected[-1] not in free[:3]


@pytest.mark.parametrize("max_tokens", range(1, 9))
@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_has_exactly_max_tokens_whatever_was_drafted(max_tokens: int, overlap: bool) -> None:
    engine = make_engine(num_drafts=5, overlap=overlap)
    number = engine.scheduler.add(prompt_of(5), SamplingParams(max_tokens=max_tokens, ignore_eos=True), seed=1)
    engine.run()
    end = engine.finished[number]
    assert (len(engine.tokens[number]), end.reason) == (max_tokens, FinishReason.LENGTH)


def test_the_context_limit_ends_an_answer_and_no_row_passes_it() -> None:
    engine = make_engine(max_model_len=150, num_drafts=5)
    number = engine.scheduler.add(prompt_of(100), SamplingParams(max_tokens=None, ignore_eos=True), seed=1)
    highest = 0
    schedule = engine.scheduler.schedule

    def watched_schedule() -> object:
        nonlocal highest
        plan = schedule()
        if plan is not None:
            highest = max(highest, int(plan.row_position.max()))
        return plan

    engine.scheduler.schedule = watched_schedule  # type: ignore[method-assign,assignment]
    engine.run()
    assert len(engine.tokens[number]) == 50
    assert highest == 148  # the row that draws the token at 149


def test_a_step_never_has_more_rows_than_allowed_and_decoding_goes_first() -> None:
    engine = make_engine(max_num_batched_tokens=32, num_drafts=3, overlap=False)
    engine.scheduler.add(prompt_of(4), LONG, seed=0)
    for _ in range(3):
        engine.step()
    engine.scheduler.add(prompt_of(500), LONG, seed=1)
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.row_kind[0] == RowKind.DECODE
    assert plan.num_rows == 32
    assert (plan.row_kind == RowKind.PREFILL).sum() >= 32 - 4


def test_drafts_leave_room_for_waiting_prompts() -> None:
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=24, num_drafts=5, overlap=False)
    for i in range(7):
        engine.scheduler.add(prompt_of(3), SamplingParams(max_tokens=200, ignore_eos=True), seed=i)
    for _ in range(4):
        engine.step()
    engine.scheduler.add(prompt_of(100), LONG, seed=9)
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert (plan.row_kind == RowKind.PREFILL).sum() >= 4


@pytest.mark.parametrize("spare_rows", [1, 2, 3])
def test_a_prompt_moves_on_beside_drafts_however_small_the_step_is(spare_rows: int) -> None:
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=2 + spare_rows, num_drafts=5, overlap=False)
    decoding = [engine.scheduler.add(prompt_of(2), LONG, seed=i) for i in range(2)]
    while len(engine.tokens) < len(decoding):
        engine.step()
    late = engine.scheduler.add(prompt_of(10), SamplingParams(max_tokens=1), seed=9)
    for _ in range(10):
        engine.step()
    assert late in engine.finished


def test_drafts_that_were_not_asked_for_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(num_drafts=3, overlap=True)
    lengths = itertools.cycle([3, 0, 1, 3, 3, 2])  # proposals after each step, while a plan is made ahead

    def proposals(num_requests: int) -> np.ndarray:
        return np.full(num_requests, next(lengths), np.int32)

    monkeypatch.setattr(engine.scheduler.speculation, "proposals", proposals)
    expected = dict(submit(engine, prompt_of(length, length), LONG, seed=length) for length in (1, 20, 130))
    engine.run()
    assert engine.tokens == expected
    assert engine.scheduler.stats.failed_steps == 0
    assert engine.scheduler.stats.accepted_drafts > 0


def test_a_plan_made_ahead_names_tokens_by_their_place_in_the_held_block() -> None:
    engine = make_engine(num_drafts=3, overlap=True)
    engine.scheduler.add(prompt_of(10), LONG, seed=0)
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    assert first is not None
    assert second is not None
    assert first.row_source.tolist() == [TokenSource.GIVEN] * 10
    assert first.segment_num_drafts.tolist() == [3]
    assert second.row_source.tolist() == [TokenSource.HELD] * 4
    assert second.row_token.tolist() == [0, 1, 2, 3]
    assert second.row_position.tolist() == [10, 11, 12, 13]
    assert second.row_sample.all()


def test_positions_of_a_plan_made_ahead_are_the_largest_possible() -> None:
    engine = make_engine(num_drafts=3, overlap=True)
    engine.scheduler.add(prompt_of(10), LONG, seed=0)
    for _ in range(2):
        plan = engine.scheduler.schedule()
        assert plan is not None
    # Step 1 is [anchor 10, drafts 11..13]; if all are accepted, the anchor of step 2 is the token at 14.
    engine.scheduler.commit(*_run_oldest(engine, 0))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.row_position.tolist() == [14, 15, 16, 17]


def _run_oldest(engine: Engine, index: int) -> tuple[object, object]:  # type: ignore[type-arg]
    flight = engine.scheduler._flights[index]
    return flight.plan, engine.device.run(flight.plan)


def test_prompts_are_computed_in_chunks_and_only_the_last_row_draws() -> None:
    engine = make_engine(max_num_batched_tokens=64, overlap=False)
    engine.scheduler.add(prompt_of(150), LONG, seed=0)
    sizes, samples = [], []
    for _ in range(3):
        plan = engine.scheduler.schedule()
        assert plan is not None
        sizes.append(plan.num_rows)
        samples.append(plan.row_sample.nonzero()[0].tolist())
        engine.collect(engine.scheduler.commit(plan, engine.device.run(plan)))
    assert sizes == [64, 64, 22]
    assert samples == [[], [], [21]]


def test_one_prompt_takes_no_more_than_the_chunk_limit_so_others_share_the_step() -> None:
    engine = make_engine(max_num_batched_tokens=64, overlap=False, max_prefill_chunk_tokens=48)
    engine.scheduler.add(prompt_of(400), LONG, seed=0)
    engine.scheduler.add(prompt_of(10), LONG, seed=1)
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert np.diff(plan.segment_start).tolist() == [48, 10]


def test_a_more_urgent_request_goes_first_and_arrival_decides_among_equals() -> None:
    engine = make_engine(max_num_seqs=1, overlap=False)
    order = [
        engine.scheduler.add(prompt_of(3), SamplingParams(max_tokens=2), seed=i, priority=p)
        for i, p in enumerate((0, 1, -1, 0))
    ]
    ended: list[int] = []
    while engine.loop.has_work:
        ended += [end.number for end in engine.step().finished]
    assert ended == [order[2], order[0], order[3], order[1]]


def test_of_two_prompts_in_hand_the_more_urgent_one_gets_its_rows_first() -> None:
    engine = make_engine(max_num_batched_tokens=64, overlap=False, max_prefill_chunk_tokens=40)
    engine.scheduler.add(prompt_of(400), LONG, seed=0)
    engine.step()
    engine.scheduler.add(prompt_of(400, 1), LONG, seed=1, priority=-1)
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.segment_slot.tolist() == [1, 0]
    assert np.diff(plan.segment_start).tolist() == [40, 24]


def test_priority_is_a_head_start_that_runs_out() -> None:
    engine = make_engine(max_num_seqs=1, overlap=False, priority_head_start=10)
    low = engine.scheduler.add(prompt_of(3), SamplingParams(max_tokens=1), seed=0, priority=1)
    others = [engine.scheduler.add(prompt_of(3), SamplingParams(max_tokens=1), seed=i) for i in range(30)]
    ended: list[int] = []
    while engine.loop.has_work:
        ended += [end.number for end in engine.step().finished]
    assert ended.index(low) == 9  # only the nine that arrived within the head start passed it
    assert sorted(ended) == sorted([low, *others])


@pytest.mark.parametrize("way_out", ["the head is aborted", "a more urgent one comes"])
def test_a_head_that_does_not_fit_holds_nobody_back_when_it_is_the_head_no_more(way_out: str) -> None:
    engine = make_engine(num_blocks=10, max_num_batched_tokens=1024)
    running = engine.scheduler.add(prompt_of(700), SamplingParams(max_tokens=300, ignore_eos=True), seed=0)
    large = engine.scheduler.add(prompt_of(600), LONG, seed=1)
    small = engine.scheduler.add(prompt_of(5), SamplingParams(max_tokens=2), seed=2)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.num_waiting == 2
    if way_out == "the head is aborted":
        engine.scheduler.abort(large)
    else:
        small = engine.scheduler.add(prompt_of(5), SamplingParams(max_tokens=2), seed=3, priority=-1)
    for _ in range(5):
        engine.step()
    assert small in engine.finished
    assert running not in engine.finished


def test_requests_beyond_the_slots_wait_and_all_are_served() -> None:
    engine = make_engine(max_num_seqs=3)
    expected = dict(submit(engine, prompt_of(20, i), SamplingParams(max_tokens=9), seed=i) for i in range(20))
    engine.step()
    assert engine.scheduler.num_running == 3
    assert engine.scheduler.num_waiting == 17
    engine.run()
    assert engine.tokens == expected


def test_the_cost_of_a_step_does_not_grow_with_the_queue() -> None:
    def operations(num_waiting: int) -> int:
        engine = make_engine(max_num_seqs=2, overlap=False)
        for i in range(2 + num_waiting):
            engine.scheduler.add(prompt_of(3), SamplingParams(max_tokens=100, ignore_eos=True), seed=i)
        for _ in range(5):
            engine.step()
        return _count_calls(engine.step)

    assert operations(3_000) == operations(3)


def _count_calls(function: object) -> int:
    import sys

    count = 0

    def tracer(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tracer)  # type: ignore[arg-type]
    try:
        function()  # type: ignore[operator]
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("overlap", [False, True])
def test_memory_pressure_preempts_and_recomputes_the_same_tokens(overlap: bool) -> None:
    engine = make_engine(num_blocks=12, max_num_seqs=8, overlap=overlap, max_model_len=700)
    expect_short_answers(engine)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    expected = dict(submit(engine, prompt_of(100, i), params, seed=i) for i in range(6))
    engine.run()
    assert engine.tokens == expected
    assert engine.scheduler.stats.preemptions > 0
    engine.scheduler.check_idle()


def test_the_least_urgent_request_gives_way() -> None:
    engine = make_engine(num_blocks=4, max_num_seqs=2, num_drafts=0, overlap=False, max_model_len=500)
    expect_short_answers(engine)
    first = engine.scheduler.add(prompt_of(128), SamplingParams(max_tokens=None, ignore_eos=True), seed=0)
    second = engine.scheduler.add(prompt_of(128), SamplingParams(max_tokens=None, ignore_eos=True), seed=1)
    engine.run()
    assert engine.finished[first].num_preemptions == 0
    assert engine.finished[second].num_preemptions > 0


@pytest.mark.parametrize("steps_before", range(8))
@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_at_any_time_leaves_the_others_alone(steps_before: int, overlap: bool) -> None:
    engine = make_engine(overlap=overlap, max_num_seqs=3)
    victim = engine.scheduler.add(prompt_of(150, 9), LONG, seed=9)
    expected = dict(submit(engine, prompt_of(40, i), LONG, seed=i) for i in range(4))
    for _ in range(steps_before):
        engine.step()
    assert engine.scheduler.abort(victim)
    assert not engine.scheduler.abort(victim)
    engine.run()
    assert engine.finished[victim].reason is FinishReason.ABORT
    assert engine.finished[victim].output_tokens == len(engine.tokens.get(victim, []))
    assert {n: t for n, t in engine.tokens.items() if n != victim} == expected
    engine.scheduler.check_idle()


def test_an_abort_of_a_waiting_request_is_reported_without_a_step() -> None:
    engine = make_engine(max_num_seqs=1)
    numbers = [engine.scheduler.add(prompt_of(3), LONG, seed=i) for i in range(3)]
    for number in numbers:
        engine.scheduler.abort(number)
    assert [end.number for end in engine.scheduler.take_finished().finished] == numbers
    assert engine.scheduler.schedule() is None
    engine.scheduler.check_idle()


def test_a_request_that_waits_for_blocks_from_outside_runs_when_they_are_there() -> None:
    engine = make_engine()
    number = engine.scheduler.add(prompt_of(9), LONG, seed=1, external=True)
    assert engine.scheduler.schedule() is None
    engine.scheduler.resume(number)
    engine.run()
    assert engine.tokens[number] == alone(prompt_of(9), LONG, 1, 2048)


def test_a_request_that_waits_for_blocks_from_outside_can_be_aborted() -> None:
    engine = make_engine()
    number = engine.scheduler.add(prompt_of(9), LONG, seed=1, external=True)
    assert engine.scheduler.abort(number)
    assert engine.scheduler.num_waiting == 0
    engine.scheduler.check_idle()


def test_logprobs_are_cut_where_the_answer_ends() -> None:
    engine = make_engine(num_drafts=5, overlap=False)
    number = engine.scheduler.add(prompt_of(9), SamplingParams(max_tokens=7, ignore_eos=True, logprobs=0), seed=2)
    seen: list[int] = []
    while engine.loop.has_work:
        outputs = engine.step()
        for n, (request, tokens) in enumerate(outputs):
            assert request == number
            assert [entry.token_id for entry in outputs.logprobs[n]] == tokens
            seen += tokens
    assert len(seen) == 7


def test_prompt_logprobs_run_every_row_through_all_layers_and_come_in_order() -> None:
    engine = make_engine(overlap=False, max_num_batched_tokens=64)
    prompt = prompt_of(150)
    number = engine.scheduler.add(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), seed=2)
    seen: list[int] = []
    while engine.loop.has_work:
        plan = engine.scheduler.schedule()
        assert plan is not None
        assert (plan.segment_decoder_from == 0).all()
        outputs = engine.scheduler.commit(plan, engine.device.run(plan))
        seen += [entry.token_id for entry in outputs.prompt_logprobs.get(number, ())]
    assert seen == prompt[1:]


def test_rows_of_a_prompt_below_the_cut_are_the_same_however_it_is_chunked() -> None:
    cuts = set()
    for rows in (16, 64, 512):
        engine = make_engine(max_num_batched_tokens=rows, max_num_seqs=8)
        engine.scheduler.add(prompt_of(200), LONG, seed=0)
        plan = engine.scheduler.schedule()
        assert plan is not None
        cuts.add(int(plan.segment_decoder_from[0]))
    assert cuts == {200 - 28}


def test_usage_and_times_are_reported_at_the_end() -> None:
    engine = make_engine()
    number = engine.scheduler.add(prompt_of(12), LONG, seed=1)
    engine.run()
    end = engine.finished[number]
    assert (end.prompt_tokens, end.output_tokens, end.hit_tokens) == (12, 40, 0)
    assert 0 <= end.queue_s <= end.first_token_s <= end.total_s
    report = engine.scheduler.stats.as_dict()
    assert report["output_tokens"] == 40
    assert report["finished"] == {"length": 1}


@pytest.mark.parametrize("overlap", [False, True])
def test_the_counters_add_up(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(overlap=overlap)
    stats, meter, launch = engine.scheduler.stats, engine.scheduler.speculation.meter, engine.device.launch
    plans: list[StepPlan] = []
    used: list[int] = []

    def watched(plan: StepPlan) -> Ticket:
        plans.append(plan)
        used.append(engine.scheduler.ledger.num_used)
        return launch(plan)

    monkeypatch.setattr(engine.device, "launch", watched)
    params = SamplingParams(max_tokens=30, stop_token_ids=[5, 6, 7])
    numbers = [engine.scheduler.add(prompt_of(length, length), params, seed=length) for length in range(100, 420, 40)]
    while len(engine.tokens) < 4:
        engine.step()
    engine.scheduler.abort(numbers[1])
    engine.scheduler._life.preempt(engine.scheduler._table.least_urgent())
    engine.run()
    drawn = sum(len(tokens) for tokens in engine.tokens.values())
    assert stats.output_tokens == drawn == sum(end.output_tokens for end in engine.finished.values())
    assert stats.finished.total() == len(engine.finished) == len(numbers)
    assert stats.lookups.total() == len(numbers) + stats.preemptions
    assert (stats.verified_drafts, stats.accepted_drafts) == (meter.verified.sum(), meter.accepted.sum())
    assert 0 < stats.accepted_drafts < stats.verified_drafts
    assert (stats.steps, stats.rows) == (len(plans), sum(plan.num_rows for plan in plans))
    assert stats.prefill_rows == sum(int((plan.row_kind <= RowKind.REPLAY).sum()) for plan in plans)
    assert stats.peak_used_blocks == max(used)


def test_the_mean_time_to_first_token_is_split_into_queue_and_prefill() -> None:
    stats = SchedulerStats()
    for queue_s, first_token_s in ((0.010, 0.030), (0.050, 0.110)):
        stats.request_finished(
            Finished(0, FinishReason.LENGTH, 3, 2, queue_s=queue_s, first_token_s=first_token_s, total_s=0.5)
        )
    report = stats.as_dict()
    means = [report[f"mean_{part}_ms"] for part in ("queue", "prefill", "first_token")]
    assert means == pytest.approx([30.0, 40.0, 70.0])
    assert SchedulerStats().as_dict()["mean_prefill_ms"] is None


def test_replayed_rows_write_windows_only() -> None:
    engine = make_engine(overlap=False, max_num_batched_tokens=512)
    prompt = prompt_of(400)
    engine.scheduler.add(prompt, SamplingParams(max_tokens=1), seed=0)
    engine.run()
    engine.scheduler.add(prompt, SamplingParams(max_tokens=1), seed=0)
    plan = engine.scheduler.schedule()
    assert plan is not None
    replayed = plan.row_kind == RowKind.REPLAY
    assert replayed.any()
    assert (plan.row_position[replayed] < 384).all()
    assert (plan.row_writes[replayed] == Writes.WINDOW).all()
    assert (plan.row_writes[~replayed] == Writes.WINDOW | Writes.GLOBAL).all()


def test_aborted_requests_do_not_pile_up_in_the_queue() -> None:
    engine = make_engine(max_num_seqs=1, overlap=False)
    engine.scheduler.add(prompt_of(3), LONG, seed=0)
    engine.step()
    for i in range(2_000):
        engine.scheduler.abort(engine.scheduler.add(prompt_of(3), LONG, seed=i, priority=5))
    assert len(engine.scheduler._life.queue._heap) <= 65
    engine.run()
    engine.scheduler.check_idle()


def test_a_request_that_waits_for_pinned_blocks_runs_when_they_are_free() -> None:
    engine = make_engine(num_blocks=4, max_num_seqs=2)
    pool = engine.scheduler.ledger.pool
    blocks = pool.allocate(3)
    pool.pin("export", 0, blocks)
    pool.release(blocks)
    number, expected = submit(engine, prompt_of(200), LONG, seed=1)
    for _ in range(3):
        assert engine.scheduler.schedule() is None
    pool.unpin("export", 0)
    engine.run()
    assert engine.tokens[number] == expected
