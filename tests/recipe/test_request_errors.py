"""What the errors of a request say: path, rule, value and limit, and little of what was sent."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import deepseek_recipe as recipe
from tests.recipe.short_requests import EXTENDED, HI, MODEL, REQUESTS, TOOLS, chat, messages, responses


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"model": "m", "messages": [{"role": "user", "content": 5}]}', r"messages\[0\]\.content: .*not 5"),
        ('{"model": "m", "messages": [{"role": "zz"}]}', r"messages\[0\].*zz"),
        ('{"model": "m", "messages": [{"role": "user"}]}', r"messages\[0\]: .*missing required field `content`"),
        ('{"model": "m", "messages": [], "max_tokens": 4294967296}', r"max_tokens: .*4294967295.*not 4294967296"),
        ('{"model": "m", "messages": [], "seed": 1.5}', r"seed: .*1\.5"),
        ('{"model": "m", "messages": [], "seed": 18446744073709551616}', "seed: 18446744073709551616"),
        ('{"model": "m", "messages": [{"role": "user", "content": [{"type": "x"}]}]}', r"messages\[0\]\.content\[0\]"),
        ("[]", "the body: "),
        ("3", "the body: Expected `object`, not 3$"),
        ('{"model": "m", "messages": [3]}', r"messages\[0\]: Expected `object`, not 3$"),
        ('{"model": "m", "messages": [], "max_tokens": "a"}', r'max_tokens: Expected `int \| null`, not "a"$'),
        ('{"model": "' + "x" * 500 + '", "messages": 5}', "messages: "),
    ],
)
def test_a_bad_shape_names_the_path_the_rule_and_the_value(body: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^invalid request body: {text}"):
        recipe.ChatCompletionRequest(body)


@pytest.mark.bad_input
def test_stop_sequences_have_a_limit_of_characters() -> None:
    halves = ["a" * 2**15, "b" * 2**15]
    assert chat(stop=halves).parsing_options.stop_sequences == halves
    with pytest.raises(recipe.ConversionError, match="stop: 65537 characters are more than the limit of 65536"):
        chat(stop=[*halves, "c"])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("request_type", "body", "text"),
    [
        (0, {"messages": [{"role": "zz"}]}, r'messages\[0\]\.role: "zz" is not one of assistant, .*, tool, user'),
        (0, {"messages": [{"content": "a"}]}, r"field `role` \(one of assistant, "),
        (0, {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "one of file, image_url, text"),
        (0, {"messages": [], "reasoning_effort": "x"}, 'reasoning_effort: "x" is not one of high, low, max'),
        (0, {"messages": [], "tool_choice": {"type": []}}, "tool_choice.type: .* is not one of function"),
        (1, {"input": [{"role": "zz", "content": ""}]}, r"input\[0\]\.role: .* assistant, developer, system, user"),
        (1, {"reasoning": {"effort": "x"}}, "reasoning.effort: .* ultra, xhigh"),
        (2, {"max_tokens": 1, "messages": [{"role": "system!", "content": ""}]}, "assistant, system, user"),
        (2, {"max_tokens": 1, "messages": [], "thinking": {"type": 5}}, "thinking.type: 5 .* adaptive, disabled"),
    ],
)
def test_where_only_some_words_may_stand_they_are_named(request_type: int, body: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        REQUESTS[request_type](json.dumps({"model": "m", **body}))


@pytest.mark.bad_input
def test_errors_show_little_of_what_was_sent() -> None:
    long = "é" * 10_000
    calls = [{"id": f"{long}{n}", "type": "function", "function": {"name": "f", "arguments": ""}} for n in range(9)]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": long}}}
    bodies: list[dict[str, Any]] = [
        {"messages": long},
        {"messages": HI, "model": long},
        {"messages": [{"role": long}]},
        {"messages": [*HI, {"role": "tool", "tool_call_id": long, "content": ""}]},
        {"messages": [*HI, {"role": "assistant", "tool_calls": calls}]},
        {"messages": HI, "tools": [tool]},
        {"messages": HI, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": long}}},
        {"messages": HI, "top_k": [long]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:{long}"}}]}]},
    ]
    for body in bodies:
        with pytest.raises((ValueError, recipe.ConversionError)) as caught:
            recipe.ChatCompletionRequest({"model": MODEL, **body}, dialect="extended").convert(EXTENDED)
        assert len(str(caught.value)) < 900


@pytest.mark.bad_input
def test_all_schemas_of_a_request_share_one_limit_of_time() -> None:
    options = recipe.ConversionOptions(schema_time_limit_s=0.0)
    parameters = {"type": "object", "properties": {"only here": {"type": "string"}}}
    for convert, tool in (
        (chat, {"type": "function", "function": {"name": "f", "parameters": parameters}}),
        (messages, {"name": "f", "input_schema": parameters}),
    ):
        with pytest.raises(recipe.ConversionError, match=r"tools\[0\].*limit of 0 s"):
            convert(options, tools=[tool])
    for seconds in (-1.0, float("nan"), 1e9):
        with pytest.raises(OverflowError, match="schema_time_limit_s"):
            recipe.ConversionOptions(schema_time_limit_s=seconds)


@pytest.mark.bad_input
def test_namespaces_cannot_make_a_request_grow() -> None:
    def tool(name: str, description: str, count: int) -> dict[str, Any]:
        inner = [{"type": "function", "name": f"f{number}"} for number in range(count)]
        return {"type": "namespace", "name": name, "description": description, "tools": inner}

    with pytest.raises(recipe.ConversionError, match="repeated for every tool"):
        responses(tools=[tool("a", "x" * 1_000_000, 100)])
    start_s = time.process_time()
    alike = responses(tools=[tool("a", "", 1) for _ in range(5_000)])
    assert [t.name for t in alike.conversation.tools[:3]] == ["a::f0", "a::f0_1", "a::f0_2"]
    assert time.process_time() - start_s < 5


@pytest.mark.bad_input
def test_bad_json_names_the_place() -> None:
    with pytest.raises(ValueError, match=r"^invalid JSON request: .* at line 2 column 1$"):
        recipe.ResponsesRequest(b'{"model": 1,\nx}')


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model": "gpt"}, "model: 'gpt' .*DeepSeek-V4-Pro, DeepSeek-V4.1-Flash"),
        ({"temperature": 3}, r"temperature: 3.* \[0, 2\]"),
        ({"top_p": 0}, r"top_p: 0.* \(0, 1\]"),
        ({"max_tokens": 0}, r"max_tokens: 0 .*\[1, 393216\]"),
        ({"stop": [""] * 2}, r"stop\[0\]"),
        ({"stop": ["x"] * 17}, "stop: 17 .* 16"),
        ({"n": 2}, "n: 2"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"tools\[0\]\.function\.name: 'a b'"),
        ({"tools": TOOLS * 2}, "two tools are named 'f'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.*'g'"),
        ({"messages": [{"role": "tool", "content": "", "tool_call_id": "c"}]}, r"messages\[0\]\.tool_call_id: 'c'"),
        ({"response_format": {"type": "json_object"}}, "json"),
    ],
)
def test_a_request_that_cannot_be_served_names_field_value_and_limit(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(recipe.ConversionError, match=text) as caught:
        chat(**fields)
    assert caught.value.status_code == 400
    message = str(caught.value)
    kind = "invalid_request_error"
    assert json.loads(caught.value.body) == {"error": {"message": message, "type": kind, "param": None, "code": kind}}


@pytest.mark.bad_input
def test_messages_errors_have_the_shape_of_their_api_when_asked_for() -> None:
    with pytest.raises(recipe.ConversionError) as caught:
        messages(recipe.ConversionOptions(error_shape="native"), temperature=3)
    error = {"type": "invalid_request_error", "message": str(caught.value)}
    assert json.loads(caught.value.body) == {"type": "error", "error": error}
    converted = messages(recipe.ConversionOptions(error_shape="native"))
    with pytest.raises(recipe.ConversionError, match="maximum context length is 10 tokens") as caught:
        converted.resolve_max_tokens(11, 10)
    error = {"type": "invalid_request_error", "message": str(caught.value)}
    assert json.loads(caught.value.body) == {"type": "error", "error": error}


@pytest.mark.bad_input
def test_a_body_that_is_no_json_value_is_refused() -> None:
    with pytest.raises(TypeError, match="str"):
        recipe.ChatCompletionRequest({1: 2})  # type: ignore[dict-item]
    with pytest.raises(UnicodeEncodeError):
        recipe.ChatCompletionRequest({"model": "\ud800", "messages": []})
    with pytest.raises(UnicodeEncodeError):
        recipe.ChatCompletionRequest('{"model": "\ud800"}')
    with pytest.raises(TypeError, match="bytearray"):
        recipe.ChatCompletionRequest(bytearray(b"{}"))  # type: ignore[arg-type]


@pytest.mark.bad_input
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_token_limit_out_of_range_is_named_as_it_was_given(field: str) -> None:
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "a"}], field: 10**9}
    with pytest.raises(recipe.ConversionError, match=rf"^{field}: 1000000000 is outside"):
        recipe.ChatCompletionRequest(body, dialect="extended").convert(recipe.ConversionOptions())
