"""300 schemas, each answered at random: what is finished validates, and drafts change nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema.validators import validator_for

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.structured import GrammarCompiler, GrammarConstraint
from deepinfer_core.text import Tokenizer
from tests.core.structured.driver import answer
from tests.core.structured.schemas import SCHEMAS

_SEEDS = 3


def test_there_are_300_different_schemas() -> None:
    assert len({json.dumps(schema) for schema in SCHEMAS}) == 300


@pytest.mark.parametrize("start", range(0, 300, 20))
def test_random_answers_validate_and_drafts_do_not_change_them(
    start: int, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    for number in range(start, start + 20):
        schema: Any = SCHEMAS[number]
        structured = StructuredOutput(json=schema)
        grammar = compiler.compile(structured)
        num_finished = 0
        for seed in range(_SEEDS):
            plain = answer(GrammarConstraint(grammar, structured), tokenizer, seed)
            drafted = answer(GrammarConstraint(grammar, structured), tokenizer, seed, oracle=[*plain, *plain[:5]])
            assert drafted == plain, f"schema {number}, seed {seed}"
            if plain[-1] == tokenizer.eos_token_id:
                num_finished += 1
                text = tokenizer.decode(plain[:-1])
                _validate(json.loads(text), schema, f"schema {number}, seed {seed}: {text}")
        assert num_finished, f"schema {number} never came to an end"


def _validate(value: Any, schema: Any, what: str) -> None:
    validator = validator_for(schema)
    validator.check_schema(schema)
    errors = [error.message for error in validator(schema).iter_errors(value)]
    assert not errors, f"{what}: {errors[0]}"
