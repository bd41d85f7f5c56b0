"""Constraints in the scheduler: the tokens of a constrained request don't depend on what happens around it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deepinfer_core.config.sampling import SamplingParams, StructuredOutput
from deepinfer_core.scheduling.request import ConstrainedRows, FinishReason
from deepinfer_core.structured import GrammarCompiler, GrammarConstraint
from tests.core.scheduling.harness import EOS, VOCAB, Engine, expect_short_answers, make_engine

_FORMS: list[dict[str, Any] | None] = [
    {"json": {"type": "array", "items": {"enum": ["red", "green", 3]}, "minItems": 2, "maxItems": 4}},
    {"regex": "[a-f]{200,280}[0-9]"},
    {"choice": ["yes", "no"]},
    None,
    {"grammar": 'root ::= "(" root ")" | "x" root | "y"'},
    {"regex": "[ab]{150,250}", "until": 7},
    {"json": {"type": "object", "properties": {"long_name_of_a_key": {"type": "boolean"}},
              "required": ["long_name_of_a_key"], "additionalProperties": False}, "after": (5,)},
]  # fmt: skip


class _Printable:
    """A tokenizer for the simulated device: ids from 2 on are the printable ASCII characters."""

    num_tokens = VOCAB
    eos_token_id = EOS
    special_ids = frozenset({0, EOS})

    def token_bytes(self, token_id: int, /) -> bytes:
        return bytes([token_id + 30]) if token_id >= 2 else b""

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        return [byte - 30 for byte in text.encode("ascii")]


@pytest.fixture(scope="module")
def printable() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(_Printable())
    yield compiler
    compiler.close()


def _run(printable: GrammarCompiler, **settings: Any) -> tuple[list[list[int]], Engine]:
    engine = make_engine(max_model_len=400, **settings)
    expect_short_answers(engine)  # so that too many are let in, and some are preempted where memory is short
    numbers: list[int] = []
    for index, form in enumerate(_FORMS * 2):
        prompt = [2 + (index * 7 + position) % 90 for position in range(100 + 5 * index)]
        structured = None if form is None else StructuredOutput(**form)
        constraint = (
            None if structured is None else GrammarConstraint(printable.compile(structured), structured, prompt)
        )
        params = SamplingParams(max_tokens=None, structured=structured)
        numbers.append(
            engine.scheduler.add(
                np.array(prompt, np.int64), params, seed=index, watcher=constraint, constraint=constraint
            )
        )
    engine.run()
    engine.scheduler.check_idle()
    return [engine.tokens[number] for number in numbers], engine


@pytest.fixture(scope="module")
def expected(printable: GrammarCompiler) -> list[list[int]]:
    """Plain loop, no drafts, memory for everyone."""
    tokens, engine = _run(printable, overlap=False, num_drafts=0, num_blocks=256)
    reasons = [engine.finished[number].reason for number in sorted(engine.finished)]
    assert FinishReason.ERROR not in reasons
    assert reasons.count(FinishReason.STOP) >= 9
    return tokens


@pytest.mark.parametrize(
    ("overlap", "num_drafts", "num_blocks"), list(itertools.product([False, True], [0, 5], [256, 7]))
)
def test_tokens_do_not_depend_on_overlap_drafts_or_preemption(
    overlap: bool,
    num_drafts: int,
    num_blocks: int,
    expected: list[list[int]],
    printable: GrammarCompiler,
) -> None:
    tokens, engine = _run(printable, overlap=overlap, num_drafts=num_drafts, num_blocks=num_blocks)
    assert tokens == expected
    assert (engine.scheduler.stats.preemptions > 0) == (num_blocks == 7)


def test_the_answers_satisfy_their_grammars(expected: list[list[int]], printable: GrammarCompiler) -> None:
    for tokens, form in zip(expected, _FORMS * 2, strict=True):
        if form is not None and "after" not in form and "until" not in form and tokens[-1] == EOS:
            structured = StructuredOutput(**form)
            stop = GrammarConstraint(printable.compile(structured), structured).observe(tokens)
            assert stop is not None
            assert stop.num_tokens == len(tokens)


class _Failing:
    """A constraint whose `rows` fails at its n-th call."""

    def __init__(self, inner: GrammarConstraint, call: int) -> None:
        self._inner, self._left = inner, call

    def rows(self, drafts: list[int], room: int) -> ConstrainedRows:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the matcher broke")
        return self._inner.rows(drafts, room)

    def observe(self, tokens: list[int]) -> Any:
        return self._inner.observe(tokens)


@pytest.mark.parametrize("call", [0, 1, 5])
def test_a_constraint_that_fails_ends_its_request_alone(call: int, printable: GrammarCompiler) -> None:
    structured = StructuredOutput(regex="[a-f]{60}")
    outcomes: list[dict[int, list[int]]] = []
    for broken in (False, True):
        engine = make_engine(overlap=True, num_drafts=5, num_blocks=64)
        for seed in range(3):
            constraint: Any = GrammarConstraint(printable.compile(structured), structured)
            if broken and seed == 1:
                constraint = _Failing(constraint, call)
            engine.scheduler.add(
                np.arange(2, 20 + seed),
                SamplingParams(max_tokens=70),
                seed=seed,
                watcher=constraint,
                constraint=constraint,
            )
        engine.run()
        engine.scheduler.check_idle()
        outcomes.append(engine.tokens)
        ends = [engine.finished[number] for number in sorted(engine.finished)]
    assert [end.reason is FinishReason.ERROR for end in ends] == [False, True, False]
    assert "the matcher broke" in str(ends[1].error)
    first, _, last = sorted(outcomes[0])
    assert (outcomes[1][first], outcomes[1][last]) == (outcomes[0][first], outcomes[0][last])
