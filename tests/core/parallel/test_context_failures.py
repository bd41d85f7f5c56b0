"""What goes wrong on one rank of a context group: outside the layers it costs no token, within them it is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer_core.runtime.front_end import FrontEnd
from tests.core.harness import FIXTURES
from tests.core.parallel.test_group_failures import REASON, Failing, ask, runner_of, tokens_of
from tests.core.parallel.thread_ranks import ThreadRanks, front_end

MODEL = FIXTURES / "tiny-a"
SETTINGS: dict[str, Any] = {
    "context_parallel_size": 2,
    "expert_parallel_size": 2,
    "max_model_len": 320,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "draft_schedule": "fixed",
}


@pytest.fixture(scope="module")
def group() -> Iterator[tuple[FrontEnd, ThreadRanks]]:
    with front_end(MODEL, **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def expected(group: tuple[FrontEnd, ThreadRanks]) -> list[list[int]]:
    return tokens_of(ask(group[0]))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("part", "n"), [("admit", 0), ("admit", 2), ("sample", 0), ("sample", 5), ("draft_noise", 3)])
def test_a_passing_failure_outside_the_layers_costs_no_token(
    group: tuple[FrontEnd, ThreadRanks],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    part: str,
    n: int,
) -> None:
    engine, ranks = group
    failed = ranks.engines[0].scheduler.stats.failed_steps
    with monkeypatch.context() as patch:
        sampler = runner_of(ranks, rank).sampler
        patch.setattr(sampler, part, Failing(getattr(sampler, part), n))
        outputs = ask(engine)
    assert tokens_of(outputs) == expected
    assert ranks.engines[0].scheduler.stats.failed_steps > failed
    ranks.engines[0].scheduler.check_idle()


@pytest.mark.parametrize("ranks_that_fail", [(0, 1), (1,)])
def test_a_request_that_breaks_every_step_ends_alone_with_the_reason(
    group: tuple[FrontEnd, ThreadRanks],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    ranks_that_fail: tuple[int, ...],
) -> None:
    """On the follower alone, too: it has no scheduler that could find out which request it is."""
    engine, ranks = group
    with monkeypatch.context() as patch:
        for rank in ranks_that_fail:
            sampler = runner_of(ranks, rank).sampler
            patch.setattr(sampler, "admit", refusing(sampler.admit, prompt_tokens=150))
        outputs = ask(engine)
    assert outputs[2].outputs[0].finish_reason == "error"
    assert REASON in (outputs[2].outputs[0].error or "")
    assert [one for i, one in enumerate(tokens_of(outputs)) if i != 2] == [*expected[:2], *expected[3:]]
    assert tokens_of(ask(engine)) == expected  # and the group is whole


def refusing(admit: Any, prompt_tokens: int) -> Any:
    def admit_others(admission: Any) -> None:
        if admission.prompt_tokens == prompt_tokens:
            raise RuntimeError(REASON)
        admit(admission)

    return admit_others


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_failure_within_the_layers_ends_the_group_with_the_reason(rank: int) -> None:
    with front_end(MODEL, **SETTINGS) as (engine, ranks):
        backbone = runner_of(ranks, rank).backbone
        backbone.forward = Failing(backbone.forward, 0)  # type: ignore[method-assign]
        outputs = ask(engine)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 4
        assert all(REASON in (output.outputs[0].error or "") for output in outputs)
