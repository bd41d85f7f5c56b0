"""Structured output end to end: the bundled model at temperature 1, with drafts and without."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from jsonschema.validators import validator_for

from deepinfer_core import LLM, RequestOutput, SamplingParams, StructuredOutput
from deepinfer_core.errors import GrammarError
from deepinfer_core.scheduling.stats import SchedulerStats
from tests.core.harness import FIXTURES
from tests.core.inside import inside
from tests.core.structured.schemas import SCHEMAS

_PROMPT = "Answer in JSON: "


def _engine(model: str, num_drafts: int) -> LLM:
    """An engine that drafts at every chance, whatever the guard would think of it."""
    return LLM(
        model,
        quiet=True,
        num_drafts=num_drafts,
        draft_schedule="fixed",
        max_num_seqs=80,
        max_num_batched_tokens=512,
        max_model_len=1024,
    )


def _stats(llm: LLM) -> SchedulerStats:
    return inside(llm).scheduler.stats


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with _engine("tiny", 5) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with _engine("tiny", 0) as llm:
        yield llm


@pytest.fixture(scope="module")
def noise() -> Iterator[LLM]:
    """Random weights: without a grammar its text is nothing like JSON."""
    with _engine(str(FIXTURES / "tiny-a"), 5) as llm:
        yield llm


def _answers(llm: LLM, schemas: Sequence[Any], max_tokens: int) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=number, structured=StructuredOutput(json=schema))
        for number, schema in enumerate(schemas)
    ]
    return llm.generate([_PROMPT] * len(params), params, use_tqdm=False)


def _check(schemas: Sequence[Any], drafted: list[RequestOutput], plain: list[RequestOutput], least: float) -> None:
    num_finished = 0
    for number, (schema, one, other) in enumerate(zip(schemas, drafted, plain, strict=True)):
        answer = one.outputs[0]
        assert answer.error is None
        assert answer.token_ids == other.outputs[0].token_ids, f"schema {number}"
        if answer.finish_reason == "stop":
            num_finished += 1
            errors = list(validator_for(schema)(schema).iter_errors(json.loads(answer.text)))
            assert not errors, f"schema {number}: {answer.text}: {errors[0].message}"
    assert num_finished >= least * len(schemas)


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_finished_answers_validate_and_drafts_do_not_change_them(drafting: LLM, plain: LLM) -> None:
    schemas = SCHEMAS[:100:2] + SCHEMAS[102::6][:30]
    assert len(schemas) == 80
    drafted = _answers(drafting, schemas, 64)
    assert _stats(drafting).verified_drafts > 0
    _check(schemas, drafted, _answers(plain, schemas, 64), 0.6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_all_300_schemas_with_room_to_finish(drafting: LLM, plain: LLM) -> None:
    _check(SCHEMAS, _answers(drafting, SCHEMAS, 256), _answers(plain, SCHEMAS, 256), 0.8)


def test_every_form_is_enforced(noise: LLM) -> None:
    forms = {
        r"yes|no|perhaps": StructuredOutput(choice=["yes", "no", "perhaps"]),
        r"[a-f]{4}-\d\d": StructuredOutput(regex=r"[a-f]{4}-\d\d"),
        r"\((\((x|y)\)|x|y)\)": StructuredOutput(grammar='root ::= "(" (inner | "(" inner ")") ")"\ninner ::= [xy]'),
        r"a+b": StructuredOutput(grammar='start: "a"~1..5 "b"'),
    }
    params = [SamplingParams(structured=form, max_tokens=40, seed=3) for form in forms.values()]
    for expected, output in zip(forms, noise.generate([_PROMPT] * len(forms), params, use_tqdm=False), strict=True):
        assert output.outputs[0].finish_reason == "stop"
        assert re.fullmatch(expected, output.outputs[0].text)


def test_the_original_s_arguments_are_taken(noise: LLM) -> None:
    params = SamplingParams(so_args={"schema_type": "regex", "schema": "[0-9]{3}"}, max_tokens=9)
    assert re.fullmatch("[0-9]{3}", noise.generate(_PROMPT, params, use_tqdm=False)[0].outputs[0].text)


def test_the_grammar_starts_after_the_trigger(noise: LLM) -> None:
    """The trigger is what the model says by itself, so it falls wherever the drafts happen to be."""
    free = noise.generate(_PROMPT, SamplingParams(seed=5, max_tokens=12), use_tqdm=False)[0].outputs[0].token_ids
    for start, end in ((2, 3), (3, 5), (7, 8)):
        structured = StructuredOutput(choice=["yes", "no"], after=free[start:end])
        params = SamplingParams(seed=5, max_tokens=30, structured=structured)
        answer = noise.generate(_PROMPT, params, use_tqdm=False)[0].outputs[0]
        first = next(i for i in range(len(free)) if free[i : i + end - start] == free[start:end]) + end - start
        assert answer.token_ids[:first] == free[:first]
        assert noise.tokenizer.decode(answer.token_ids[first:]) in ("yes", "no")
        assert answer.finish_reason == "stop"


def test_a_constrained_request_does_not_change_its_neighbours(noise: LLM) -> None:
    alone = noise.generate("Once", SamplingParams(seed=1, max_tokens=30), use_tqdm=False)[0].outputs[0].token_ids
    params = [
        SamplingParams(seed=1, max_tokens=30),
        SamplingParams(seed=1, max_tokens=30, structured=StructuredOutput(json_object=True)),
        SamplingParams(seed=2, max_tokens=30, structured=StructuredOutput(regex="[a-z]*")),
    ]
    assert noise.generate(["Once"] * 3, params, use_tqdm=False)[0].outputs[0].token_ids == alone


def test_each_of_n_answers_has_its_own_state(noise: LLM) -> None:
    params = SamplingParams(n=4, seed=9, max_tokens=20, structured=StructuredOutput(regex="[a-z]{5}[0-9]"))
    texts = [answer.text for answer in noise.generate(_PROMPT, params, use_tqdm=False)[0].outputs]
    assert all(re.fullmatch("[a-z]{5}[0-9]", text) for text in texts)
    assert len(set(texts)) > 1


def test_a_finished_grammar_ends_the_answer_even_if_the_end_token_is_to_be_ignored(noise: LLM) -> None:
    params = SamplingParams(ignore_eos=True, max_tokens=50, structured=StructuredOutput(choice=["abc"]))
    answer = noise.generate(_PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("abc", "stop")


def test_stop_strings_work_inside_a_grammar(noise: LLM) -> None:
    params = SamplingParams(stop="-", max_tokens=50, structured=StructuredOutput(regex="[a-c]{3}-[0-9]{9}"))
    answer = noise.generate(_PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert re.fullmatch("[a-c]{3}", answer.text)
    assert answer.stop_reason == "-"


@pytest.mark.bad_input
def test_a_schema_that_cannot_be_enforced_is_refused_before_any_work(noise: LLM) -> None:
    steps = _stats(noise).steps
    good = SamplingParams(max_tokens=3)
    bad = SamplingParams(structured=StructuredOutput(json={"not": {}}))
    with pytest.raises(GrammarError, match="'not' at #") as caught:
        noise.generate(["a", "b"], [good, bad], use_tqdm=False)
    assert caught.value.__notes__ == ["in prompts[1], counted from 0, of 2"]
    assert _stats(noise).steps == steps
    assert noise.generate("a", good, use_tqdm=False)[0].outputs[0].error is None
