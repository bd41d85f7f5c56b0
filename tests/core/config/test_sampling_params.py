# What must be refused has the wrong type on purpose.
# pyright: reportArgumentType=false
"""SamplingParams and StructuredOutput: names, defaults, normal forms, and refusal of whatever is out of range."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from deepinfer_core.config.sampling import SamplingParams, StructuredOutput
from deepinfer_core.errors import RequestError


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert not params.greedy
    assert not params.has_penalties


def test_names_of_the_original_are_accepted() -> None:
    params = SamplingParams(seq_seed=-1, top_logprobs=3, so_args={"schema_type": "regex", "schema": "a+"})
    assert (params.seed, params.logprobs) == (2**64 - 1, 3)
    assert params.structured == StructuredOutput(regex="a+")


def test_the_same_value_under_both_names_is_fine() -> None:
    assert SamplingParams(seed=-1, seq_seed=2**64 - 1, logprobs=2, top_logprobs=2).seed == 2**64 - 1


@pytest.mark.parametrize("top_k", [-1, 0])
def test_both_spellings_of_no_top_k_mean_off(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).top_k == 0


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), seed=np.int64(-2), top_k=np.int32(4), stop_token_ids=[np.int64(3)]
    )
    assert (params.temperature, params.seed, params.top_k, params.stop_token_ids) == (0.5, 2**64 - 2, 4, (3,))


def test_normal_forms() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[4, 4, 2], logit_bias={"7": 1, 8: -100}, prompt_logprobs=True)
    assert params.stop_strings == ("END",)
    assert params.stop_token_ids == (4, 2)
    assert params.logit_bias == {7: 1.0, 8: -100.0}
    assert params.num_prompt_logprobs == 1
    assert SamplingParams(prompt_logprobs=False).num_prompt_logprobs is None
    assert SamplingParams(max_tokens=None).max_tokens is None


def test_params_can_be_copied_and_changed() -> None:
    params = SamplingParams(seed=3, logit_bias={1: 2.0}, structured=StructuredOutput(choice=["a"]), logprobs=0)
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params, temperature=0.0).seed == 3


def test_changing_the_callers_mapping_later_has_no_effect() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50.0
    assert params.logit_bias == {1: 2.0}


BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": "1"}, "temperature is '1'"),
    ({"temperature": True}, "temperature is True"),
    ({"temperature": None}, "temperature is None"),
    ({"top_p": 0}, "top_p is 0"),
    ({"top_p": 1.0001}, "top_p is 1.0001"),
    ({"top_p": math.nan}, "top_p is nan"),
    ({"top_k": -2}, "top_k is -2"),
    ({"top_k": 2.0}, "top_k is 2.0"),
    ({"min_p": -1e-9}, "min_p"),
    ({"min_p": 1.5}, "min_p is 1.5"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1"),
    ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
    ({"n": 0}, "n is 0"),
    ({"n": 10**9}, "n is 1000000000.*1024"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": -1}, "max_tokens is -1"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens is 6.*5"),
    ({"seed": 2**64}, "seed is"),
    ({"seed": -(2**63) - 1}, "seed is"),
    ({"seed": 1.0}, "seed is 1.0"),
    ({"seed": 1, "seq_seed": 2}, "seed is 1 and seq_seed is 2"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"logprobs": True}, "logprobs is True"),
    ({"logprobs": 1, "top_logprobs": 2}, "logprobs is 1 and top_logprobs is 2"),
    ({"prompt_logprobs": 10**6}, "prompt_logprobs is 1000000"),
    ({"logprobs_mode": "cooked"}, "logprobs_mode is 'cooked'"),
    ({"stop": ["x"] * 10_000}, "stop has 10000 strings.*64"),
    ({"stop": [""]}, r"stop\[0\]"),
    ({"stop": [3]}, r"stop\[0\] is 3"),
    ({"stop": 3}, "stop is 3"),
    ({"stop": ["x" * 5_000]}, r"stop\[0\] has 5000 characters"),
    ({"stop": ["x"], "detokenize": False}, "detokenize"),
    ({"stop_token_ids": [-1]}, r"stop_token_ids\[0\] is -1"),
    ({"stop_token_ids": list(range(5_000))}, "stop_token_ids has 5000"),
    ({"stop_token_ids": "12"}, "stop_token_ids is '12'"),
    ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\] is nan"),
    ({"logit_bias": {1: 101}}, r"logit_bias\[1\] is 101"),
    ({"logit_bias": {-1: 1}}, "logit_bias key is -1"),
    ({"logit_bias": {"x": 1}}, "logit_bias key is 'x'"),
    ({"logit_bias": {"9" * 5_000: 1}}, "logit_bias key"),
    ({"logit_bias": [1]}, r"logit_bias is \[1\]"),
    ({"logit_bias": dict.fromkeys(range(2_000), 1.0)}, "logit_bias has 2000 entries"),
    ({"ignore_eos": 1}, "ignore_eos is 1"),
    ({"structured": {"json": {}}}, "StructuredOutput"),
    ({"so_args": {"schema_type": "yaml", "schema": "x"}}, "schema_type is 'yaml'"),
    ({"so_args": {"schema_type": "json"}}, "no schema"),
    ({"so_args": {"schema_type": "json", "schema": {}, "extra": 1}}, "unknown key 'extra'"),
    ({"so_args": "json"}, "so_args is 'json'"),
    ({"so_args": {"schema_type": "regex", "schema": "a"}, "structured": StructuredOutput(regex="b")}, "structured is"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("values", "message"), BAD_VALUES, ids=[str(values)[:60] for values, _ in BAD_VALUES])
def test_a_bad_parameter_is_named_with_its_value_and_limit(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**values)
    assert len(str(caught.value)) < 400


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(logit_bias={384: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=[10**6]), "stop_token_ids"),
        (SamplingParams(structured=StructuredOutput(regex="a", after=[999])), "structured.after"),
        (SamplingParams(structured=StructuredOutput(regex="a", until=999)), "structured.until"),
    ],
)
def test_token_ids_are_checked_against_the_tokenizer(params: SamplingParams, name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} has the token id .* 0 to 383"):
        params.check_vocabulary(384)


def test_token_ids_inside_the_tokenizer_pass() -> None:
    SamplingParams(logit_bias={383: 1.0}, stop_token_ids=[0]).check_vocabulary(384)


def test_a_schema_is_kept_as_compact_json_in_its_own_order() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {"const": "é"}}}
    text = StructuredOutput(json=schema).json
    assert text == '{"type":"object","properties":{"b":{},"a":{"const":"é"}}}'
    assert StructuredOutput(json=json.dumps(schema)).json == text
    assert StructuredOutput(json=False).json == "false"


def test_a_trigger_of_the_original_delays_the_grammar() -> None:
    args = {"schema_type": "json", "schema": {}, "trigger_token_ids": [7, 8], "bound_token_id": 9}
    structured = StructuredOutput.from_so_args(args)
    assert (structured.after, structured.until) == ((7, 8), 9)


def test_a_schema_beside_json_object_is_followed() -> None:
    so_args: dict[str, Any] = {"schema_type": "json_object", "schema": {"required": ["a"]}}
    assert StructuredOutput.from_so_args(so_args).json == '{"required":["a"]}'
    for nothing in (None, {}, ""):
        assert StructuredOutput.from_so_args({"schema_type": "json_object", "schema": nothing}).json_object


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "no constraint"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"json": {}, "json_object": True}, "json and json_object"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[" * 100_000}, "deeper than 100"),
        ({"json": [1]}, "object or a boolean"),
        ({"json": {"a": math.nan}}, "cannot be written as JSON"),
        ({"json": {"a": object()}}, "cannot be written as JSON"),
        ({"json": deep(200)}, "deeper than 100"),
        ({"json": {"enum": ["x" * 2_000_000]}}, "characters; at most"),
        ({"regex": ""}, "structured.regex is ''"),
        ({"regex": 3}, "structured.regex is 3"),
        ({"grammar": "x" * 2_000_000}, "structured.grammar has 2000000 characters"),
        ({"choice": []}, "choice is empty"),
        ({"choice": "abc"}, "list of strings"),
        ({"choice": ["a"] * 5_000}, "choice has 5000 strings"),
        ({"regex": "a", "after": [-1]}, r"after\[0\] is -1"),
        ({"regex": "a", "after": list(range(100))}, "after has 100 entries"),
        ({"regex": "a", "until": -1}, "until is -1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_constraint_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        StructuredOutput(**values)
    assert len(str(caught.value)) < 400


@pytest.mark.bad_input
def test_min_tokens_beside_a_grammar_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens is 3"):
        SamplingParams(min_tokens=3, structured=StructuredOutput(regex="a"))
