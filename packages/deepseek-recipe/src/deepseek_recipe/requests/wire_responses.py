"""What a Responses body may hold.

Items and tools of unknown types are skipped by the protocol, so they are read one by one (`parse_item`, `parse_tool`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from deepseek_recipe.checks import shown
from deepseek_recipe.images.sources import Detail
from deepseek_recipe.json_text import is_object
from deepseek_recipe.requests.wire import U8, U32, EffortWord, parse_value

__all__ = ["ResponsesBody", "parse_item", "parse_tool"]


class InputText(msgspec.Struct, tag="input_text", tag_field="type"):
    """Text."""

    text: str


class OutputText(msgspec.Struct, tag="output_text", tag_field="type"):
    """Text that the model wrote."""

    text: str


class InputImage(msgspec.Struct, tag="input_image", tag_field="type"):
    """An image."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Detail | None = None


class InputFile(msgspec.Struct, tag="input_file", tag_field="type"):
    """A file; only its place is kept."""


class MessageItem(msgspec.Struct):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | InputImage | InputFile]


class ReasoningText(msgspec.Struct):
    """A piece of reasoning."""

    text: str


class ReasoningItem(msgspec.Struct):
    """Reasoning of the model."""

    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct):
    """A call of a function."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(msgspec.Struct):
    """A call of a tool with free text as its input."""

    call_id: str
    name: str
    input: str


class ToolSearchCallItem(msgspec.Struct):
    """A search for tools."""

    call_id: str
    arguments: dict[str, Any]
    execution: Literal["client", "server"] | None = None


class FunctionOutputItem(msgspec.Struct):
    """The result of a function call; without an id it answers no call and stands alone."""

    output: str | list[InputText | InputImage | InputFile]
    call_id: str | None = None


class OutputItem(msgspec.Struct):
    """The result of a custom call."""

    call_id: str
    output: str | list[InputText | InputImage | InputFile]


class ToolSearchOutputItem(msgspec.Struct):
    """The tools that a search found."""

    call_id: str
    tools: list[Any]
    execution: Literal["client", "server"] | None = None


Item = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomCallItem
    | ToolSearchCallItem
    | FunctionOutputItem
    | OutputItem
    | ToolSearchOutputItem
)

_ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "custom_tool_call": CustomCallItem,
    "tool_search_call": ToolSearchCallItem,
    "function_call_output": FunctionOutputItem,
    "custom_tool_call_output": OutputItem,
    "tool_search_output": ToolSearchOutputItem,
}


class FunctionTool(msgspec.Struct, tag="function", tag_field="type"):
    """A function that the model may call. The order of the fields is that of the echo."""

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class CustomTool(msgspec.Struct, tag="custom", tag_field="type"):
    """A tool with free text as its input."""

    name: str


class NamespaceTool(msgspec.Struct, tag="namespace", tag_field="type"):
    """A group of functions."""

    name: str
    description: str | None = None
    tools: list[FunctionTool | CustomTool] = []


class ToolSearchTool(msgspec.Struct, tag="tool_search", tag_field="type"):
    """A search for tools, run by the client or by a server."""

    execution: Literal["client", "server"] | None = None
    description: str | None = None
    parameters: Any = None


class WebSearchTool(msgspec.Struct, tag="web_search", tag_field="type"):
    """Hosted web search."""

    search_context_size: str | None = None
    user_location: Any = None


class DatedWebSearchTool(WebSearchTool, tag="web_search_2025_08_26", tag_field="type"):
    """Hosted web search, of a version."""


Tool = FunctionTool | CustomTool | NamespaceTool | ToolSearchTool | WebSearchTool | DatedWebSearchTool
_TOOLS: dict[str, type[Tool]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    "namespace": NamespaceTool,
    "tool_search": ToolSearchTool,
    "web_search": WebSearchTool,
    "web_search_2025_08_26": DatedWebSearchTool,
}


class Reasoning(msgspec.Struct):
    """How much the model thinks."""

    effort: EffortWord | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(msgspec.Struct, tag="text", tag_field="type"):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, tag="json_object", tag_field="type"):
    """Any JSON object."""


class JsonSchemaFormat(msgspec.Struct, tag="json_schema", tag_field="type"):
    """JSON that fits a schema. The order of the fields is that of the echo."""

    name: str
    schema: Any
    description: str | None = None
    strict: bool | None = None


class Text(msgspec.Struct):
    """What the answer looks like."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat = msgspec.field(default_factory=TextFormat)
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionChoice(msgspec.Struct, tag="function", tag_field="type"):
    """The choice of one function."""

    name: str


class CustomChoice(msgspec.Struct, tag="custom", tag_field="type"):
    """The choice of one custom tool."""

    name: str


class WebSearchChoice(msgspec.Struct, tag="web_search", tag_field="type"):
    """The choice of hosted web search."""


class DatedWebSearchChoice(msgspec.Struct, tag="web_search_2025_08_26", tag_field="type"):
    """The choice of hosted web search, of a version."""


class ResponsesBody(msgspec.Struct):
    """A whole body. The last fields belong to the extended dialect and are checked only there."""

    model: str
    input: str | list[Any] | None = None
    instructions: str | None = None
    reasoning: Reasoning | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: U32 | None = None
    top_logprobs: U8 | None = None
    stream: bool | None = None
    text: Text | None = None
    tools: list[Any] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | FunctionChoice
        | CustomChoice
        | WebSearchChoice
        | DatedWebSearchChoice
        | None
    ) = None
    user: str | None = None
    seed: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    parallel_tool_calls: Any = None


def parse_item(value: Any, path: str) -> Item | None:
    """The input item at `path`, or None for a type that the protocol skips."""
    kind = _kind(value, path, default="message")
    shape = _ITEMS.get(kind)
    return None if shape is None else parse_value(value, shape, path)


def parse_tool(value: Any, path: str) -> Tool | None:
    """The tool at `path`, or None for a type that the protocol drops."""
    kind = _kind(value, path, default=None)
    shape = _TOOLS.get(kind)
    if shape is NamespaceTool and "tools" not in value:
        raise ValueError(f"invalid request body: {path}: a namespace needs the list `tools`")
    return None if shape is None else parse_value(value, shape, path)


def _kind(value: Any, path: str, *, default: str | None) -> str:
    if not is_object(value):
        raise ValueError(f"invalid request body: {path}: expected an object, got {type(value).__name__}")
    kind = value.get("type", default)
    if not isinstance(kind, str):
        raise ValueError(f"invalid request body: {path}.type: expected a string, got {shown(kind)}")
    return kind
