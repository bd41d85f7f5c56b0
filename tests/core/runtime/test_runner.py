"""The runner alone, with plans by hand: held rows, drafts, given embeddings, prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import CapacityError, EngineError
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.runtime.runner import Runner, RunnerConfig
from deepinfer_core.scheduling.plan import Admission, Content, StepPlan, TokenSource
from tests.core.harness import BLOCKS_A_REQUEST, Chunk, TinyModel, plan_of

BLOCKS = 7 * 4 * BLOCKS_A_REQUEST
GREEDY = SamplingParams(temperature=0)


def runner_of(model: TinyModel, num_drafts: int = 0) -> Runner:
    return Runner(model.config, model.params, REFERENCE, RunnerConfig(4, BLOCKS, 256, num_drafts=num_drafts))


def admission(slot: int, tokens: list[int], params: SamplingParams = GREEDY, seed: int = 1) -> Admission:
    return Admission(slot, 0, slot, np.array(tokens), len(tokens), 0, params, seed)


def first_step(slot: int, tokens: list[int], drafts: int, params: SamplingParams = GREEDY, seed: int = 1) -> StepPlan:
    plan = plan_of([Chunk(slot, 0, tokens)], sample="last")
    wanted = np.array([drafts], np.int32)
    return replace(plan, admissions=(admission(slot, tokens, params, seed),), segment_num_drafts=wanted)


def held_step(slot: int, bound: int, verified: int, drafts: int) -> StepPlan:
    """Anchor and drafts that the device holds; `bound` is the largest position that the anchor can have."""
    plan = plan_of([Chunk(slot, bound, list(range(verified + 1)))])
    source = np.full(verified + 1, TokenSource.HELD, np.uint8)
    return replace(plan, row_source=source, segment_num_drafts=np.array([drafts], np.int32))


@pytest.fixture(scope="module")
def runner(tiny_a: TinyModel) -> Iterator[Runner]:
    made = runner_of(tiny_a, num_drafts=5)
    yield made
    made.close()


@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_held_rows_give_the_greedy_continuation_with_any_number_of_drafts(tiny_a: TinyModel, drafts: int) -> None:
    case = tiny_a.expected["greedy"][1]
    tokens = tiny_a.expected["sequences"][case["sequence"]]
    runner = runner_of(tiny_a, drafts)
    result = runner.run(first_step(2, tokens, drafts))
    output = result.tokens[0, : result.num_tokens[0]].tolist()
    while len(output) < 20:
        assert result.position[0] + result.num_tokens[0] == len(tokens) + len(output)
        # The plan may be made before the result is known: the bound is what all drafts accepted would give.
        result = runner.run(held_step(2, len(tokens) + len(output) + drafts, drafts, drafts))
        output += result.tokens[0, : result.num_tokens[0]].tolist()
    assert output[:20] == case["tokens"][:20]
    runner.close()


def test_launched_steps_run_in_order_and_give_what_run_gives(tiny_a: TinyModel) -> None:
    tokens = tiny_a.expected["sequences"]["len37"]
    plain, launched = runner_of(tiny_a, 3), runner_of(tiny_a, 3)
    plans = [first_step(0, tokens, 3), *(held_step(0, 100, 3, 3) for _ in range(4))]
    expected = [plain.run(plan) for plan in plans]
    tickets = [launched.launch(plan) for plan in plans]
    for want, ticket in zip(expected, tickets, strict=True):
        got = launched.wait(ticket)
        assert np.array_equal(got.tokens, want.tokens)
        assert np.array_equal(got.draft_tokens, want.draft_tokens)
        assert np.array_equal(got.confidences, want.confidences)
    plain.close()
    launched.close()


def test_an_interrupted_step_has_failed_and_the_one_behind_it_does_not_run(
    tiny_a: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tiny_a.expected["sequences"]["len37"]
    runner = runner_of(tiny_a)
    expected = runner.run(first_step(0, tokens, 0))
    first, second = runner.launch(first_step(0, tokens, 0)), runner.launch(held_step(0, 37, 0, 0))

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runner.forward, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.wait(first)
    with pytest.raises(EngineError, match="interrupted"):
        runner.wait(first)
    with pytest.raises(EngineError, match="the step before it failed"):
        runner.wait(second)
    again = runner.wait(runner.launch(first_step(0, tokens, 0)))
    assert np.array_equal(again.tokens, expected.tokens)
    runner.close()


def test_rows_are_counted_per_layer(tiny_a: TinyModel) -> None:
    runner = runner_of(tiny_a)
    runner.run(replace(first_step(0, [3, 4, 5], 0)))
    assert runner.stats.rows_per_layer == [3] * tiny_a.config.num_hidden_layers
    runner.close()


def test_given_embeddings_take_the_place_of_the_tables(tiny_a: TinyModel) -> None:
    """An image row is dead for Engram and uses `bias_vl`; given the table's own row it equals that token as image."""
    tokens, images = [9, 30, 31, 32, 40], [1, 2, 3]
    content = np.array([Content.IMAGE if i in images else Content.TEXT for i in range(5)], np.uint8)
    rows = tiny_a.params.embed[torch.tensor([tokens[i] for i in images])].numpy()

    def logits_of(ids: list[int], given: bool) -> list[int]:
        runner = runner_of(tiny_a)
        base = admission(0, ids, SamplingParams(temperature=0, logprobs=5))
        extra = {"embedded_positions": np.array(images), "embeddings": rows} if given else {}
        plan = replace(
            plan_of([Chunk(0, 0, ids)], sample="last"),
            row_content=content,
            admissions=(base._replace(content=content, **extra),),
        )
        result = runner.run(plan)
        runner.close()
        entry = result.logprobs[0][0]
        return [entry.token_id, *(round(value * 1e6) for _, value in entry.top)]

    placeholder = [9, 8, 8, 8, 40]
    assert logits_of(placeholder, given=True) == logits_of(tokens, given=False)
    assert logits_of(placeholder, given=False) != logits_of(tokens, given=False)


def test_a_request_with_a_prefix_hit_gets_the_history_before_its_first_row(tiny_a: TinyModel) -> None:
    tokens = tiny_a.expected["sequences"]["len130"]
    runner = runner_of(tiny_a)
    runner.run(replace(first_step(0, tokens, 0)))
    ring, first = runner.layout.history, 100
    runner.state.history.zero_()
    late = admission(1, tokens)._replace(first_position=first)
    plan = replace(plan_of([Chunk(1, first, tokens[first:])], sample="last"), admissions=(late,))
    runner.run(plan)
    wanted = tiny_a.params.token_classes[torch.tensor(tokens[first - 3 : first])]
    rows = ring.capacity + torch.arange(first - 3, first) % ring.capacity
    kept = [int(row) for row in rows]
    assert runner.state.history[kept].tolist() == wanted.tolist() or len(tokens) - first > ring.capacity
    runner.close()


@pytest.mark.bad_input
def test_more_drafts_than_the_checkpoint_has_are_refused(tiny_a: TinyModel) -> None:
    with pytest.raises(CapacityError, match="at most 5"):
        runner_of(tiny_a, num_drafts=6)
