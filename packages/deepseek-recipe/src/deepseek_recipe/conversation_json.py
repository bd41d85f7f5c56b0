"""Conversations as plain JSON values, under the property names of `deepseek_recipe.conversation`.

    {"messages": [{"role": "user", "content": "hi", ...}], "thinking_mode": true, "tools": [], ...}

The form is that of the test vectors; the command line reads and writes it.
"""

from __future__ import annotations

import base64
from typing import Any

from deepseek_recipe.conversation import (
    AssistantMessage,
    Conversation,
    LatestReminderMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from deepseek_recipe.images.sources import BytesImageSource, DataUrlImageSource, ImageSource, UrlImageSource

__all__ = ["conversation_from_json", "conversation_to_json"]


def conversation_to_json(conversation: Conversation) -> dict[str, Any]:
    """All properties of `conversation`; bytes of images as base64."""
    return {
        "messages": [_message_to_json(message) for message in conversation.messages],
        "thinking_mode": conversation.thinking_mode,
        "tools": [tool_to_json(tool) for tool in conversation.tools],
        "tool_choice": conversation.tool_choice,
        "reasoning_effort": conversation.reasoning_effort,
        "response_format": conversation.response_format,
        "response_schema": conversation.response_schema,
        "response_regex": conversation.response_regex,
    }


def conversation_from_json(value: dict[str, Any]) -> Conversation:
    """The conversation that `conversation_to_json` wrote; absent properties take their defaults.

    Raises `ValueError` that names what is missing or unknown, and what the constructors raise.
    """
    known = set(Conversation.__struct_fields__)
    if unknown := set(value) - known:
        raise ValueError(f"unknown properties of a conversation: {', '.join(sorted(unknown))}")
    given = {k: v for k, v in value.items() if v is not None and k not in ("messages", "tools")}
    if given.get("response_format") in ("json_schema", "regex"):
        del given["response_format"]  # it follows from the schema or the regex
    return Conversation(
        messages=[_message_from_json(m) for m in value.get("messages") or ()],
        tools=[ToolDefinition(**t) for t in value.get("tools") or ()],
        **given,
    )


def tool_to_json(tool: ToolDefinition) -> dict[str, Any]:
    """All properties of a tool."""
    return {name: getattr(tool, name) for name in tool.__struct_fields__}


def _message_to_json(message: Message) -> dict[str, Any]:
    calls = message.tool_calls
    out: dict[str, Any] = {
        "role": message.role,
        "content": message.content,
        "reasoning_content": message.reasoning_content,
        "prefix": message.prefix,
        "tool_call_id": message.tool_call_id,
        "image_sources": [_source_to_json(source) for source in message.image_sources],
        "tool_calls": None
        if calls is None
        else [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in calls],
    }
    if isinstance(message, SystemMessage):
        out["tools"] = None if message.tools is None else [tool_to_json(tool) for tool in message.tools]
    return out


def _message_from_json(value: dict[str, Any]) -> Message:
    content = value.get("content", "")
    images = [_source_from_json(source) for source in value.get("image_sources") or ()]
    role = value.get("role")
    if role == "system":
        tools = value.get("tools")
        return SystemMessage(content, images, None if tools is None else [ToolDefinition(**t) for t in tools])
    if role == "user":
        return UserMessage(content, images)
    if role == "tool":
        return ToolMessage(content, value.get("tool_call_id"), images)
    if role == "latest_reminder":
        return LatestReminderMessage(content)
    if role == "assistant":
        calls = value.get("tool_calls")
        calls = None if calls is None else [ToolCall(**call) for call in calls]
        return AssistantMessage(content, value.get("reasoning_content"), calls, bool(value.get("prefix")))
    raise ValueError(f"unknown role {role!r} of a message")


def _source_to_json(source: ImageSource) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": source.kind, "detail": source.detail, "path": source.path}
    if source.data is not None:
        return {**out, "data": base64.b64encode(source.data).decode()}
    return {**out, source.kind: getattr(source, source.kind)}


def _source_from_json(value: dict[str, Any]) -> ImageSource:
    kind, detail, path = value.get("kind"), value.get("detail", "high"), value.get("path", "")
    if kind == "data_url":
        return DataUrlImageSource(value["data_url"], detail, path)
    if kind == "url":
        return UrlImageSource(value["url"], detail, path)
    if kind == "bytes":
        return BytesImageSource(base64.b64decode(value["data"], validate=True), detail, path)
    raise ValueError(f"unknown kind {kind!r} of an image source")
