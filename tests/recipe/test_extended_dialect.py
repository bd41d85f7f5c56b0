"""The extended dialect: fields of other servers, and what strict does with them."""

from __future__ import annotations

from typing import Any

import pytest

import deepseek_recipe as recipe
from tests.recipe.short_requests import EXTENDED, HI, MODEL, TOOLS, chat, messages, responses


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
