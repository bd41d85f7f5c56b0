"""Conversion: the life cycle of a request, and what becomes of images, system messages and special characters."""

from __future__ import annotations

from typing import Any

import pytest

import deepseek_recipe as recipe
from tests.recipe.short_requests import HI, MODEL, REQUESTS, STRICT, chat, messages, responses


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


def test_a_nul_character_passes_as_text() -> None:
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "a\\u0000b"}}]}}'
    assert recipe.ChatCompletionRequest(body).convert(STRICT).conversation.messages[0].content == "a\x00b"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["any", "named"])
def test_without_tools_a_required_tool_counts_for_nothing(choice: Any) -> None:
    request = chat(tool_choice=choice, thinking={"type": "disabled"})
    assert request.conversation.tool_choice == "auto"
    assert request.inference_options.output_constraint is None
    assert not request.parsing_options.starts_in_tool_calls
