"""Input items of Responses requests become messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_text import compact
from deepseek_recipe.requests import wire_responses as wire
from deepseek_recipe.requests.common import ToolSpec
from deepseek_recipe.requests.content import ContentBuilder
from deepseek_recipe.requests.images import image_source
from deepseek_recipe.requests.options import ConversionOptions
from deepseek_recipe.requests.responses_tools import (
    TOOL_SEARCH_NAME,
    ToolReader,
    listed_tools,
)
from deepseek_recipe.tokens import SpecialToken

__all__ = ["ItemConverter"]

_CALLS = (wire.FunctionCallItem, wire.CustomCallItem, wire.ToolSearchCallItem)
_SEARCHES = (wire.ToolSearchCallItem, wire.ToolSearchOutputItem)  # V4 knows no tool search
_OUTPUTS = (wire.FunctionOutputItem, wire.OutputItem, wire.ToolSearchOutputItem)


class AssistantTurn:
    """An assistant message under construction: reasoning, then texts, then calls."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.is_said = False  # an assistant message without any text still is a message
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []

    def message(self) -> AssistantMessage | None:
        """The message, or None when the turn has nothing to show."""
        reasoning = "\n".join(self.reasoning) or None
        if reasoning is None and not self.is_said and not self.calls:
            return None
        return AssistantMessage("\n\n".join(self.texts), reasoning, self.calls or None)


class ItemConverter:
    """Groups items into messages and collects the tools that searches found."""

    def __init__(self, reader: ToolReader, options: ConversionOptions) -> None:
        self._reader = reader
        self._image = options.special_tokens.token(SpecialToken.Image)
        self._out: list[Message] = []
        self._turn: AssistantTurn | None = None
        self._open_ids: list[str] = []
        self._results: dict[str, ToolMessage] = {}
        self._known_ids: set[str] = set()
        self._found_names: list[list[str]] = []  # per search of the open group
        self._found_at: list[tuple[int, list[str]]] = []  # (index of the message, names)
        self._specs_at: dict[str, list[ToolSpec]] = {}  # by the path of the search output
        self.found_specs: list[ToolSpec] = []

    def convert(self, items: Sequence[wire.Item | None], out: list[Message]) -> None:
        """Appends the messages of all items to `out`."""
        self._out = out
        if not self._reader.is_pro:
            self._read_found(items)
        for index, item in enumerate(items):
            path = f"input[{index}]"
            if self._reader.is_pro and isinstance(item, _SEARCHES):
                continue
            if isinstance(item, _OUTPUTS):
                self._add_output(item, path)
            elif item is not None:
                self._add_input(item, path)
        self._close_turn()
        self._close_group()

    def _read_found(self, items: Sequence[wire.Item | None]) -> None:
        """Names the tools that searches found, which names of calls in history must not take."""
        for index, item in enumerate(items):
            if isinstance(item, wire.ToolSearchOutputItem):
                path = f"input[{index}]"
                self._specs_at[path] = self._reader.specs(item.tools, f"{path}.tools", found=True)

    def settle_found(self, messages: list[Message], tools: Mapping[str, ToolDefinition]) -> None:
        """Puts the found tools, now defined, into the system messages that make them known."""
        for index, names in reversed(self._found_at):
            known = [tools[name] for name in names if name in tools]
            if known:
                messages[index] = SystemMessage("", [], known)
            else:
                del messages[index]

    # ---- items that open or continue a turn --------------------------------------------------------------------------

    def _add_input(self, item: Any, path: str) -> None:
        is_assistant_text = isinstance(item, wire.MessageItem) and item.role == "assistant"
        if isinstance(item, wire.ReasoningItem):
            reasoning = "\n".join(piece.text for piece in item.content or ())
            if not reasoning:
                return
            turn = self._turn
            if turn is None or turn.texts or turn.calls:
                turn = self._open_turn()
            turn.reasoning.append(reasoning)
        elif is_assistant_text:
            turn = self._turn
            if turn is None or turn.calls:
                turn = self._open_turn()
            turn.is_said = True
            if text := self._assistant_text(item, path):
                turn.texts.append(text)
        elif isinstance(item, _CALLS):
            turn = self._turn or self._open_turn()
            turn.calls.append(self._call(item, path))
        else:
            self._close_turn()
            self._close_group()
            content = self._content(item.content, path)
            is_user = item.role == "user" or (item.role == "developer" and self._reader.is_pro)
            kind = UserMessage if is_user else SystemMessage
            self._out.append(kind(content.text, content.sources, **content.placeholders))

    def _open_turn(self) -> AssistantTurn:
        self._close_turn()
        self._close_group()
        self._turn = AssistantTurn()
        return self._turn

    def _close_turn(self) -> None:
        turn, self._turn = self._turn, None
        message = turn.message() if turn is not None else None
        if message is not None:
            self._out.append(message)
            self._open_ids = [call.id for call in message.tool_calls or ()]

    def _call(self, item: Any, path: str) -> ToolCall:
        _require_id(item.call_id, path)
        if item.call_id in self._known_ids:
            raise ConversionError(f"{path}.call_id: {shown(item.call_id)} was used by another call")
        self._known_ids.add(item.call_id)
        if isinstance(item, wire.CustomCallItem):
            return ToolCall(item.call_id, item.name, compact({"input": item.input}))
        if isinstance(item, wire.ToolSearchCallItem):
            return ToolCall(item.call_id, TOOL_SEARCH_NAME, compact(item.arguments))
        name = item.name if item.namespace is None else self._reader.name_in_history(item.namespace, item.name)
        return ToolCall(item.call_id, name, item.arguments)

    # ---- outputs -----------------------------------------------------------------------------------------------------

    def _add_output(self, item: Any, path: str) -> None:
        self._close_turn()
        call_id = item.call_id
        if call_id is None:
            self._close_group()
            self._out.append(self._result(item, path))
            return
        _require_id(call_id, path)
        if call_id not in self._open_ids or call_id in self._results:
            raise ConversionError(f"{path}.call_id: {shown(call_id)} answers no open call of the items directly before")
        if isinstance(item, wire.ToolSearchOutputItem):
            message = ToolMessage(compact(listed_tools(item.tools, f"{path}.tools")), call_id)
            specs = self._specs_at[path]
            self.found_specs.extend(specs)
            if specs:
                self._found_names.append([spec.name for spec in specs])
        else:
            message = self._result(item, path)
        self._results[call_id] = message

    def _result(self, item: Any, path: str) -> ToolMessage:
        content = self._content(item.output, path)
        return ToolMessage(content.text, item.call_id, content.sources, **content.placeholders)

    def _close_group(self) -> None:
        """Writes the outputs of the last calls in the order of the calls, then the tools that they made known."""
        missing = [call_id for call_id in self._open_ids if call_id not in self._results]
        if missing:
            raise ConversionError(f"input: outputs are missing for the calls {clipped(', '.join(missing))}")
        self._out.extend(self._results[call_id] for call_id in self._open_ids)
        for names in self._found_names:
            self._found_at.append((len(self._out), names))
            self._out.append(SystemMessage(""))
        self._open_ids, self._results, self._found_names = [], {}, []

    # ---- content -----------------------------------------------------------------------------------------------------

    def _assistant_text(self, item: wire.MessageItem, path: str) -> str:
        content = self._content(item.content, path)
        if content.sources:
            raise ConversionError(f"{path}: images in assistant messages are not supported")
        return content.text

    def _content(self, content: str | list[Any], path: str) -> ContentBuilder:
        out = ContentBuilder(self._image)
        if isinstance(content, str):
            out.add_text(content)
            return out
        for index, part in enumerate(content):
            if isinstance(part, wire.InputImage):
                if self._reader.is_pro:
                    out.add_text(protocol_data.IMAGE_UNSUPPORTED_PLACEHOLDER)
                else:
                    out.add_image(_image(part, path, f"{path}.content[{index}]"))
            elif isinstance(part, wire.InputFile):
                out.add_text(protocol_data.INPUT_FILE_PLACEHOLDER)
            else:
                out.add_text(part.text)
        return out


def _require_id(call_id: str, path: str) -> None:
    if not call_id:
        raise ConversionError(f"{path}.call_id: must not be empty")


def _image(part: wire.InputImage, path: str, part_path: str) -> Any:
    if part.file_id is not None:
        raise ConversionError(f"{part_path}.file_id: files are not stored here; send a base64 data URL as image_url")
    if part.image_url is None:
        raise ConversionError(f"{part_path}: an image needs image_url")
    return image_source(part.image_url, part.detail, path)
