"""Conversations as plain JSON values, under the property names of `deepseek_recipe.conversation`.

    {"messages": [{"role": "user", "content": "hi", ...}], "thinking_mode": true, "tools": [], ...}

The form is that of the test vectors; the command line reads and writes it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, TypeVar

from deepseek_recipe.checks import clipped, shown
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
from deepseek_recipe.json_text import is_array, is_object

__all__ = ["conversation_from_json", "conversation_to_json"]

_Built = TypeVar("_Built")


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
        raise ValueError(f"unknown properties of a conversation: {clipped(', '.join(sorted(unknown)))}")
    given = {k: v for k, v in value.items() if v is not None and k not in ("messages", "tools")}
    if given.get("response_format") in ("json_schema", "regex"):
        del given["response_format"]  # it follows from the schema or the regex
    return Conversation(
        messages=[_message_from_json(message) for message in _objects(value, "messages") or ()],
        tools=[_built(ToolDefinition, tool) for tool in _objects(value, "tools") or ()],
        **given,
    )


def _objects(value: dict[str, Any], name: str) -> list[dict[str, Any]] | None:
    """The list of objects under `name`, if there is one."""
    items = value.get(name)
    if items is not None and not (is_array(items) and all(map(is_object, items))):
        raise ValueError(f"{name} must be a list of objects, not {items!r:.80}")
    return items


def _built(kind: Callable[..., _Built], fields: dict[str, Any]) -> _Built:
    try:
        return kind(**fields)
    except TypeError as error:  # fields that are missing, unknown, or of a wrong type
        raise ValueError(f"{error}, in {fields!r:.80}") from None


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
    if isinstance(message, (SystemMessage, UserMessage, ToolMessage)):
        out.update({name: value for name, value in _placeholders(message).items() if value is not None})
    return out


def _placeholders(message: SystemMessage | UserMessage | ToolMessage) -> dict[str, Any]:
    offsets = message.image_offsets
    return {"image_token": message.image_token, "image_offsets": None if offsets is None else list(offsets)}


def _message_from_json(value: dict[str, Any]) -> Message:
    content = value.get("content", "")
    images = [_source_from_json(source) for source in _objects(value, "image_sources") or ()]
    places = {name: value.get(name) for name in ("image_token", "image_offsets")}
    role = value.get("role")
    if role == "system":
        tools = _objects(value, "tools")
        tools = None if tools is None else [_built(ToolDefinition, tool) for tool in tools]
        return SystemMessage(content, images, tools, **places)
    if role == "user":
        return UserMessage(content, images, **places)
    if role == "tool":
        return ToolMessage(content, value.get("tool_call_id"), images, **places)
    if role == "latest_reminder":
        return LatestReminderMessage(content)
    if role == "assistant":
        calls = _objects(value, "tool_calls")
        calls = None if calls is None else [_built(ToolCall, call) for call in calls]
        return AssistantMessage(content, value.get("reasoning_content"), calls, bool(value.get("prefix")))
    raise ValueError(
        f"unknown role {shown(role)} of a message; the roles are system, user, assistant, tool and latest_reminder"
    )


def _source_to_json(source: ImageSource) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": source.kind, "detail": source.detail, "path": source.path}
    if source.data is not None:
        return {**out, "data": base64.b64encode(source.data).decode()}
    return {**out, source.kind: getattr(source, source.kind)}


def _source_from_json(value: dict[str, Any]) -> ImageSource:
    kinds: dict[str, Callable[..., ImageSource]] = {
        "data_url": DataUrlImageSource,
        "url": UrlImageSource,
        "bytes": _base64_source,
    }
    fields = dict(value)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"unknown kind {shown(kind)} of an image source; the kinds are {', '.join(kinds)}")
    return _built(kinds[kind], fields)


def _base64_source(data: str, **place: Any) -> BytesImageSource:
    return BytesImageSource(base64.b64decode(data, validate=True), **place)
