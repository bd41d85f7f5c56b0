"""Conversion for V4 Pro, which has rules of its own for system messages and namespaces."""

from __future__ import annotations

from typing import Any

import pytest

import deepseek_recipe as recipe
from tests.recipe.short_requests import HI, STRICT, messages, responses


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
