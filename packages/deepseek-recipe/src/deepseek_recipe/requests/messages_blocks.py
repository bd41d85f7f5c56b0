"""Content blocks of Messages requests become messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from deepseek_recipe import protocol_data
from deepseek_recipe.checks import clipped, shown
from deepseek_recipe.conversation import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from deepseek_recipe.enums import ModelVersion, WebSearchBehavior
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.images.sources import ImageSource
from deepseek_recipe.json_text import spaced
from deepseek_recipe.requests import wire_messages as wire
from deepseek_recipe.requests.content import ContentBuilder
from deepseek_recipe.requests.images import base64_source, url_source
from deepseek_recipe.requests.options import ConversionOptions
from deepseek_recipe.requests.wire import TextPart
from deepseek_recipe.tokens import SpecialToken

__all__ = ["BlockConverter"]

_JOINT = "\n\n"
_ONLY_IN: dict[type, str] = {
    wire.ThinkingBlock: "assistant",
    wire.RedactedThinkingBlock: "assistant",
    wire.ToolUseBlock: "assistant",
    wire.ServerToolUseBlock: "assistant",
    wire.WebSearchResultBlock: "assistant",
    wire.ToolResultBlock: "user",
    wire.ToolAdditionBlock: "system",
}


class BlockConverter:
    """Converts the messages of a body. `declared` are the names of its tools, `active` those that may be called."""

    def __init__(
        self,
        version: ModelVersion,
        options: ConversionOptions,
        declared: set[str],
        active: Mapping[str, ToolDefinition],
    ) -> None:
        self._is_pro = version is ModelVersion.DeepseekV4Pro
        self._image = options.special_tokens.token(SpecialToken.Image)
        self._drops_web_search = options.messages_web_search is WebSearchBehavior.Drop
        self._declared = declared
        self._active = active
        self._open_ids: list[str] = []
        self._referenced: list[str] = []  # tools that the results of one message make known

    def convert(self, turns: Sequence[Any], out: list[Message]) -> None:
        """Appends the messages of all turns to `out`."""
        for index, turn in enumerate(turns):
            path = f"messages.{index}"
            blocks = [TextPart(turn.content)] if isinstance(turn.content, str) else turn.content
            if not blocks and turn.role != "system":
                raise ConversionError(f"{path}: the list of content blocks must not be empty")
            for place, block in enumerate(blocks):
                role = _ONLY_IN.get(type(block), turn.role)
                if role != turn.role:
                    kind = type(block).__struct_config__.tag
                    raise ConversionError(f"{path}.content[{place}]: {kind} blocks can only be in {role} messages")
            if turn.role != "user":
                self._require_no_open_calls(path)
            if turn.role == "user":
                self._add_user(blocks, path, out)
            elif turn.role == "assistant":
                out.append(self._assistant(blocks, path))
            else:
                self._add_system(blocks, path, out)
        self._require_no_open_calls("messages")

    def _require_no_open_calls(self, path: str) -> None:
        if self._open_ids:
            missing = clipped(", ".join(self._open_ids))
            raise ConversionError(f"{path}: tool_result blocks are missing for the calls {missing}")

    # ---- user --------------------------------------------------------------------------------------------------------

    def _add_user(self, blocks: Sequence[Any], path: str, out: list[Message]) -> None:
        num_results = 0
        while num_results < len(blocks) and isinstance(blocks[num_results], wire.ToolResultBlock):
            out.append(self._tool_result(blocks[num_results], f"{path}.content.{num_results}"))
            num_results += 1
        self._require_no_open_calls(path)
        for index in range(num_results, len(blocks)):
            block = blocks[index]
            if isinstance(block, wire.ToolResultBlock):
                raise ConversionError(f"{path}.content[{index}]: tool_result blocks must come first in their message")
            part_path = f"{path}.content[{index}]"
            content = self._content([block], part_path, partial(_only_place, part_path))
            out.append(UserMessage(content.text, content.sources, **content.placeholders))
        if self._referenced:
            names = dict.fromkeys(self._referenced)
            known = [self._active[name] for name in names if name in self._active]
            if known and not self._is_pro:
                out.append(SystemMessage("", [], known))
            self._referenced = []

    def _tool_result(self, block: wire.ToolResultBlock, path: str) -> ToolMessage:
        if block.tool_use_id not in self._open_ids:
            raise ConversionError(f"{path}: {shown(block.tool_use_id)} answers no open tool_use of the message before")
        self._open_ids.remove(block.tool_use_id)
        parts = [TextPart(block.content)] if isinstance(block.content, str) else block.content or []
        place = f"{path}.tool_result"
        content = self._content(parts, place, lambda index: f"{place}.content[{index}]")
        return ToolMessage(content.text, block.tool_use_id, content.sources, **content.placeholders)

    # ---- assistant and system ----------------------------------------------------------------------------------------

    def _assistant(self, blocks: Sequence[Any], path: str) -> AssistantMessage:
        text = ""
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for index, block in enumerate(blocks):
            place = f"{path}.content[{index}]"
            if isinstance(block, wire.ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, wire.ToolUseBlock):
                calls.append(ToolCall(block.id, block.name, spaced(block.input)))
            elif isinstance(block, (wire.ServerToolUseBlock, wire.WebSearchResultBlock)):
                if not self._drops_web_search:
                    raise ConversionError(f"{place}: hosted tools are not supported")
            elif isinstance(block, wire.ImageBlock) and not self._is_pro:
                raise ConversionError(f"{place}: images in assistant messages are not supported")
            elif not isinstance(block, wire.RedactedThinkingBlock):
                if calls:
                    raise ConversionError(f"{place}: nothing but tool_use and thinking may follow a tool_use block")
                text += (_JOINT if text else "") + _text_of(block)  # nothing before the first text, even an empty one
        self._open_ids = [call.id for call in calls]
        if len(set(self._open_ids)) != len(calls):
            raise ConversionError(f"{path}: two tool_use blocks share an id")
        return AssistantMessage(text, _JOINT.join(thoughts) if thoughts else None, calls or None)

    def _add_system(self, blocks: Sequence[Any], path: str, out: list[Message]) -> None:
        additions = [block.tool.name for block in blocks if isinstance(block, wire.ToolAdditionBlock)]
        for name in additions:
            self._require_declared(name, path)
        shown = [block for block in blocks if not isinstance(block, wire.ToolAdditionBlock)]
        content = self._content(shown, path, lambda index: f"{path}.content[{index}]")
        if self._is_pro:
            if content.text:
                out.append(UserMessage(protocol_data.SYSTEM_REMINDER.format(text=content.text)))
            return
        known = [self._active[name] for name in dict.fromkeys(additions) if name in self._active]
        out.append(SystemMessage(content.text, content.sources, known or None, **content.placeholders))

    def _require_declared(self, name: str, path: str) -> None:
        if name not in self._declared:
            raise ConversionError(f"{path}: the tool {shown(name)} is referenced but not declared in tools")

    # ---- content -----------------------------------------------------------------------------------------------------

    def _content(self, parts: Sequence[Any], path: str, part_path: Callable[[int], str]) -> ContentBuilder:
        out = ContentBuilder(self._image)
        for index, part in enumerate(parts):
            if isinstance(part, wire.ImageBlock):
                if self._is_pro:
                    out.add_text(protocol_data.IMAGE_UNSUPPORTED_PLACEHOLDER)
                else:
                    out.add_image(_image(part, path, part_path(index)))
            elif isinstance(part, wire.ToolReferencePart):
                self._require_declared(part.tool_name, part_path(index))
                self._referenced.append(part.tool_name)
                out.add_text(part.tool_name)
            else:
                out.add_text(_text_of(part))
        return out


def _only_place(place: str, index: int) -> str:
    del index  # a message of one part
    return place


def _text_of(block: Any) -> str:
    if isinstance(block, wire.ImageBlock):
        return protocol_data.IMAGE_UNSUPPORTED_PLACEHOLDER
    if isinstance(block, wire.DocumentBlock):
        media_type = block.source.media_type
        return protocol_data.DOCUMENT_PLACEHOLDER.format(media_type="unknown" if media_type is None else media_type)
    return block.text


def _image(block: wire.ImageBlock, path: str, part_path: str) -> ImageSource:
    source = block.source
    if isinstance(source, wire.FileSource):
        raise ConversionError(f"{part_path}: files are not stored here; send the image as base64")
    if isinstance(source, wire.UrlSource):
        return url_source(source.url, None, path, part_path)
    return base64_source(source.media_type, source.data, path, part_path)
