"""Cost model and acceptance meter; the guard over both is tested in test_guard.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.config.scheduler import SpeculationConfig
from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.acceptance import UNKNOWN_SURVIVAL, AcceptanceMeter
from deepinfer_core.scheduling.budget import survivals
from deepinfer_core.scheduling.cost import CostModel, CostTable
from deepinfer_core.scheduling.guard import DraftPolicy, PromptRows
from deepinfer_core.scheduling.speculation import SpeculationPlanner
from tests.core.scheduling.harness import make_engine

TABLE = CostTable((4, 8, 16, 64), (1.0, 2.0, 3.0, 9.0), captured=(4, 8, 16))


def test_costs_are_a_staircase_up_to_the_captured_rows_and_a_line_above() -> None:
    seconds = TABLE.dense(80)
    assert seconds[[1, 4, 5, 8, 9, 16]].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert seconds[17] == pytest.approx(3.0 + 6.0 / 48)
    assert seconds[64] == pytest.approx(9.0)
    assert seconds[80] == pytest.approx(9.0 + 16 * 6.0 / 48)


def test_a_larger_step_never_looks_cheaper() -> None:
    noisy = CostTable((4, 8, 16, 32), (1.0, 3.0, 2.0, 4.0))
    assert (np.diff(noisy.dense(40)) >= 0).all()
    assert noisy.dense(40)[[4, 32]].tolist() == [1.0, 4.0]


def test_a_size_between_two_points_comes_from_both() -> None:
    assert TABLE.neighbours(5) == ((1, 1.0),)  # padded to the next captured size
    assert TABLE.neighbours(64) == ((3, 1.0),)
    assert TABLE.neighbours(1_000) == ((3, 1.0),)
    assert TABLE.neighbours(28) == ((2, 0.75), (3, 0.25))


def model(draft_s: float = 0.5) -> CostModel:
    return CostModel(TABLE, CostTable((1, 64), (draft_s, draft_s)), max_rows=80, max_requests=64)


def test_a_machine_that_got_slower_is_slower_at_every_size() -> None:
    costs = model()
    for _ in range(200):
        costs.observe(8, 0, 4.0)
    assert costs.verify_seconds(0, 81)[8] == pytest.approx(4.0, rel=0.02)
    assert costs.verify_seconds(0, 81)[64] == pytest.approx(18.0, rel=0.3)
    assert costs.draft_seconds(1) == pytest.approx(1.0, rel=0.3)


def test_sizes_that_cost_something_else_than_believed_are_told_apart() -> None:
    costs, rng = model(), np.random.default_rng(0)
    true = {4: 1.0, 8: 3.5, 16: 4.0}
    for i in range(600):
        rows = (4, 8, 16)[i % 3]
        costs.observe(rows, 0, true[rows] * float(np.exp(0.1 * rng.standard_normal())))
    found = costs.verify_seconds(0, 17)
    assert found[8] / found[4] == pytest.approx(3.5, rel=0.1)
    assert found[16] / found[4] == pytest.approx(4.0, rel=0.1)


def test_a_drafter_that_costs_more_than_believed_is_told_from_the_target_by_steps_without_it() -> None:
    costs, rng = model(), np.random.default_rng(0)
    for i in range(400):
        drafts = i % 10 > 0
        costs.observe(8, int(drafts), (2.0 + 1.5 * drafts) * float(np.exp(0.1 * rng.standard_normal())))
    verify, draft = float(costs.verify_seconds(8, 1)[0]), costs.draft_seconds(1)
    assert verify == pytest.approx(2.0, rel=0.1)
    assert draft == pytest.approx(1.5, rel=0.2)


def test_steps_of_long_prompts_do_not_bend_the_costs_of_drafts() -> None:
    """Rows beyond the measured ones cost less than the slope says; a step of them comes before every twelve."""

    def true_s(rows: int) -> float:
        return 15.0 + 0.3 * min(rows, 128) + 0.15 * max(0, rows - 128)

    def draft_s(requests: int) -> float:
        return 3.0 + 15.0 * (requests - 1) / 63

    measured = (1, 2, 4, 8, 16, 32, 64, 128)
    table = CostTable(measured, tuple(true_s(rows) for rows in measured))
    costs = CostModel(table, CostTable((1, 64), (draft_s(1), draft_s(64))), max_rows=1024, max_requests=64)
    for _ in range(20):
        costs.observe(1024, 32, true_s(1024) + draft_s(32))
        for requests in range(32, 8, -2):
            costs.observe(4 * requests, requests, true_s(4 * requests) + draft_s(requests))
    for rows in (64, 128, 1024):
        assert float(costs.verify_seconds(rows, 1)[0]) == pytest.approx(true_s(rows), rel=0.05)
    assert costs.draft_seconds(32) == pytest.approx(draft_s(32), rel=0.1)


def test_one_slow_step_moves_the_model_little() -> None:
    costs = model()
    for i in range(16):
        costs.observe(4, 0, 1000.0 if i == 0 else 1.0)
    assert costs.verify_seconds(4, 1)[0] < 1.3


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("rows", "seconds", "message"),
    [
        ((), (), "0 sizes"),
        ((1, 2), (1.0,), "2 sizes and 1 times"),
        ((2, 1), (1.0, 1.0), "must ascend"),
        ((0, 1), (1.0, 1.0), "must ascend"),
        ((1, 2), (1.0, float("nan")), "must be positive"),
        ((1, 2), (1.0, 0.0), "must be positive"),
    ],
)
def test_a_cost_table_that_makes_no_sense_is_refused(
    rows: tuple[int, ...], seconds: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CostTable(rows, seconds)


def expect(survival: list[float]) -> np.ndarray:
    return np.array(survival, np.float32)[:, None]


def play(meter: AcceptanceMeter, promised: float, true: float, blocks: int, seed: int = 0) -> None:
    """Blocks of drafts that are each accepted with probability `true` and promised with another one."""
    rng, depth = np.random.default_rng(seed), len(meter.verified)
    survival = np.cumprod(np.full((depth, 1), promised, np.float32), axis=0)
    for _ in range(blocks):
        accepted = np.cumprod(rng.random((depth, 8)) < true, axis=0).sum(axis=0)
        meter.observe(np.repeat(survival, 8, axis=1), np.full(8, depth), accepted)


def test_acceptance_is_counted_by_position() -> None:
    meter = AcceptanceMeter(3)
    meter.observe(np.ones((3, 4), np.float32), np.array([3, 3, 1, 0]), np.array([3, 1, 0, 0]))
    assert meter.verified.tolist() == [3, 2, 2]
    assert meter.accepted.tolist() == [2, 1, 1]


@pytest.mark.parametrize(("promised", "true"), [(0.9, 0.4), (0.3, 0.8), (0.6, 0.6)])
def test_a_confidence_head_is_believed_as_far_as_outcomes_bear_it_out(promised: float, true: float) -> None:
    meter = AcceptanceMeter(3)
    play(meter, promised, true, 200)
    found = meter.expected(expect([promised, promised**2, promised**3]))
    assert found[:, 0] == pytest.approx([true, true**2, true**3], abs=0.06)


def test_confidences_that_say_nothing_are_replaced_by_the_mean() -> None:
    meter, rng = AcceptanceMeter(1), np.random.default_rng(0)
    for _ in range(400):
        meter.observe(rng.random((1, 16)).astype(np.float32), np.full(16, 1), (rng.random(16) < 0.5).astype(np.int64))
    assert meter.expected(np.array([[0.1, 0.9, UNKNOWN_SURVIVAL]], np.float32))[0] == pytest.approx([0.5] * 3, abs=0.1)


def test_confidences_that_are_right_are_kept_whatever_was_chosen_by_them() -> None:
    """Only promising drafts are verified, and their outcomes must not raise what is expected of the others."""
    meter, rng = AcceptanceMeter(1), np.random.default_rng(0)
    for _ in range(400):
        survival = rng.random((1, 32)).astype(np.float32)
        verified = (survival[0] > 0.4).astype(np.int64)
        meter.observe(survival, verified, (rng.random(32) < survival[0]).astype(np.int64))
    assert meter.expected(np.array([[0.2, 0.5, 0.9]], np.float32))[0] == pytest.approx([0.2, 0.5, 0.9], abs=0.07)


def test_what_is_expected_falls_with_the_position_and_stays_a_probability() -> None:
    rng = np.random.default_rng(0)
    meter = AcceptanceMeter(4)
    for _ in range(50):
        verified = rng.integers(0, 5, 8)
        meter.observe(rng.random((4, 8)).astype(np.float32), verified, rng.integers(0, 5, 8))
        found = meter.expected(survivals(rng.random((4, 8)).astype(np.float32), np.full(8, 4)))
        assert (np.diff(found, axis=0) <= 0).all()
        assert ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize(("accepted", "collapsed"), [(0, True), (1, False)])
def test_a_drafter_that_belongs_to_other_weights_is_noticed(accepted: int, collapsed: bool) -> None:
    meter = AcceptanceMeter(3)
    for _ in range(50):
        assert not (meter.has_collapsed and meter.verified.sum() < 1_000)
        meter.observe(np.full((3, 16), 0.5, np.float32), np.full(16, 3), np.full(16, accepted))
    assert meter.has_collapsed is collapsed
    assert not AcceptanceMeter(0).has_collapsed


@pytest.mark.parametrize("seed", range(20))
def test_neither_policy_nor_budget_sees_the_drafts_that_it_decides_on(seed: int) -> None:
    """With ratio verification a draft must not vote, through the confidences after it, on its own verification."""
    rng = np.random.default_rng(seed)
    caps = np.full(6, 3)
    stale = survivals(rng.random((3, 6)).astype(np.float32), caps)
    first = rng.random(6).astype(np.float32)
    outcomes: set[tuple[DraftPolicy, bool]] = set()
    for successors in range(8):
        costs = CostModel(
            CostTable((1, 64), (1.0, 2.0 + seed / 4)), CostTable((1,), (0.1,)), max_rows=64, max_requests=8
        )
        planner = SpeculationPlanner(SpeculationConfig(num_drafts=3, verification="ratio"), costs)
        later = np.random.default_rng((seed, successors)).random((2, 6)).astype(np.float32)
        fresh = survivals(np.concatenate((first[None], later)), caps)
        fresh[1:, 1:] = 0.3 * fresh[:1, 1:]  # only request 0 has other successors
        for _ in range(5):
            planner.learn(stale)
        planner.learn(fresh)
        lengths = planner.lengths(fresh, stale, caps, PromptRows(), 18)
        outcomes.add((planner.policy, bool(lengths[0] > 0)))
    assert len(outcomes) == 1


@pytest.mark.bad_input
@pytest.mark.parametrize(("max_rows", "max_requests"), [(63, 8), (64, 7)])
def test_a_cost_model_that_does_not_reach_the_largest_step_is_refused(max_rows: int, max_requests: int) -> None:
    costs = CostModel(TABLE, CostTable((1,), (0.1,)), max_rows=max_rows, max_requests=max_requests)
    with pytest.raises(ConfigError, match="steps may have 64 and 8: measure it that far"):
        make_engine(cost=costs, max_num_batched_tokens=64, max_num_seqs=8)


@pytest.mark.parametrize("reverses", [False, True])
def test_outcomes_are_learned_in_whatever_order_the_device_answers(reverses: bool) -> None:
    engine = make_engine(num_drafts=3, overlap=False)
    for length in (5, 9, 14):
        engine.scheduler.add(list(range(2, 2 + length)), SamplingParams(max_tokens=20, ignore_eos=True), seed=length)
    verified, accepted = np.zeros(3, np.int64), np.zeros(3, np.int64)
    while (plan := engine.scheduler.schedule()) is not None:
        result = engine.device.run(plan)
        for n in range(len(result.slot)):
            verified[: result.num_verified[n]] += 1
            accepted[: result.num_tokens[n] - 1] += 1
        order = np.arange(len(result.slot))[:: -1 if reverses else 1]
        columns = ("slot", "generation", "position", "tokens", "num_tokens", "num_verified", "draft_tokens")
        shuffled = {name: getattr(result, name)[order] for name in (*columns, "confidences")}
        engine.scheduler.commit(plan, replace(result, **shuffled))
    meter = engine.scheduler.speculation.meter
    assert verified[0] > 0
    assert meter.verified.tolist() == verified.tolist()
    assert meter.accepted.tolist() == accepted.tolist()


def test_steps_that_compiled_or_captured_something_teach_no_costs() -> None:
    cost = CostModel(CostTable((1, 64), (1.0, 64.0)), CostTable((1,), (1.0,)), max_rows=64, max_requests=8)
    engine = make_engine(cost=cost)
    engine.scheduler.add([2, 3, 4], SamplingParams(max_tokens=20, ignore_eos=True), seed=1)
    seen: list[int] = []
    observe = engine.scheduler.observe_seconds
    engine.scheduler.observe_seconds = lambda plan, seconds: (seen.append(plan.step), observe(plan, seconds))[1]  # type: ignore[method-assign]
    wait = engine.device.wait
    engine.device.wait = lambda ticket: replace(wait(ticket), is_cold=ticket.result.step % 3 == 0)  # type: ignore[method-assign]
    engine.run()
    assert len(seen) > 5
    assert all(step % 3 for step in seen)
