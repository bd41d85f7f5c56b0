"""The one conversation model that the three APIs are converted into and that the encodings render.

    Conversation
      messages: system | user | assistant | tool | latest_reminder, each with `content` and what its role allows
      thinking_mode, reasoning_effort, tools, tool_choice, response_format (+ response_schema | response_regex)

All objects are immutable values: they compare by content, and lists given to a constructor are copied.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec.structs import force_setattr

from deepseek_recipe.checks import quoted, require_bool, require_list, require_str, shown
from deepseek_recipe.images.sources import ImageSource
from deepseek_recipe.json_text import json_value

__all__ = [
    "AssistantMessage",
    "Conversation",
    "LatestReminderMessage",
    "Message",
    "SystemMessage",
    "ToolCall",
    "ToolDefinition",
    "ToolMessage",
    "UserMessage",
]

T = TypeVar("T")
ToolChoice = Literal["auto", "none", "required"]
Effort = Literal["low", "high", "xhigh", "max"]
ResponseFormat = Literal["text", "json_object", "json_schema", "regex"]


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the assistant made. `arguments` is the text as it came; it need not be JSON."""

    id: str
    name: str
    arguments: str

    def __post_init__(self) -> None:
        require_str("id", self.id)
        require_str("name", self.name)
        require_str("arguments", self.arguments)

    def __repr__(self) -> str:
        return f"ToolCall(id={quoted(self.id)}, name={quoted(self.name)}, arguments={quoted(self.arguments)})"


class ToolDefinition(msgspec.Struct, frozen=True):
    """A tool that the model may call. `parameters` is any JSON value, usually a JSON Schema of type object."""

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None
    defer_loading: bool = False

    def __post_init__(self) -> None:
        require_str("name", self.name)
        require_str("description", self.description, optional=True)
        force_setattr(self, "parameters", json_value(self.parameters))
        require_bool("strict", self.strict, optional=True)
        require_bool("defer_loading", self.defer_loading)

    def __repr__(self) -> str:
        description = "None" if self.description is None else quoted(self.description)
        return f"ToolDefinition(name={quoted(self.name)}, description={description}, strict={self.strict})"


class Message:
    """Base of the five roles; what a role does not have reads None, False or an empty list."""

    __slots__ = ()

    role: ClassVar[str]
    content: str

    @property
    def reasoning_content(self) -> str | None:
        """The reasoning of an assistant message."""
        return None

    @property
    def tool_calls(self) -> list[ToolCall] | None:
        """The calls of an assistant message."""
        return None

    @property
    def tool_call_id(self) -> str | None:
        """The call that a tool message answers."""
        return None

    @property
    def image_sources(self) -> list[ImageSource]:
        """The images of a system, user or tool message, in the order of their placeholders."""
        return []

    @property
    def prefix(self) -> bool:
        """Whether the model continues this assistant message."""
        return False


def _no_sources() -> list[ImageSource]:
    return []


def _no_messages() -> list[Message]:
    return []


def _no_tools() -> list[ToolDefinition]:
    return []


def _listed(name: str, value: object, kind: type[T]) -> list[T]:
    return [] if value is None else require_list(name, value, kind)


class _Placeholders(msgspec.Struct, frozen=True, kw_only=True):
    """What the roles with images take by name."""

    image_token: str | None = None
    image_offsets: tuple[int, ...] | None = None


def _settle_images(message: SystemMessage | UserMessage | ToolMessage) -> None:
    require_str("content", message.content)
    force_setattr(message, "image_sources", _listed("image_sources", message.image_sources, ImageSource))
    if message.image_token is not None:
        require_str("image_token", message.image_token)
        if not message.image_token:
            raise ValueError("image_token must not be empty")
    if message.image_offsets is not None:
        force_setattr(message, "image_offsets", tuple(require_list("image_offsets", message.image_offsets, int)))


class SystemMessage(_Placeholders, Message, frozen=True):
    """Instructions; `tools` are tools that become known at this place (V4.1 shows them, V4 does not).

    Here and in the other roles with images: the first N occurrences of `image_token` in `content` (default: the
    spelling of the Image token) are the placeholders of the N sources, or, where `image_offsets` is given, the
    spellings that start at these offsets. Every further occurrence is text.
    """

    role: ClassVar[str] = "system"
    content: str
    image_sources: list[ImageSource] = msgspec.field(  # pyright: ignore[reportIncompatibleMethodOverride] - as above
        default_factory=_no_sources
    )
    tools: list[ToolDefinition] | None = None

    def __post_init__(self) -> None:
        _settle_images(self)
        if self.tools is not None:
            force_setattr(self, "tools", require_list("tools", self.tools, ToolDefinition))

    def __repr__(self) -> str:
        return f"SystemMessage({quoted(self.content)})"


class UserMessage(_Placeholders, Message, frozen=True):
    """What the user says; images as in `SystemMessage`."""

    role: ClassVar[str] = "user"
    content: str
    image_sources: list[ImageSource] = msgspec.field(  # pyright: ignore[reportIncompatibleMethodOverride] - as above
        default_factory=_no_sources
    )

    def __post_init__(self) -> None:
        _settle_images(self)

    def __repr__(self) -> str:
        return f"UserMessage({quoted(self.content)}, image_sources={len(self.image_sources)})"


class ToolMessage(_Placeholders, Message, frozen=True):
    """The result of the call `tool_call_id`; images as in `SystemMessage`."""

    role: ClassVar[str] = "tool"
    content: str
    tool_call_id: str | None = None  # pyright: ignore[reportIncompatibleMethodOverride] - a field for the default
    image_sources: list[ImageSource] = msgspec.field(  # pyright: ignore[reportIncompatibleMethodOverride] - as above
        default_factory=_no_sources
    )

    def __post_init__(self) -> None:
        require_str("tool_call_id", self.tool_call_id, optional=True)
        _settle_images(self)

    def __repr__(self) -> str:
        call = "None" if self.tool_call_id is None else quoted(self.tool_call_id)
        return f"ToolMessage({quoted(self.content)}, tool_call_id={call}, image_sources={len(self.image_sources)})"


class AssistantMessage(msgspec.Struct, Message, frozen=True):
    """What the model said; with `prefix` and as the last message, what it shall continue."""

    role: ClassVar[str] = "assistant"
    content: str
    reasoning_content: str | None = None  # pyright: ignore[reportIncompatibleMethodOverride] - a field for the default
    tool_calls: list[ToolCall] | None = None  # pyright: ignore[reportIncompatibleMethodOverride] - a field for the default
    prefix: bool = False  # pyright: ignore[reportIncompatibleMethodOverride] - a field for the default

    def __post_init__(self) -> None:
        require_str("content", self.content)
        if self.reasoning_content is not None:
            require_str("reasoning_content", self.reasoning_content)
        if self.tool_calls is not None:
            force_setattr(self, "tool_calls", require_list("tool_calls", self.tool_calls, ToolCall))
        require_bool("prefix", self.prefix)

    def __repr__(self) -> str:
        has_reasoning, num_calls = self.reasoning_content is not None, len(self.tool_calls or ())
        return (
            f"AssistantMessage({quoted(self.content)}, reasoning_content={has_reasoning}, "
            f"tool_calls={num_calls}, prefix={self.prefix})"
        )


class LatestReminderMessage(msgspec.Struct, Message, frozen=True):
    """A reminder about the present moment, such as the date."""

    role: ClassVar[str] = "latest_reminder"
    content: str

    def __post_init__(self) -> None:
        require_str("content", self.content)

    def __repr__(self) -> str:
        return f"LatestReminderMessage({quoted(self.content)})"


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a conversation takes by name."""

    thinking_mode: bool = True
    tools: list[ToolDefinition] = msgspec.field(default_factory=_no_tools)
    tool_choice: ToolChoice = "auto"
    reasoning_effort: Effort | None = None
    response_format: ResponseFormat = "text"
    response_schema: Any = None
    response_regex: str | None = None


class Conversation(_Settings, frozen=True):
    """Everything that a prompt shows.

    `response_format` takes "text" or "json_object" and reads back "json_schema" or "regex" where `response_schema` or
    `response_regex` was given. `tools` reads an empty list where none are.
    """

    messages: list[Message] = msgspec.field(default_factory=_no_messages)

    def __post_init__(self) -> None:
        force_setattr(self, "messages", _listed("messages", self.messages, Message))
        require_bool("thinking_mode", self.thinking_mode)
        force_setattr(self, "tools", _listed("tools", self.tools, ToolDefinition))
        _require_one_of("tool_choice", self.tool_choice, ("auto", "none", "required"))
        if self.reasoning_effort is not None:
            _require_one_of("reasoning_effort", self.reasoning_effort, ("low", "high", "xhigh", "max"))
        require_str("response_regex", self.response_regex, optional=True)
        self._settle_response_format()

    def _settle_response_format(self) -> None:
        has_schema, has_regex = self.response_schema is not None, self.response_regex is not None
        if has_schema and has_regex:
            raise ValueError("response_schema and response_regex cannot be combined: give one of them")
        _require_one_of("response_format", self.response_format, ("text", "json_object"))
        if not has_schema and not has_regex:
            return
        if self.response_format == "json_object":
            raise ValueError('response_format "json_object" cannot be combined with response_schema or response_regex')
        force_setattr(self, "response_format", "json_schema" if has_schema else "regex")
        force_setattr(self, "response_schema", json_value(self.response_schema))

    @property
    def tools_active(self) -> bool:
        """Whether the model may call a tool: there are some, and the choice is not none."""
        return bool(self.tools) and self.tool_choice != "none"

    def __repr__(self) -> str:
        effort = None if self.reasoning_effort is None else quoted(self.reasoning_effort)
        return (
            f"Conversation(messages={len(self.messages)}, thinking_mode={self.thinking_mode}, tools={len(self.tools)}, "
            f"tool_choice={quoted(self.tool_choice)}, reasoning_effort={effort}, "
            f"response_format={quoted(self.response_format)})"
        )


def _require_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    require_str(name, value)
    if value not in allowed:
        raise ValueError(f"invalid {name} {shown(value)}; expected one of {', '.join(allowed)}")
