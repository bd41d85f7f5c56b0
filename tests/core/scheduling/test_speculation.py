"""Cost model, acceptance meter, and the guard over drafting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from deepinfer_core.config.scheduler import SpeculationConfig
from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.budget import survivals
from deepinfer_core.scheduling.cost import CostModel, CostTable
from deepinfer_core.scheduling.speculation import AcceptanceMeter, DraftPolicy, SpeculationPlanner, promised_tokens
from tests.core.scheduling.harness import make_engine

TABLE = CostTable((4, 8, 16, 64), (1.0, 2.0, 3.0, 9.0), captured_rows=16)
DEPTH = 5


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


def test_measured_steps_correct_the_model_near_their_size_only() -> None:
    model = CostModel(TABLE, CostTable((1, 64), (0.5, 0.5)), max_rows=80, max_requests=64)
    for _ in range(160):
        model.observe(8, 2, 0.5 + 2.8)
    costs = model.verify_seconds(0, 81)
    assert costs[8] == pytest.approx(2.8, rel=0.01)
    assert costs[4] == 1.0
    assert costs[64] == 9.0


def test_one_slow_step_moves_the_model_little() -> None:
    model = CostModel(TABLE, CostTable((1,), (0.5,)), max_rows=80, max_requests=64)
    for i in range(16):
        model.observe(4, 0, 1000.0 if i == 0 else 1.0)
    assert model.verify_seconds(4, 1)[0] < 1.3


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


def test_acceptance_is_counted_by_position() -> None:
    meter = AcceptanceMeter(3)
    meter.observe(np.array([3, 3, 1, 0]), np.array([3, 1, 0, 0]), 4.0)
    assert meter.verified.tolist() == [3, 2, 2]
    assert meter.accepted.tolist() == [2, 1, 1]


def test_measured_survival_approaches_the_true_one() -> None:
    meter, rng = AcceptanceMeter(3), np.random.default_rng(0)
    for _ in range(400):
        hits = rng.random((3, 64)) < np.array([0.9, 0.6, 0.3])[:, None]
        meter.observe(np.full(64, 3), np.cumprod(hits, axis=0).sum(axis=0), 1.0)
    assert meter.survival() == pytest.approx([0.9, 0.54, 0.162], abs=0.04)


@pytest.mark.parametrize(("accepted", "collapsed"), [(0, True), (1, False)])
def test_a_drafter_that_belongs_to_other_weights_is_noticed(accepted: int, collapsed: bool) -> None:
    meter = AcceptanceMeter(3)
    for _ in range(50):
        assert not (meter.has_collapsed and meter.verified.sum() < 1_000)
        meter.observe(np.full(16, 3), np.full(16, accepted), 1.0)
    assert meter.has_collapsed is collapsed
    assert not AcceptanceMeter(0).has_collapsed


# ---- the guard, in a simulated world of requests with true acceptances ----------------------------------------------


def play(
    policy: str,
    num_requests: int,
    cost: Callable[[int, int], float],
    acceptance: tuple[float, float],
    *,
    optimism: float = 0.0,
    steps: int = 1000,
    seed: int = 0,
) -> float:
    """Tokens a second of one policy. Confidences are drawn from `acceptance`; the head reports them plus `optimism`."""
    rng = np.random.default_rng(seed)
    sizes = tuple(sorted({1, 2, 4, *range(8, num_requests * (DEPTH + 1) + 8, 8)}))
    table = CostTable(sizes, tuple(cost(size, 0) for size in sizes), captured_rows=sizes[-1])
    draft = CostTable((1, num_requests + 1), (cost(8, 1) - cost(8, 0),) * 2)
    model = CostModel(table, draft, max_rows=sizes[-1], max_requests=num_requests + 1)
    drafts = 0 if policy == "none" else DEPTH
    config = SpeculationConfig(num_drafts=drafts, draft_schedule="scheduled" if policy == "scheduled" else "fixed")
    planner = SpeculationPlanner(config, model if policy == "scheduled" else None)
    stale = fresh = np.ones((drafts, num_requests), np.float32)
    held = np.zeros(num_requests, np.int64)
    tokens, seconds = 0, 0.0
    true = np.zeros((drafts, num_requests))
    for _ in range(steps):
        lengths = planner.lengths(fresh, stale, held, 0, DEPTH * num_requests)
        proposals = planner.proposals
        rows = num_requests + int(lengths.sum())
        took = cost(min(size for size in sizes if size >= rows), int(proposals > 0))
        hits = rng.random(true.shape) < true
        accepted = np.minimum(np.cumprod(hits, axis=0).sum(axis=0), lengths)
        planner.observe(lengths, accepted, promised_tokens(fresh, lengths))
        tokens += num_requests + int(accepted.sum())
        seconds += took
        held = np.full(num_requests, proposals, np.int64)
        if proposals:
            true = rng.uniform(*acceptance, true.shape)
            reported = np.minimum(true + optimism, 1.0).astype(np.float32)
            stale, fresh = fresh, survivals(reported, held)
    return tokens / seconds


def flat_then_steep(rows: int, drafting: int) -> float:
    """Free up to 64 rows, then a row costs what systems.md G.7 derives; drafting costs a tenth of the floor."""
    return 1.0 + max(0.0, (rows - 64) / 400) + 0.1 * drafting


def steep(rows: int, drafting: int) -> float:
    """Every row costs: drafts that fail are a loss."""
    return 0.1 + rows / 16 + 0.1 * drafting


@pytest.mark.parametrize("num_requests", [1, 8, 60])
@pytest.mark.parametrize("cost", [flat_then_steep, steep])
@pytest.mark.parametrize("acceptance", [(0.8, 1.0), (0.3, 0.9), (0.0, 0.2)])
def test_the_schedule_is_never_more_than_three_percent_worse_than_the_better_of_fixed_and_none(
    num_requests: int, cost: Callable[[int, int], float], acceptance: tuple[float, float]
) -> None:
    rates = {policy: play(policy, num_requests, cost, acceptance) for policy in ("none", "fixed", "scheduled")}
    assert rates["scheduled"] >= 0.97 * max(rates["none"], rates["fixed"])


@pytest.mark.parametrize("num_requests", [1, 32])
def test_a_confidence_head_that_promises_too_much_is_not_believed(num_requests: int) -> None:
    kwargs = {"optimism": 0.7, "acceptance": (0.0, 0.2)}
    rates = {p: play(p, num_requests, steep, **kwargs) for p in ("none", "fixed", "scheduled")}  # type: ignore[arg-type]
    assert rates["scheduled"] >= 0.97 * max(rates["none"], rates["fixed"])


def test_the_schedule_beats_both_where_requests_differ() -> None:
    rates = {p: play(p, 60, flat_then_steep, (0.1, 1.0)) for p in ("none", "fixed", "scheduled")}
    assert rates["scheduled"] > 1.02 * max(rates["none"], rates["fixed"])


def test_drafting_that_was_switched_off_is_probed_and_comes_back() -> None:
    model = CostModel(CostTable((1, 64), (1.0, 1.5)), CostTable((1,), (0.2,)), max_rows=64, max_requests=8)
    planner = SpeculationPlanner(SpeculationConfig(num_drafts=2), model)
    survival, held = np.full((2, 4), 0.9, np.float32), np.full(4, 2)

    def steps(count: int, accepted: int) -> None:
        nonlocal held
        for _ in range(count):
            lengths = planner.lengths(survival, survival, held, 0, 8)
            planner.observe(lengths, np.minimum(lengths, accepted), promised_tokens(survival, lengths))
            held = np.full(4, planner.proposals)

    steps(200, accepted=0)
    assert planner.policy is DraftPolicy.NONE
    steps(2_000, accepted=2)
    assert planner.policy is not DraftPolicy.NONE


@pytest.mark.parametrize("seed", range(20))
def test_neither_policy_nor_budget_sees_the_drafts_that_it_decides_on(seed: int) -> None:
    """With ratio verification a draft must not vote, through the confidences after it, on its own verification."""
    rng = np.random.default_rng(seed)
    caps = np.full(6, 3)
    stale = survivals(rng.random((3, 6)).astype(np.float32), caps)
    first = rng.random(6).astype(np.float32)
    outcomes: set[tuple[DraftPolicy, bool]] = set()
    for successors in range(8):
        model = CostModel(
            CostTable((1, 64), (1.0, 2.0 + seed / 4)), CostTable((1,), (0.1,)), max_rows=64, max_requests=8
        )
        planner = SpeculationPlanner(SpeculationConfig(num_drafts=3, verification="ratio"), model)
        later = np.random.default_rng((seed, successors)).random((2, 6)).astype(np.float32)
        fresh = survivals(np.concatenate((first[None], later)), caps)
        fresh[1:, 1:] = 0.3 * fresh[:1, 1:]  # only request 0 has other successors
        lengths = planner.lengths(fresh, stale, caps, 0, 18)
        outcomes.add((planner.policy, bool(lengths[0] > 0)))
    assert len(outcomes) == 1


@pytest.mark.bad_input
@pytest.mark.parametrize(("max_rows", "max_requests"), [(63, 8), (64, 7)])
def test_a_cost_model_that_does_not_reach_the_largest_step_is_refused(max_rows: int, max_requests: int) -> None:
    model = CostModel(TABLE, CostTable((1,), (0.1,)), max_rows=max_rows, max_requests=max_requests)
    with pytest.raises(ConfigError, match="steps may have 64 and 8: measure it that far"):
        make_engine(cost=model, max_num_batched_tokens=64, max_num_seqs=8)
