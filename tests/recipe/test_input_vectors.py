"""The input side against the outputs of deepseek-recipe 0.2.0: conversion, rendering, ids, numbers."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

import deepseek_recipe as recipe
from deepseek_recipe import protocol_data
from deepseek_recipe.conversation_json import conversation_from_json, conversation_to_json
from deepseek_recipe.rendering.base import PromptEncoding
from tests.recipe.vectors import FIXTURES, load_cases

REQUESTS = {
    "chat": recipe.ChatCompletionRequest,
    "responses": recipe.ResponsesRequest,
    "messages": recipe.MessagesRequest,
}
ENCODINGS: dict[str, type[PromptEncoding]] = {"v4": recipe.DeepseekV4Encoding, "v4.1": recipe.DeepseekV41Encoding}


def cases(*groups: str) -> list[Any]:
    found = [case for group in groups for case in load_cases(group)]
    return [pytest.param(case["input"], case["expected"], id=case["id"]) for case in found]


def options_of(given: dict[str, Any]) -> recipe.ConversionOptions:
    enums = {
        "reasoning_content_behavior": recipe.ReasoningContentBehavior,
        "responses_web_search": recipe.WebSearchBehavior,
        "messages_web_search": recipe.WebSearchBehavior,
    }
    settings = {
        name: enums[name][value] if name in enums else value for name, value in given.items() if name != "aliases"
    }
    options = recipe.ConversionOptions(**settings)
    for name, version in given.get("aliases", {}).items():
        options = options.with_model_alias(name, recipe.ModelVersion[version])
    return options


def body_of(given: dict[str, Any]) -> bytes | str:
    if "body_b64" in given:
        return base64.b64decode(given["body_b64"])
    return given["body_text"] if "body_text" in given else json.dumps(given["body"])


def converted(given: dict[str, Any]) -> dict[str, Any]:
    try:
        request = REQUESTS[given["api"]](body_of(given))
    except ValueError as error:
        return {"error": {"stage": "parse", "exception": type(error).__name__}}
    try:
        return {"request": request.convert(options_of(given["options"])).to_json()}
    except recipe.ConversionError as error:
        return {"error": {"stage": "convert", "exception": "ConversionError", "status_code": error.status_code}}


@pytest.mark.parametrize(("given", "expected"), cases("convert_chat", "convert_responses", "convert_messages"))
def test_a_request_converts_as_in_the_official_codec(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert converted(given) == expected


@pytest.mark.parametrize(("given", "expected"), cases("render", "render_injection", "render_random"))
def test_a_conversation_renders_as_in_the_official_codec(given: dict[str, Any], expected: dict[str, Any]) -> None:
    conversation = conversation_from_json(given["conversation"])
    for version, encoding_type in ENCODINGS.items():
        encoding = encoding_type()
        if "special_tokens" in given:
            encoding = encoding.with_special_tokens(recipe.SpecialTokens(**given["special_tokens"]))
        rendered = encoding.render_conversation(conversation)
        wanted = expected[version]
        assert rendered.prompt == wanted["prompt"]
        assert rendered.special_ranges == [tuple(pair) for pair in wanted["special_ranges"]]
        shown = conversation_to_json(recipe.Conversation([recipe.UserMessage("", rendered.image_sources)]))
        assert shown["messages"][0]["image_sources"] == wanted["image_sources"]


@pytest.mark.parametrize(("given", "expected"), cases("encode"))
def test_a_conversation_encodes_as_in_the_official_codec(
    given: dict[str, Any], expected: dict[str, Any], v4_tokenizer: recipe.Tokenizer, v41_tokenizer: recipe.Tokenizer
) -> None:
    conversation = conversation_from_json(given["conversation"])
    for version, tokenizer in (("v4", v4_tokenizer), ("v4.1", v41_tokenizer)):
        encoding = ENCODINGS[version]().with_tokenizer(tokenizer)
        if "error" in expected[version]:
            with pytest.raises(RuntimeError):
                encoding.encode(conversation)
        else:
            assert encoding.encode(conversation) == expected[version]["ids"]
            assert encoding.count_tokens(conversation) == len(expected[version]["ids"])


def number_cases(kind: str) -> list[Any]:
    found = load_cases("numbers")
    return [pytest.param(c["input"], c["expected"], id=c["id"]) for c in found if c["kind"] == kind]


@pytest.mark.parametrize(("given", "expected"), number_cases("resolve_max_tokens"))
def test_max_tokens_resolve_as_in_the_official_codec(given: dict[str, Any], expected: dict[str, Any]) -> None:
    request = recipe.ChatCompletionRequest(json.dumps(given["body"])).convert(recipe.ConversionOptions())

    def resolved(prompt_tokens: int, context_limit: int) -> Any:
        try:
            return request.resolve_max_tokens(prompt_tokens, context_limit)
        except recipe.ConversionError as error:
            return {"status_code": error.status_code}

    assert [resolved(*row) for row in given["rows"]] == expected["values"]


@pytest.mark.parametrize(("given", "expected"), number_cases("image_tokens"))
def test_image_tokens_count_as_in_the_official_codec(given: dict[str, Any], expected: dict[str, Any]) -> None:
    images = [recipe.ImageInfo(b"x", width, height) for width, height in given["sizes"]]
    counts = [recipe.MultiModalData([image]).image_token_adjustment() + 1 for image in images]
    assert counts == expected["tokens"]
    assert recipe.MultiModalData(images).image_token_adjustment() == expected["sum_adjustment"]


def test_the_protocol_strings_are_those_of_the_fixture() -> None:
    strings = json.loads((FIXTURES / "strings.json").read_text())
    assert strings["special_tokens"] == protocol_data.SPECIAL_TOKEN_SPELLINGS
    assert strings["image_special_token_id"] == protocol_data.IMAGE_SPECIAL_TOKEN_ID
    patch = strings["apply_patch_tool"]
    assert patch["name"] == protocol_data.APPLY_PATCH_NAME
    assert patch["description"] == protocol_data.APPLY_PATCH_DESCRIPTION
    assert json.dumps(patch["parameters"]) == json.dumps(protocol_data.APPLY_PATCH_PARAMETERS)
    for version, encoding_type in (("v4", recipe.DeepseekV4Encoding), ("v4_1", recipe.DeepseekV41Encoding)):
        wanted = strings[version]
        efforts = {"default" if effort is None else effort: text for effort, text in encoding_type.preambles.items()}
        assert efforts == wanted["effort_preamble"]
        assert encoding_type.json_object_block == wanted["json_object_block"]
        assert wanted["json_schema_block_prefix"] == protocol_data.JSON_SCHEMA_PREFIX
        tools = recipe.Conversation([], tools=[recipe.ToolDefinition("f")], thinking_mode=False, tool_choice="required")
        prompt = encoding_type().render_conversation(tools).prompt
        assert wanted["tools_block"]["before_schemas"] in prompt
        assert wanted["tools_block"]["after_schemas"] in prompt
        assert prompt.endswith(wanted["required_tool_suffix"])
