"""Finished output is checked against what its request asked for, in bounded time."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

import deepseek_recipe as recipe
from deepseek_recipe.schema.answers import check_json_answer, check_regex_answer, python_pattern
from deepseek_recipe.schema.limits import SchemaError, TimeLimit

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[A-Z]\\w+$"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}


def constraint_of(**fields: Any) -> recipe.OutputConstraint:
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "json"}], **fields}
    constraint = (
        recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions()).inference_options.output_constraint
    )
    assert constraint is not None
    return constraint


def test_a_json_answer_is_checked_against_the_schema_of_its_request() -> None:
    constraint = constraint_of(response_format={"type": "json_schema", "json_schema": {"schema": CITY}})
    constraint.check('{"city": "Rome", "days": 3}')
    for text, problem in (
        ('{"city": "Rome", "days": 30}', "#/days: 30 is greater"),
        ('{"city": "rome"}', "#/city: .* does not match"),
        ('{"city": "Rome\\n"}', "#/city: .* does not match"),
        ("{}", "#: 'city' is a required property"),
        ('{"city": "Rome", "x": 1}', "#: Additional properties"),
        ('{"city": "Rome"', "not JSON"),
    ):
        with pytest.raises(recipe.AnswerError, match=problem):
            constraint.check(text)


def test_any_json_object_will_do_where_no_schema_was_given() -> None:
    constraint = constraint_of(response_format={"type": "json_object"})
    constraint.check('{"a": [1]}')
    with pytest.raises(recipe.AnswerError, match="object"):
        constraint.check("[1]")


def test_a_text_must_match_its_expression_as_a_whole() -> None:
    constraint = constraint_of(response_format={"type": "regex", "regex": "a|[0-9]{2}"})
    for text in ("a", "12"):
        constraint.check(text)
    for text in ("a1", "123", "a\n", ""):
        with pytest.raises(recipe.AnswerError, match="does not match"):
            constraint.check(text)


def test_a_call_must_be_of_a_declared_tool_with_its_parameters() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    tools.append({"type": "function", "function": {"name": "anything"}})
    constraint = constraint_of(tools=tools)
    constraint.check_call("weather", '{"city": "Rome"}')
    constraint.check_call("anything", '{"a": 1}')
    with pytest.raises(recipe.AnswerError, match="'wether'; the tools are weather, anything"):
        constraint.check_call("wether", "{}")
    for arguments in ("{}", "[]", '{"city": 1}', "{"):
        with pytest.raises(recipe.AnswerError):
            constraint.check_call("weather", arguments)
    with pytest.raises(recipe.AnswerError):
        constraint.check_call("anything", "5")


@pytest.mark.bad_input
def test_a_constraint_is_asked_about_its_own_kind() -> None:
    with pytest.raises(TypeError, match="check_call"):
        constraint_of(tools=[{"type": "function", "function": {"name": "f"}}]).check("{}")
    with pytest.raises(TypeError, match="use check"):
        constraint_of(response_format={"type": "json_object"}).check_call("f", "{}")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([1.0, 2.5]) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)
RULES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "array", "string", "number", "integer", ["null", "boolean"]]),
        "uniqueItems": st.booleans(),
        "pattern": st.sampled_from(["a", "^a", "b$"]),
        "properties": st.just({"a": {"type": "integer"}}),
        "additionalProperties": st.sampled_from([False, {"maxLength": 1}]),
        "enum": st.lists(VALUES, max_size=3),
        "items": st.just({"$ref": "#"}),
        "minItems": st.integers(0, 2),
        "not": st.just({"const": 1}),
    },
)


@settings(max_examples=150, deadline=None)
@given(schema=RULES, value=VALUES)
def test_answers_are_judged_as_the_library_judges_them(schema: dict[str, Any], value: Any) -> None:
    fits = jsonschema.Draft202012Validator(schema).is_valid(value)
    try:
        check_json_answer(json.dumps(value), schema)
    except recipe.AnswerError:
        assert not fits
    else:
        assert fits


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("^\\d$", "7", "٧"),
        ("^[\\w-]$", "_", "é"),
        ("^\\D\\W$", "é-", "1-"),
        ("^a$", "a", "a\n"),
        ("^[$]$", "$", "a"),
        ("^\\$$", "$", "\\"),
        ("^\\u{1F600}\\x{41}\\cJ$", "😀A\n", "😀A"),
        ("^[\\u{61}-c]$", "b", "d"),
        ("^[[]$", "[", "]"),
        ("^[^[\\]]$", "a", "["),
        ("^[]a]$", "]", "b"),
        ("^(?<x>a)\\1$", "aa", "ab"),
        ("^(?i:a)b$", "Ab", "AB"),
        ("^[(?i)]\\(?i?$", "i", "I"),
    ],
)
def test_patterns_mean_in_python_what_they_mean_in_ecma(pattern: str, matching: str, other: str) -> None:
    expression = regex.compile(python_pattern(pattern))
    assert expression.search(matching)
    assert not expression.search(other)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"pattern": "^(a|aa)+$"}, json.dumps("a" * 5_000 + "b")),
        ({"items": {"anyOf": [{"const": number} for number in range(2_000)]}}, json.dumps([1_999] * 5_000)),
    ],
    ids=["backtracking", "alternatives"],
)
def test_a_check_of_an_answer_ends_in_time(schema: Any, text: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(SchemaError, match=r"limit of 0\.3 s"):
        check_json_answer(text, schema, TimeLimit(0.3))
    assert time.monotonic() - start_s < 10


@pytest.mark.bad_input
def test_an_expression_ends_in_time() -> None:
    with pytest.raises(SchemaError, match=r"limit of 0\.2 s"):
        check_regex_answer("a" * 5_000 + "b", "(a|aa)+", TimeLimit(0.2))


def test_many_different_items_are_told_apart_fast() -> None:
    items = [{"a": number} for number in range(20_000)]
    check_json_answer(json.dumps(items), {"uniqueItems": True})
    with pytest.raises(recipe.AnswerError, match="different"):
        check_json_answer(json.dumps([*items, {"a": 5.0}]), {"uniqueItems": True})


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("schema", "text", "problem"),
    [
        ({"patternProperties": {"a": True}}, "{}", "patternProperties"),
        ({"$ref": "#"}, "1", "nested too deep"),
        ({"$ref": "https://example.com/x"}, "1", "nothing is fetched"),
        ({"pattern": "(?R)a"}, '"a"', "flags"),
        ({"pattern": "a(?i)b"}, '"a"', "flags"),
        ({"pattern": "(?u:b)"}, '"a"', "flags"),
    ],
)
def test_what_cannot_be_checked_is_said(schema: Any, text: str, problem: str) -> None:
    with pytest.raises(SchemaError, match=problem):
        check_json_answer(text, schema)
