"""Whatever fails costs the one request that it concerns, and nothing leaks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import CapacityError, EngineError
from deepinfer_core.runtime.engine_loop import make_loop
from deepinfer_core.runtime.simulated import Faults, SimulatedError, Ticket
from deepinfer_core.scheduling.plan import StepPlan, StepResult
from deepinfer_core.scheduling.request import ConstrainedRows, FinishReason, Stop
from tests.core.scheduling.harness import VOCAB, Engine, alone, expect_short_answers, make_engine
from tests.core.scheduling.test_scheduler import prompt_of

PARAMS = SamplingParams(max_tokens=25, ignore_eos=True)
LENGTHS = (3, 70, 130, 260)


def submit_all(engine: Engine) -> dict[int, list[int]]:
    return {
        engine.scheduler.add(prompt_of(length, length), PARAMS, seed=length): alone(
            prompt_of(length, length), PARAMS, length, 2048
        )
        for length in LENGTHS
    }


def check(engine: Engine, expected: dict[int, list[int]], failed: set[int]) -> None:
    for number, tokens in expected.items():
        got = engine.tokens.get(number, [])
        end = engine.finished[number]
        if number in failed:
            assert end.reason is FinishReason.ERROR
            assert end.error
            assert got == tokens[: len(got)]
        else:
            assert (end.reason, end.error) == (FinishReason.LENGTH, None)
            assert got == tokens
    engine.scheduler.check_idle()


def count_steps(overlap: bool) -> int:
    engine = make_engine(overlap=overlap)
    submit_all(engine)
    engine.run()
    return engine.device.num_launches


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("call", ["launches", "waits"])
def test_a_passing_failure_of_any_launch_or_wait_costs_no_token(overlap: bool, call: str) -> None:
    for n in range(count_steps(overlap)):
        engine = make_engine(overlap=overlap, faults=Faults(**{call: {n}}))
        expected = submit_all(engine)
        engine.run()
        check(engine, expected, failed=set())
        assert engine.scheduler.stats.failed_steps == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("culprit", range(len(LENGTHS)))
def test_a_request_that_makes_every_step_fail_is_found_and_ends_alone(overlap: bool, culprit: int) -> None:
    engine = make_engine(overlap=overlap, faults=Faults(poisoned_requests={culprit}))
    expected = submit_all(engine)
    engine.run()
    check(engine, expected, failed={culprit})
    assert "poisoned" in (engine.finished[culprit].error or "")


def test_a_device_that_always_fails_ends_every_request_with_its_error() -> None:
    engine = make_engine(faults=Faults(launches=range(10**6)))
    expected = submit_all(engine)
    engine.run(max_steps=100)
    check(engine, expected, failed=set(expected))


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_that_the_device_reports_for_one_request_ends_it_alone(overlap: bool) -> None:
    engine = make_engine(overlap=overlap, faults=Faults(failing_requests={2}))
    expected = submit_all(engine)
    engine.run()
    check(engine, expected, failed={2})


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failure_of_any_block_allocation_costs_one_request(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_at(engine: Engine, n: int) -> list[int]:
        pool = engine.scheduler.ledger.pool
        calls: list[int] = []
        allocate = pool.allocate

        def wrapped(count: int) -> list[int]:
            calls.append(count)
            if len(calls) - 1 == n:
                raise CapacityError("told to fail")
            return allocate(count)

        monkeypatch.setattr(pool, "allocate", wrapped)
        return calls

    counting = make_engine(overlap=overlap)
    calls = failing_at(counting, -1)
    submit_all(counting)
    counting.run()
    for n in range(len(calls)):
        engine = make_engine(overlap=overlap)
        failing_at(engine, n)
        expected = submit_all(engine)
        engine.run()
        failed = {number for number, end in engine.finished.items() if end.reason is FinishReason.ERROR}
        assert len(failed) == 1
        check(engine, expected, failed)
        assert "told to fail" in (engine.finished[failed.pop()].error or "")


def test_a_hit_is_given_back_if_the_other_blocks_cannot_be_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(count: int) -> list[int]:
        raise CapacityError(f"told to fail with {count}")

    engine = make_engine(max_num_batched_tokens=1024)
    for _ in range(2):
        number = engine.scheduler.add(prompt_of(600), PARAMS, seed=1)
        engine.run()
        monkeypatch.setattr(engine.scheduler.ledger.pool, "allocate", refuse)
    assert "told to fail with 1" in (engine.finished[number].error or "")  # four of five blocks are cached
    engine.scheduler.check_idle()


class Recorder:
    """A watcher that stops or raises at the n-th token."""

    def __init__(self, stop_at: int | None = None, raise_at: int | None = None) -> None:
        self.seen: list[int] = []
        self._stop_at, self._raise_at = stop_at, raise_at

    def observe(self, tokens: Sequence[int]) -> Stop | None:
        before = len(self.seen)
        self.seen += tokens
        if self._raise_at is not None and len(self.seen) > self._raise_at:
            raise ValueError("callback broke")
        if self._stop_at is not None and len(self.seen) >= self._stop_at:
            return Stop(self._stop_at - before, "a word")
        return None


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_in_any_callback_costs_one_request(overlap: bool) -> None:
    for n in range(25):
        engine = make_engine(overlap=overlap)
        expected = submit_all(engine)
        number = engine.scheduler.add(prompt_of(9), PARAMS, seed=9, watcher=Recorder(raise_at=n))
        expected[number] = alone(prompt_of(9), PARAMS, 9, 2048)
        engine.run()
        check(engine, expected, failed={number})
        assert "callback broke" in (engine.finished[number].error or "")


@pytest.mark.parametrize("stop_at", [1, 2, 10, 24])
def test_a_watcher_sees_each_token_once_and_ends_the_answer_inside_a_block(stop_at: int) -> None:
    engine = make_engine(num_drafts=5)
    watcher = Recorder(stop_at=stop_at)
    number = engine.scheduler.add(prompt_of(9), PARAMS, seed=9, watcher=watcher)
    engine.run()
    tokens = alone(prompt_of(9), PARAMS, 9, 2048)
    assert engine.tokens[number] == tokens[:stop_at]
    assert watcher.seen == tokens[: len(watcher.seen)]
    end = engine.finished[number]
    assert (end.reason, end.stop_reason, end.output_tokens) == (FinishReason.STOP, "a word", stop_at)


class EvenOnly:
    """A constraint that allows even tokens only, and raises at the n-th question."""

    mask = np.full(-(-VOCAB // 32), 0x55555555, np.uint32)

    def __init__(self, raise_at: int | None = None, forced: Sequence[int] = ()) -> None:
        self.questions = 0
        self._raise_at = raise_at
        self._forced = list(forced)

    def rows(self, drafts: Sequence[int], room: int) -> ConstrainedRows:
        self.questions += 1
        if self._raise_at is not None and self.questions > self._raise_at:
            raise ValueError("grammar broke")
        legal = list(drafts[: next((i for i, token in enumerate(drafts) if token % 2), len(drafts))])
        if self._forced:
            legal = self._forced[:room]
        return ConstrainedRows(legal, [self.mask] * (len(legal) + 1))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_constraint_masks_every_verified_position_and_drafts_do_not_change_the_answer(overlap: bool) -> None:
    answers = set()
    for num_drafts in (0, 3, 5):
        engine = make_engine(overlap=overlap, num_drafts=num_drafts)
        expected = submit_all(engine)
        number = engine.scheduler.add(prompt_of(9), PARAMS, seed=9, constraint=EvenOnly())
        engine.run()
        answers.add(tuple(engine.tokens.pop(number)))
        assert engine.tokens == expected
    (answer,) = answers
    assert len(answer) == 25
    assert all(token % 2 == 0 for token in answer)


def test_forced_tokens_are_verified_like_drafts() -> None:
    free = make_engine(num_drafts=3)
    number = free.scheduler.add(prompt_of(9), PARAMS, seed=9, constraint=EvenOnly())
    free.run()
    forced = make_engine(num_drafts=3)
    other = forced.scheduler.add(prompt_of(9), PARAMS, seed=9, constraint=EvenOnly(forced=[2, 4, 6]))
    forced.run()
    assert forced.tokens[other] == free.tokens[number]
    assert forced.scheduler.stats.verified_drafts > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_in_any_question_to_a_constraint_costs_one_request(overlap: bool) -> None:
    for n in range(12):
        engine = make_engine(overlap=overlap)
        expected = submit_all(engine)
        number = engine.scheduler.add(prompt_of(9), PARAMS, seed=9, constraint=EvenOnly(raise_at=n))
        engine.run(max_steps=500)
        engine.tokens.pop(number, None)
        assert engine.tokens == expected
        assert engine.finished[number].reason is FinishReason.ERROR
        assert "grammar broke" in (engine.finished[number].error or "")
        engine.scheduler.check_idle()


# ---- results that are out of step -----------------------------------------------------------------------------------


def one_step(engine: Engine) -> tuple[object, StepResult]:
    plan = engine.scheduler.schedule()
    assert plan is not None
    return plan, engine.device.run(plan)


def changed(result: StepResult, **fields: object) -> StepResult:
    values = {name: getattr(result, name) for name in StepResult.__slots__}
    return StepResult(**(values | fields))  # type: ignore[arg-type]


def test_a_token_for_another_position_is_refused() -> None:
    engine = make_engine()
    engine.scheduler.add(prompt_of(9), PARAMS, seed=9)
    plan, result = one_step(engine)
    with pytest.raises(EngineError, match="expects the token at position 9 and the device sent the one at 10"):
        engine.scheduler.commit(plan, changed(result, position=result.position + 1))  # type: ignore[arg-type]


def test_a_placeholder_is_never_taken_for_a_token() -> None:
    engine = make_engine()
    engine.scheduler.add(prompt_of(9), PARAMS, seed=9)
    plan, result = one_step(engine)
    with pytest.raises(EngineError, match="placeholder"):
        engine.scheduler.commit(plan, changed(result, tokens=np.full_like(result.tokens, -1)))  # type: ignore[arg-type]


def test_a_request_without_an_answer_ends_with_an_error() -> None:
    engine = make_engine()
    first = engine.scheduler.add(prompt_of(9), PARAMS, seed=9)
    second = engine.scheduler.add(prompt_of(8), PARAMS, seed=8)
    plan, result = one_step(engine)
    half = {name: getattr(result, name)[:1] for name in ("slot", "generation", "position", "tokens", "num_tokens")}
    half |= {name: getattr(result, name)[:1] for name in ("num_verified", "draft_tokens", "confidences")}
    engine.collect(engine.scheduler.commit(plan, changed(result, **half)))  # type: ignore[arg-type]
    engine.run()
    assert engine.tokens[first] == alone(prompt_of(9), PARAMS, 9, 2048)
    assert "returned no token" in (engine.finished[second].error or "")
    engine.scheduler.check_idle()


def test_a_result_for_a_former_tenant_is_dropped() -> None:
    engine = make_engine(max_num_seqs=1)
    first = engine.scheduler.add(prompt_of(9), PARAMS, seed=9)
    plan, result = one_step(engine)
    engine.scheduler.abort(first)
    second = engine.scheduler.add(prompt_of(9), PARAMS, seed=10)
    engine.collect(engine.scheduler.commit(plan, result))  # type: ignore[arg-type]
    engine.run()
    assert first not in engine.tokens
    assert engine.tokens[second] == alone(prompt_of(9), PARAMS, 10, 2048)


def test_prompt_logprobs_of_a_former_tenant_are_dropped() -> None:
    engine = make_engine(max_num_seqs=1)
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    first = engine.scheduler.add(prompt_of(9), params, seed=9)
    plan, result = one_step(engine)
    engine.scheduler.abort(first)
    engine.scheduler.add(prompt_of(9, 1), params, seed=9)
    assert engine.scheduler.schedule() is not None  # the second has the slot before the first one's step is committed
    assert engine.scheduler.commit(plan, result).prompt_logprobs == {}  # type: ignore[arg-type]


def test_a_failed_step_of_a_former_tenant_costs_the_next_one_nothing() -> None:
    engine = make_engine(max_num_seqs=1, num_drafts=0)
    first = engine.scheduler.add(prompt_of(9), SamplingParams(stop_token_ids=list(range(VOCAB))), seed=9)
    plan, result = one_step(engine)
    ahead = engine.scheduler.schedule()  # it is not known yet that the first token was the last
    assert ahead is not None
    engine.collect(engine.scheduler.commit(plan, result))  # type: ignore[arg-type]
    assert first in engine.finished
    second = engine.scheduler.add(prompt_of(8), PARAMS, seed=8)
    plan, result = one_step(engine)
    engine.scheduler.abandon(ahead, "lost")
    engine.collect(engine.scheduler.commit(plan, result))  # type: ignore[arg-type]
    assert len(engine.tokens[second]) == 1  # of the step that was planned before the failure was known
    engine.run()
    assert engine.tokens[second] == alone(prompt_of(8), PARAMS, 8, 2048)


def test_plans_are_committed_in_order() -> None:
    engine = make_engine()
    engine.scheduler.add(prompt_of(9), PARAMS, seed=9)
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    assert first is not None
    assert second is not None
    engine.device.run(first)
    with pytest.raises(EngineError, match="not the oldest plan"):
        engine.scheduler.commit(second, engine.device.run(second))
    with pytest.raises(EngineError, match="2 plans are not committed"):
        engine.scheduler.schedule()


def test_the_device_refuses_a_plan_for_a_tenant_that_it_does_not_have() -> None:
    engine = make_engine()
    engine.scheduler.add(prompt_of(9), PARAMS, seed=9)
    plan = engine.scheduler.schedule()
    assert plan is not None
    plan.segment_generation[0] += 1
    with pytest.raises(EngineError, match="another tenant"):
        engine.device.run(plan)


class LyingDevice:
    """Passes plans on, and shifts the positions of chosen results."""

    def __init__(self, engine: Engine, lies: set[int]) -> None:
        self._device, self._lies, self._calls = engine.device, lies, 0

    def launch(self, plan: StepPlan) -> Ticket:
        return self._device.launch(plan)

    def wait(self, ticket: Ticket) -> StepResult:
        result = self._device.wait(ticket)
        self._calls += 1
        return changed(result, position=result.position + 1) if self._calls - 1 in self._lies else result


@pytest.mark.parametrize("overlap", [False, True])
def test_a_result_that_is_out_of_step_is_like_a_failed_step(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    engine.loop = make_loop(engine.scheduler, LyingDevice(engine, {4}), overlap=overlap)  # type: ignore[assignment]
    expected = submit_all(engine)
    engine.run()
    check(engine, expected, failed=set())
    assert engine.scheduler.stats.failed_steps == 1


def test_a_device_that_is_always_out_of_step_ends_every_request() -> None:
    engine = make_engine()
    engine.loop = make_loop(engine.scheduler, LyingDevice(engine, set(range(10**4))), overlap=True)  # type: ignore[assignment]
    expected = submit_all(engine)
    engine.run(max_steps=100)
    check(engine, expected, failed=set(expected))


class FragileDevice:
    """A step that fails takes those with it that were launched before anybody knew."""

    def __init__(self, engine: Engine, fails_at: int) -> None:
        self._device, self._fails_at, self._waits = engine.device, fails_at, 0
        self._flying: list[Ticket] = []
        self._lost: list[Ticket] = []

    def launch(self, plan: StepPlan) -> Ticket:
        self._flying.append(self._device.launch(plan))
        return self._flying[-1]

    def wait(self, ticket: Ticket) -> StepResult:
        self._flying = [other for other in self._flying if other is not ticket]
        self._waits += 1
        if self._waits - 1 == self._fails_at or any(ticket is lost for lost in self._lost):
            self._lost += self._flying
            raise SimulatedError("lost")
        return self._device.wait(ticket)


def test_a_failure_ends_with_the_steps_that_were_launched_before_it_was_known() -> None:
    engine = make_engine()
    engine.loop = make_loop(engine.scheduler, FragileDevice(engine, 4), overlap=True)  # type: ignore[assignment]
    expected = submit_all(engine)
    engine.run()
    check(engine, expected, failed=set())
    assert engine.scheduler.stats.failed_steps == 2


@pytest.mark.parametrize("failed_wait", range(4))
def test_prompt_logprobs_are_handed_out_once_though_the_prompt_is_computed_again(failed_wait: int) -> None:
    engine = make_engine(overlap=False, faults=Faults(waits={failed_wait}))
    prompt = prompt_of(150)
    number = engine.scheduler.add(prompt, SamplingParams(max_tokens=9, prompt_logprobs=0), seed=2)
    seen: list[int] = []
    while engine.loop.has_work:
        seen += [entry.token_id for entry in engine.step().prompt_logprobs.get(number, ())]
    assert seen == prompt[1:]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("first", [8, 60])
def test_suspects_that_run_alone_get_the_memory_that_they_need(overlap: bool, first: int) -> None:
    engine = make_engine(num_blocks=6, max_num_seqs=6, max_model_len=400, overlap=overlap)
    expect_short_answers(engine)
    launches = engine.device.num_launches
    engine.device.faults = Faults(launches=[launches + first + i for i in range(2)])
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    expected = {
        engine.scheduler.add(prompt_of(100, i), params, seed=i): alone(prompt_of(100, i), params, i, 400)
        for i in range(5)
    }
    engine.run(max_steps=20_000)
    assert engine.tokens == expected
    assert engine.scheduler.stats.failed_steps == 2
    engine.scheduler.check_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_suspect_that_loses_its_slot_runs_alone_again(overlap: bool) -> None:
    engine = make_engine(overlap=overlap, max_num_batched_tokens=64, faults=Faults(launches=[12, 13]))
    expected = submit_all(engine)
    life, taken = engine.scheduler._life, 0
    for _ in range(500):
        alone_now = life.quarantine.alone
        if alone_now is not None and alone_now.slot >= 0 and taken < 3:
            life.preempt(alone_now.slot)
            taken += 1
        if not engine.loop.has_work:
            break
        engine.step()
    assert taken == 3
    check(engine, expected, failed=set())


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_shares_a_step_with_a_suspect(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(overlap=overlap, max_num_batched_tokens=64)
    quarantine, launch = engine.scheduler._life.quarantine, engine.device.launch
    segments: list[int] = []  # of the steps of the suspect

    def watched(plan: StepPlan) -> Ticket:
        if quarantine.alone is not None:
            segments.append(plan.num_segments)
        return launch(plan)

    monkeypatch.setattr(engine.device, "launch", watched)
    for length in (3, 260):  # one decodes and one has a part of its prompt when the suspect comes
        engine.scheduler.add(prompt_of(length, length), PARAMS, seed=length)
    engine.step()
    suspect = engine.scheduler.add(prompt_of(100), PARAMS, seed=7, external=True)
    for _ in range(2):
        quarantine.strike(engine.scheduler._life.requests[suspect])
    engine.run()
    assert segments == [1, 1]  # 64 rows, then 36 and the first token
    assert engine.tokens[suspect] == alone(prompt_of(100), PARAMS, 7, 2048)
