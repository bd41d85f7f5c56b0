"""What a Responses response repeats of its request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from deepseek_recipe.requests import wire_responses as wire
from deepseek_recipe.requests.wire import as_f32

__all__ = ["ReplySettings", "ResponsesEcho", "echo_of", "reply_settings"]


class ResponsesEcho(msgspec.Struct, frozen=True, kw_only=True):
    """The echoed fields; without a request, their defaults.

    `reasoning`, `text`, `tool_choice` and `tools` are JSON values in the form of the response object.
    """

    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int = 0
    user: str | None = None
    reasoning: dict[str, Any] = msgspec.field(default_factory=lambda: {"effort": None, "summary": None})
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}, "verbosity": None})
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = msgspec.field(default_factory=lambda: [])  # noqa: PIE807 - pyright needs the type

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return msgspec.structs.asdict(self)


def echo_of(body: wire.ResponsesBody, tools: Sequence[wire.Tool | None]) -> ResponsesEcho:
    """The echo of a parsed body; tools of unknown type are left out."""
    reasoning = body.reasoning or wire.Reasoning()
    text = body.text or wire.Text()
    return ResponsesEcho(
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        temperature=1.0 if body.temperature is None else as_f32(body.temperature),
        top_p=1.0 if body.top_p is None else as_f32(body.top_p),
        top_logprobs=body.top_logprobs or 0,
        user=body.user,
        reasoning={"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        text=msgspec.to_builtins(text),
        tool_choice="auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
        tools=[msgspec.to_builtins(tool) for tool in tools if tool is not None],
    )


class ReplySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the events of a reply need of the request: its echo, and which calls take a form of their own."""

    echo: ResponsesEcho = msgspec.field(default_factory=ResponsesEcho)
    namespaces: dict[str, tuple[str, str]] = {}
    custom_tools: frozenset[str] = frozenset()
    searches_tools: bool = False


def reply_settings(
    body: wire.ResponsesBody, tools: Sequence[wire.Tool | None], namespaces: dict[str, tuple[str, str]]
) -> ReplySettings:
    """The settings of the reply to a parsed body."""
    return ReplySettings(
        echo=echo_of(body, tools),
        namespaces=namespaces,
        custom_tools=frozenset(tool.name for tool in tools if isinstance(tool, wire.CustomTool)),
        searches_tools=any(isinstance(tool, wire.ToolSearchTool) and tool.execution == "client" for tool in tools),
    )
