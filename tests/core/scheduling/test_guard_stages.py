"""The guard by itself: what it does while it does not draft, and that it always finds back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from deepinfer_core.scheduling.acceptance import AcceptanceMeter
from deepinfer_core.scheduling.cost import CostModel, CostTable
from deepinfer_core.scheduling.guard import DraftGuard, DraftPolicy, PromptRows
from deepinfer_core.scheduling.plan import FloatArray

BAD, GOOD = (np.array([[s], [s**2], [s**3]], np.float32) for s in (0.2, 1.0))


def make_guard(draft_s: float = 6e-3) -> DraftGuard:
    """Rows cost little. By default drafting takes half of a step: it pays for good drafts only."""
    verify, draft = CostTable((1, 512), (10e-3, 15e-3)), CostTable((1, 64), (draft_s, draft_s + 2e-3))
    return DraftGuard(3, CostModel(verify, draft, max_rows=512, max_requests=64), AcceptanceMeter(3))


def drive(
    guard: DraftGuard, loads: Sequence[int], block: Callable[[int], FloatArray], steps: range, prompts: PromptRows
) -> list[bool]:
    """Run `steps` whose loads come in turn; what is drafted promises `block(step)`. Whether each step drafted."""
    drafted: list[bool] = []
    for step in steps:
        num_requests = loads[step % len(loads)]
        guard.begin_step(num_requests, prompts)
        num_drafting = int(np.count_nonzero(guard.proposals(num_requests)))
        if num_drafting:
            guard.learn(block(step).repeat(num_drafting, axis=1))
        drafted.append(num_drafting > 0)
    return drafted


@pytest.mark.parametrize("loads", [[8], [8, 5], [8, 2, 5]])
def test_a_load_that_changes_with_every_step_is_probed_like_any_other(loads: list[int]) -> None:
    """Requests with grammars run in every other step of the overlapped loop, beside all others."""
    guard = make_guard()
    drive(guard, loads, lambda step: BAD, range(300), PromptRows())
    assert guard.policy is DraftPolicy.NONE
    drive(guard, loads, lambda step: GOOD, range(300, 1_000), PromptRows())
    assert guard.policy is not DraftPolicy.NONE


def test_context_is_kept_for_a_while_after_each_time_of_drafting() -> None:
    guard, start, kept = make_guard(), 0, []
    for _ in range(2):
        drive(guard, [8], lambda step: GOOD, range(start, start + 1_000), PromptRows())
        assert guard.policy is not DraftPolicy.NONE
        while guard.policy is not DraftPolicy.NONE:
            drive(guard, [8], lambda step: BAD, range(start, start + 1), PromptRows())
        kept.append(0)
        while guard.keeps_context:
            drive(guard, [8], lambda step: BAD, range(start, start + 1), PromptRows())
            kept[-1] += 1
        drive(guard, [8], lambda step: BAD, range(start, start + 1_000), PromptRows())
    assert kept[0] == kept[1] > 100


BACKLOG = PromptRows(64, more_wait=True)  # a busy engine: prompts in every step, and more of them wait


def test_a_first_unlucky_draft_beside_prompts_does_not_end_drafting() -> None:
    guard = make_guard(draft_s=2e-3)
    guard.learn(BAD)
    assert sum(drive(guard, [20], lambda step: GOOD, range(100), BACKLOG)) > 80


def test_drafts_that_become_good_are_noticed_where_every_step_has_prompts() -> None:
    """Beside them drafting stops while the policy is to draft: only steps that draft all the same can tell."""
    guard, middling = make_guard(draft_s=2e-3), np.array([[0.4], [0.16], [0.06]], np.float32)
    drafted = drive(guard, [20], lambda step: middling, range(1_000), BACKLOG)
    assert guard.policy is not DraftPolicy.NONE
    assert 0 < sum(drafted[100:]) < 0.06 * 900
    drafted = drive(guard, [20], lambda step: GOOD, range(1_000, 2_000), BACKLOG)
    assert sum(drafted[200:]) > 0.9 * 800
