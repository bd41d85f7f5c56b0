"""Conversion: what errors say, the life cycle of a request, and the extended dialect."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepseek_recipe as recipe
from tests.recipe.vectors import load_cases

MODEL = "DeepSeek-V4.1-Flash"
HI = [{"role": "user", "content": "hi"}]
STRICT = recipe.ConversionOptions()
EXTENDED = recipe.ConversionOptions(dialect="extended")
TOOLS = [{"type": "function", "function": {"name": "f"}}]
REQUESTS = [recipe.ChatCompletionRequest, recipe.ResponsesRequest, recipe.MessagesRequest]


def chat(options: recipe.ConversionOptions = STRICT, **fields: Any) -> recipe.ConversationRequest:
    body = {"model": MODEL, "messages": HI, **fields}
    return recipe.ChatCompletionRequest(body, dialect=options.dialect).convert(options)


def messages(options: recipe.ConversionOptions = STRICT, **fields: Any) -> recipe.ConversationRequest:
    body = {"model": MODEL, "messages": HI, **fields}
    return recipe.MessagesRequest(body, dialect=options.dialect).convert(options)


def responses(options: recipe.ConversionOptions = STRICT, **fields: Any) -> recipe.ConversationRequest:
    return recipe.ResponsesRequest({"model": MODEL, "input": "hi", **fields}).convert(options)


# ---- errors ----------------------------------------------------------------------------------------------------------


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


# ---- life cycle ------------------------------------------------------------------------------------------------------


@pytest.mark.bad_input
@pytest.mark.parametrize("request_type", REQUESTS)
def test_a_request_is_converted_once_even_when_that_fails(request_type: Any) -> None:
    request = request_type({"model": "nobody's", "messages": HI, "input": "hi"})
    assert request.model == "nobody's"
    with pytest.raises(recipe.ConversionError):
        request.convert(STRICT)
    for use in (lambda: request.model, lambda: request.convert(STRICT)):
        with pytest.raises(RuntimeError, match="converted before"):
            use()


def test_the_echo_and_the_namespaces_are_read_before_conversion() -> None:
    tool = {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "a"}]}
    request = recipe.ResponsesRequest({"model": MODEL, "input": "hi", "tools": [tool], "temperature": 0.3, "user": "u"})
    assert request.namespace_tool_map(STRICT) == {"crm::a": ("crm", "a")}
    echo = request.echo()
    assert (echo.user, echo.temperature, echo.top_logprobs) == ("u", 0.30000001192092896, 0)
    request.convert(STRICT)
    with pytest.raises(RuntimeError):
        request.echo()


def test_options_are_values_and_their_setters_copy() -> None:
    options = STRICT.with_model_alias("mine", recipe.ModelVersion.DeepseekV4Pro).with_default_thinking_mode(False)
    assert options.model_versions_by_name["mine"] is recipe.ModelVersion.DeepseekV4Pro
    assert "mine" not in STRICT.model_versions_by_name
    assert recipe.ConversionOptions() == STRICT
    request = recipe.ChatCompletionRequest({"model": "mine", "messages": HI}).convert(options)
    assert (request.model_version, request.conversation.thinking_mode) == (recipe.ModelVersion.DeepseekV4Pro, False)


# ---- the rules that V4 Pro has of its own ----------------------------------------------------------------------------


def test_v4_pro_shows_later_system_messages_of_messages_as_reminders() -> None:
    turns = [*HI, {"role": "system", "content": "s"}, {"role": "system", "content": ""}]
    found = messages(model="DeepSeek-V4-Pro", messages=turns).conversation.messages
    assert found == [recipe.UserMessage("hi"), recipe.UserMessage("<system-reminder>\ns\n</system-reminder>")]


def test_v4_pro_joins_namespaces_with_underscores_and_knows_no_tool_search() -> None:
    tools = [
        {"type": "namespace", "name": "n", "description": "D", "tools": [{"type": "function", "name": "g"}]},
        {"type": "function", "name": "n__g"},
        {"type": "tool_search", "execution": "client"},
    ]
    items = [{"role": "developer", "content": "d"}, {"type": "tool_search_call", "call_id": "c", "arguments": {}}]
    conversation = responses(model="DeepSeek-V4-Pro", tools=tools, input=items).conversation
    assert [tool.name for tool in conversation.tools] == ["n__g_1", "n__g"]
    assert conversation.messages == [recipe.UserMessage("d")]


@pytest.mark.parametrize(
    ("namespace", "local", "name"),
    [
        ("n", "g", "n__g"),
        ("mcp__n__", "g", "mcp__n__g"),
        ("n_", "g", "n_g"),
        ("n", "_g", "n_g"),
        ("_", "_", "__"),
    ],
)
def test_v4_pro_puts_nothing_where_namespace_and_name_meet_in_an_underscore(
    namespace: str, local: str, name: str
) -> None:
    tools = [{"type": "namespace", "name": namespace, "tools": [{"type": "function", "name": local}]}]
    call = {"type": "function_call", "call_id": "c", "namespace": namespace, "name": local, "arguments": "{}"}
    items = [call, {"type": "function_call_output", "call_id": "c", "output": "o"}]
    body = {"model": "DeepSeek-V4-Pro", "tools": tools, "input": items}
    assert recipe.ResponsesRequest(body).namespace_tool_map(STRICT) == {name: (namespace, local)}
    conversation = responses(**body).conversation
    assert conversation.tools[0].name == name
    assert [call.name for call in conversation.messages[0].tool_calls or ()] == [name]


def called_names(model: str, tools: list[dict[str, Any]], *calls: tuple[str, str], found: Any = ()) -> list[str]:
    items: list[dict[str, Any]] = []
    for index, (namespace, name) in enumerate(calls):
        call_id = f"c{index}"
        call = {"type": "function_call", "call_id": call_id, "namespace": namespace, "name": name, "arguments": "{}"}
        items += [call, {"type": "function_call_output", "call_id": call_id, "output": "o"}]
    if found:
        items.append({"type": "tool_search_call", "call_id": "s", "arguments": {}})
        items.append({"type": "tool_search_output", "call_id": "s", "tools": found})
    messages = responses(model=model, tools=tools, input=items).conversation.messages
    names = [call.name for message in messages for call in message.tool_calls or ()]
    return [name for name in names if name != "tool_search"]


def test_a_call_in_history_never_takes_the_name_of_another_tool() -> None:
    def namespace(name: str, *inner: str) -> dict[str, Any]:
        return {"type": "namespace", "name": name, "tools": [{"type": "function", "name": n} for n in inner]}

    tools = [namespace("a_", "f"), namespace("a", "_f"), {"type": "function", "name": "b__f"}]
    calls = (("a_", "f"), ("a", "_f"), ("b", "f"), ("b_", "_f"), ("b", "f"), ("c", "f"))
    names = ["a_f", "a_f_1", "b__f_1", "b__f_2", "b__f_1", "c__f"]
    assert called_names("DeepSeek-V4-Pro", tools, *calls) == names

    tools = [namespace("a", "f"), {"type": "tool_search", "execution": "client"}]
    found = [namespace("a", "f")]  # known as a::f_1, also to the calls before the search
    assert called_names("DeepSeek-V4.1-Flash", tools, ("a", "f_1"), ("a", "f"), found=found) == ["a::f_1_1", "a::f"]


# ---- the extended dialect --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "developer", "content": "d"}]},
        {"messages": HI, "seed": -1},
    ],
)
def test_strict_refuses_what_extended_parses(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="invalid request body"):
        recipe.ChatCompletionRequest({"model": MODEL, **body})
    recipe.ChatCompletionRequest({"model": MODEL, **body}, dialect="extended").convert(EXTENDED)


def test_a_developer_message_is_a_system_message() -> None:
    found = chat(EXTENDED, messages=[{"role": "developer", "content": "d"}]).conversation.messages
    assert found == [recipe.SystemMessage("d")]


def test_engine_settings_reach_the_engine_typed_and_only_in_the_extended_dialect() -> None:
    fields = {
        "max_completion_tokens": 7, "n": 3, "top_k": 5, "min_p": 0.25, "repetition_penalty": 1.5,
        "frequency_penalty": 1.0, "presence_penalty": -1.0, "parallel_tool_calls": False, "seed": -5,
    }  # fmt: skip
    found = chat(EXTENDED, **fields).inference_options
    assert (found.max_tokens, found.n, found.top_k, found.min_p, found.seed) == (7, 3, 5, 0.25, -5)
    assert (found.repetition_penalty, found.frequency_penalty, found.presence_penalty) == (1.5, 1.0, -1.0)
    assert found.parallel_tool_calls is False
    plain = chat(max_completion_tokens=7, top_k="x", frequency_penalty=1.0).inference_options
    assert (plain.max_tokens, plain.top_k, plain.frequency_penalty) == (None, None, None)
    assert messages(EXTENDED, top_k=4).inference_options.top_k == 4
    assert responses(EXTENDED, top_k=4, seed=2).inference_options.seed == 2


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": -2}, {"top_k": "x"}, {"top_k": True}, {"min_p": 1.5}, {"min_p": "x"}, {"repetition_penalty": 0},
        {"n": 0}, {"n": 200}, {"max_completion_tokens": 5, "max_tokens": 6}, {"max_completion_tokens": 0},
    ],
)  # fmt: skip
def test_engine_settings_have_ranges(fields: dict[str, Any]) -> None:
    with pytest.raises(recipe.ConversionError, match=next(iter(fields))):
        chat(EXTENDED, **fields)


def test_redacted_thinking_is_skipped() -> None:
    blocks = [{"type": "redacted_thinking", "data": "z"}, {"type": "text", "text": "x"}]
    turns = [*HI, {"role": "assistant", "content": blocks}, *HI]
    assert messages(EXTENDED, messages=turns).conversation.messages[1] == recipe.AssistantMessage("x", "")


def test_any_requires_a_tool_in_the_extended_dialect() -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    off = {"thinking": {"type": "disabled"}, "tools": tools, "tool_choice": {"type": "any"}}
    assert messages(**off).conversation.tool_choice == "auto"
    assert messages(EXTENDED, **off).conversation.tool_choice == "required"


def test_a_tool_required_while_thinking_leaves_the_prompt_to_the_thinking() -> None:
    request = chat(EXTENDED, tools=TOOLS, tool_choice="required")
    constraint = request.inference_options.output_constraint
    assert constraint is not None
    assert (constraint.kind, constraint.after_thinking) == ("tool_call_required", True)
    assert not request.parsing_options.starts_in_tool_calls
    assert recipe.DeepseekV41Encoding().render_conversation(request.conversation).prompt.endswith("<think>")


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_a_literal_spelling_cannot_displace_an_image(api: str) -> None:
    spelling = recipe.SpecialToken.Image.default_str()
    text = {"type": "input_text" if api == "responses" else "text", "text": f"a {spelling} b"}
    image = {
        "chat": {"type": "image_url", "image_url": {"url": "http://x"}},
        "responses": {"type": "input_image", "image_url": "http://x"},
        "messages": {"type": "image", "source": {"type": "url", "url": "http://x"}},
    }[api]
    if api == "messages":  # user blocks are messages of their own, those of a result are not
        use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": [text, image]}
        request = messages(messages=[{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}])
    elif api == "chat":
        request = chat(messages=[{"role": "user", "content": [text, image]}])
    else:
        request = responses(input=[{"role": "user", "content": [text, image]}])
    rendered = recipe.DeepseekV41Encoding().render_conversation(request.conversation)
    starts = [start for start, end in rendered.special_ranges if rendered.prompt[start:end] == spelling]
    assert [rendered.prompt[:start].count(spelling) for start in starts] == [1]


def test_empty_system_messages_of_chat_are_none() -> None:
    turns = [{"role": "system", "content": ""}, *HI, {"role": "system", "content": []}]
    assert chat(messages=turns).conversation.messages == [recipe.UserMessage("hi")]
    assert chat(messages=turns[:1]).conversation.messages == []


def test_fim_prompts_mark_the_hole(v4_tokenizer: recipe.Tokenizer) -> None:
    encoding = recipe.DeepseekV4Encoding().with_tokenizer(v4_tokenizer)
    rendered = encoding.render_fim("def f(", "):\n <｜User｜>")
    assert [rendered.prompt[a:b] for a, b in rendered.special_ranges] == [
        "<｜begin▁of▁sentence｜>", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>",
    ]  # fmt: skip
    ids = encoding.encode_fim("def f(", "):\n <｜User｜>")
    assert (ids[:2], ids[-1], 128803 in ids) == ([0, 128801], 128802, False)


def test_tokens_are_counted_with_their_images(v41_tokenizer: recipe.Tokenizer) -> None:
    request = chat()
    encoding = recipe.encoding_for(request.model_version).with_tokenizer(v41_tokenizer)
    count = len(encoding.encode(request.conversation))
    assert recipe.count_tokens(request, v41_tokenizer) == count
    images = recipe.MultiModalData([recipe.ImageInfo(b"x", 546, 546)])
    assert recipe.count_tokens(request, v41_tokenizer, images) == count + 183


# ---- anything at all -------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
WORDS = st.sampled_from(
    ["user", "assistant", "system", "tool", "text", "function", "tool_use", "tool_result", "hi", MODEL]
)
KEYS = st.sampled_from(
    ["model", "messages", "input", "role", "content", "type", "text", "tools", "function", "name", "parameters",
     "system", "tool_calls", "id", "arguments", "tool_choice", "thinking", "strict", "call_id", "output", "source",
     "url"]
)  # fmt: skip
JSON = st.recursive(
    SCALARS | WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=30
)


@settings(max_examples=150, deadline=None)
@given(body=JSON, fields=st.dictionaries(KEYS, JSON, max_size=4), extended=st.booleans())
def test_no_body_raises_anything_but_the_documented_errors(body: Any, fields: dict[str, Any], extended: bool) -> None:
    options = EXTENDED if extended else STRICT
    whole = {"model": MODEL, "messages": HI, "input": "hi", **fields}
    for candidate in (body, whole, json.dumps(whole), json.dumps(body).encode()):
        for request_type in REQUESTS:
            try:
                request = request_type(candidate, dialect=options.dialect)
                request.convert(options)
            except (ValueError, TypeError, OverflowError, recipe.ConversionError):
                continue


@pytest.mark.bad_input
@pytest.mark.parametrize("request_type", REQUESTS)
@pytest.mark.parametrize(
    "body",
    [
        b'{"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"model":"m","max_tokens":' + b"9" * 5_000_000 + b"}",
        b'{"model":"\\ud800"}',
        b"\x00",
        b'{"model":"m\x00"}',
        b'{"model":' + b'"x"' * 100_000,
        b"{" + b",".join(b'"%d":1' % n for n in range(300_000)) + b"}",
    ],
    ids=["depth", "digits", "surrogate", "NUL", "control", "no commas", "keys"],
)
def test_a_hostile_body_is_refused(request_type: Any, body: bytes) -> None:
    with pytest.raises(ValueError, match=r"^invalid (JSON request|request body): "):
        request_type(body)


def test_a_nul_character_passes_as_text() -> None:
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "a\\u0000b"}}]}}'
    assert recipe.ChatCompletionRequest(body).convert(STRICT).conversation.messages[0].content == "a\x00b"


@pytest.mark.bad_input
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_token_limit_out_of_range_is_named_as_it_was_given(field: str) -> None:
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "a"}], field: 10**9}
    with pytest.raises(recipe.ConversionError, match=rf"^{field}: 1000000000 is outside"):
        recipe.ChatCompletionRequest(body, dialect="extended").convert(recipe.ConversionOptions())


ODD_VALUES: list[Any] = [
    None, True, -1, 1.5, 10**25, "", "x" * 5_000, "\0", [], {}, [[]], [{}], {"type": []},
    [{"type": {}}], {"a" * 3_000: 1},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, member in members:
        yield from places(member, (*path, step))


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    """A JSON value with another value at `path`."""
    if not path:
        return by
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], by)
    return changed


def refusal(request_type: Any, body: str, options: recipe.ConversionOptions) -> str:
    """The text of the documented error that a body meets on its way to a prompt; empty where it meets none."""
    try:
        converted = request_type(body, dialect=options.dialect).convert(options)
    except recipe.ConversionError as error:
        return str(error)
    except ValueError as error:
        if not str(error).startswith(("invalid JSON request: ", "invalid request body: ")):
            raise
        return str(error)
    recipe.encoding_for(converted.model_version).render_conversation(converted.conversation)
    return ""


@pytest.mark.bad_input
@pytest.mark.parametrize(("group", "request_type"), [*zip(("chat", "responses", "messages"), REQUESTS, strict=True)])
def test_an_odd_value_in_any_place_gives_a_documented_and_short_error(group: str, request_type: Any) -> None:
    rng = random.Random(5)
    cases = load_cases(f"convert_{group}")
    bodies = [case["input"]["body"] for case in cases if isinstance(case["input"].get("body"), dict)]
    for body in bodies:
        options = rng.choice([STRICT, EXTENDED])
        changed = json.dumps(replaced(body, rng.choice([*places(body)]), rng.choice(ODD_VALUES)))
        error = refusal(request_type, changed, options)
        assert len(error) < 900, error
