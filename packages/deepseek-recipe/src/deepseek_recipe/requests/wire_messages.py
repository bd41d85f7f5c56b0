"""What a Messages body may hold."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from deepseek_recipe.json_text import is_object
from deepseek_recipe.requests.wire import U32, U64, EffortWord, TextPart, parse_value

__all__ = ["ExtendedMessagesBody", "MessagesBody", "parse_tool"]


class Base64Source(msgspec.Struct, tag="base64", tag_field="type"):
    """An image in the body."""

    media_type: Literal["image/jpeg", "image/jpg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(msgspec.Struct, tag="url", tag_field="type"):
    """An image to fetch."""

    url: str


class FileSource(msgspec.Struct, tag="file", tag_field="type"):
    """An image that was uploaded before."""


class ImageBlock(msgspec.Struct, tag="image", tag_field="type"):
    """An image."""

    source: Base64Source | UrlSource | FileSource


class DocumentSource(msgspec.Struct):
    """What kind of document it is."""

    media_type: str | None = None


class DocumentBlock(msgspec.Struct, tag="document", tag_field="type"):
    """A document; only its place and media type are kept."""

    source: DocumentSource


class ThinkingBlock(msgspec.Struct, tag="thinking", tag_field="type"):
    """Reasoning of the model."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking", tag_field="type"):
    """Reasoning that nobody can read (extended dialect: skipped)."""


class ServerToolUseBlock(msgspec.Struct, tag="server_tool_use", tag_field="type"):
    """A call of a hosted tool."""

    id: str
    name: str
    input: Any


class WebSearchResultBlock(msgspec.Struct, tag="web_search_tool_result", tag_field="type"):
    """What a hosted web search found."""

    tool_use_id: str
    content: Any


class ToolUseBlock(msgspec.Struct, tag="tool_use", tag_field="type"):
    """A call that the assistant made."""

    id: str
    name: str
    input: Any


class ToolReferencePart(msgspec.Struct, tag="tool_reference", tag_field="type"):
    """A tool that a result makes known."""

    tool_name: str


ResultPart = TextPart | ImageBlock | DocumentBlock | ToolReferencePart


class ToolResultBlock(msgspec.Struct, tag="tool_result", tag_field="type"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None


class ToolReference(msgspec.Struct):
    """The name of a declared tool."""

    type: Literal["tool_reference"]
    name: str


class ToolAdditionBlock(msgspec.Struct, tag="tool_addition", tag_field="type"):
    """A tool that a system message makes known."""

    tool: ToolReference


Block = (
    TextPart
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | ServerToolUseBlock
    | ToolUseBlock
    | ToolResultBlock
    | WebSearchResultBlock
    | ToolAdditionBlock
)
ExtendedBlock = Block | RedactedThinkingBlock


class SystemBlock(msgspec.Struct):
    """A block of the system prompt."""

    type: Literal["text"]
    text: str


class Turn(msgspec.Struct):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ExtendedTurn(msgspec.Struct):
    """A message with the blocks of the extended dialect."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ExtendedBlock]


class Thinking(msgspec.Struct):
    """Whether the model thinks."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: U64 | None = None


class OutputConfig(msgspec.Struct):
    """How much the model thinks."""

    effort: EffortWord | None = None


class Metadata(msgspec.Struct):
    """Who asks."""

    user_id: str | None = None


class Tool(msgspec.Struct):
    """A tool of the client."""

    name: str
    description: str | None = None
    input_schema: Any = None
    defer_loading: bool | None = None


class HostedTool(msgspec.Struct):
    """A tool with a type, which a server would have to run."""

    type: str
    name: str | None = None


class NamedChoice(msgspec.Struct, tag="tool", tag_field="type"):
    """The choice of one tool."""

    name: str
    disable_parallel_tool_use: Any = None


class AutoChoice(msgspec.Struct, tag="auto", tag_field="type"):
    """The model decides."""

    disable_parallel_tool_use: Any = None


class AnyChoice(msgspec.Struct, tag="any", tag_field="type"):
    """Some tool."""

    disable_parallel_tool_use: Any = None


class NoneChoice(msgspec.Struct, tag="none", tag_field="type"):
    """No tool."""


class MessagesBody(msgspec.Struct):
    """A whole body. The last fields belong to the extended dialect and are checked only there."""

    model: str
    messages: list[Turn]
    system: str | list[SystemBlock] | None = None
    max_tokens: U32 | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[Any] | None = None
    tool_choice: AutoChoice | AnyChoice | NoneChoice | NamedChoice | None = None
    metadata: Metadata | None = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    seed: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None


class ExtendedMessagesBody(MessagesBody, kw_only=True):
    """A whole body with the blocks that only the extended dialect parses."""

    # A wider type than the base's: it only reads more.
    messages: list[ExtendedTurn]  # pyright: ignore[reportIncompatibleVariableOverride]


def parse_tool(value: Any, path: str) -> Tool | HostedTool:
    """The tool at `path`: one with a `type` is hosted, whatever the type."""
    return parse_value(value, HostedTool if is_object(value) and "type" in value else Tool, path)
