"""What a Chat Completions body may hold."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from deepseek_recipe.images.sources import Detail
from deepseek_recipe.requests.wire import U8, U32, U64, EffortWord, TextPart

__all__ = ["ChatBody", "ExtendedChatBody"]


class ImageUrl(msgspec.Struct):
    """Where an image is."""

    url: str
    detail: Detail | None = None


class ImageUrlPart(msgspec.Struct, tag="image_url", tag_field="type"):
    """A part that is an image."""

    image_url: ImageUrl


class FilePart(msgspec.Struct, tag="file", tag_field="type"):
    """A part that is a file."""

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None


Part = TextPart | ImageUrlPart | FilePart
Content = str | list[Part]


class SystemTurn(msgspec.Struct, tag="system", tag_field="role"):
    """A system message."""

    content: Content
    name: str | None = None


class DeveloperTurn(msgspec.Struct, tag="developer", tag_field="role"):
    """A developer message (extended dialect)."""

    content: Content
    name: str | None = None


class UserTurn(msgspec.Struct, tag="user", tag_field="role"):
    """A user message."""

    content: Content
    name: str | None = None


class FunctionCall(msgspec.Struct):
    """The function part of a call."""

    name: str
    arguments: str


class Call(msgspec.Struct):
    """A call that the assistant made."""

    type: Literal["function"]
    id: str
    function: FunctionCall


class AssistantTurn(msgspec.Struct, tag="assistant", tag_field="role"):
    """An assistant message."""

    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    prefix: bool | None = None
    name: str | None = None


class ToolTurn(msgspec.Struct, tag="tool", tag_field="role"):
    """The result of a call."""

    content: Content
    tool_call_id: str


class ReminderTurn(msgspec.Struct, tag="latest_reminder", tag_field="role"):
    """A reminder about the present moment."""

    content: str


class Thinking(msgspec.Struct):
    """Whether the model thinks."""

    type: Literal["enabled", "adaptive", "disabled"]


class StreamOptions(msgspec.Struct):
    """What a stream carries."""

    include_usage: bool | None = None


class TextFormat(msgspec.Struct, tag="text", tag_field="type"):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, tag="json_object", tag_field="type"):
    """Any JSON object."""


class JsonSchema(msgspec.Struct):
    """A schema for the answer."""

    schema: Any
    name: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag="json_schema", tag_field="type"):
    """JSON that fits a schema."""

    json_schema: JsonSchema


class RegexFormat(msgspec.Struct, tag="regex", tag_field="type"):
    """Text that matches a regular expression."""

    regex: str


class Function(msgspec.Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct):
    """The name in a tool choice."""

    name: str


class NamedChoice(msgspec.Struct):
    """The choice of one tool."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(msgspec.Struct):
    """A whole body. The last fields belong to the extended dialect and are checked only there."""

    model: str
    messages: list[SystemTurn | UserTurn | AssistantTurn | ToolTurn | ReminderTurn]
    thinking: Thinking | None = None
    reasoning_effort: EffortWord | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: U32 | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: U8 | None = None
    logprobs: bool | None = None
    top_logprobs: U8 | None = None
    seed: U64 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None

    def __post_init__(self) -> None:
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed: {self.seed} is outside the range of 64-bit integers")


class ExtendedChatBody(ChatBody, kw_only=True):
    """A whole body with what only the extended dialect parses: the developer role and signed seeds."""

    # A wider type than the base's: it only reads more.
    messages: list[SystemTurn | DeveloperTurn | UserTurn | AssistantTurn | ToolTurn | ReminderTurn]  # pyright: ignore[reportIncompatibleVariableOverride]
    seed: int | None = None
