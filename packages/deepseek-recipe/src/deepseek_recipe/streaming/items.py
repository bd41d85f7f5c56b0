"""The items of a Responses stream: which events open, continue and close each kind.

    reasoning        rs_   content_part.added · reasoning_text.delta* · reasoning_text.done · content_part.done
    message          msg_  content_part.added · output_text.delta* · output_text.done · content_part.done
    function_call    fc_   function_call_arguments.delta* · function_call_arguments.done
    custom_tool_call ctc_  custom_tool_call_input.delta* · custom_tool_call_input.done
    tool_search_call tsc_  nothing

each between output_item.added and output_item.done. An event is given as (type, fields), without sequence number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any, ClassVar, cast

from deepseek_recipe.json_text import JsonTextError, loads
from deepseek_recipe.streaming.custom_input import CustomInput
from deepseek_recipe.streaming.events import DeltaShape

__all__ = [
    "CustomCallItem",
    "EventFields",
    "FunctionCallItem",
    "Item",
    "MessageItem",
    "ReasoningItem",
    "SearchCallItem",
]

EventFields = tuple[str, dict[str, Any]]


class Item(ABC):
    """One output item. `index` is its place in the output."""

    _prefix: ClassVar[str]

    def __init__(self, response_id: str, index: int) -> None:
        self.index = index
        self.id = f"{self._prefix}_{response_id}_{index}"
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        """What the deltas add up to."""
        return "".join(self.pieces)

    @abstractmethod
    def value(self, status: str) -> dict[str, Any]:
        """The item as it stands."""

    def opening(self) -> list[EventFields]:
        """The events before any delta."""
        return [("response.output_item.added", {"item": self.value("in_progress"), "output_index": self.index})]

    @abstractmethod
    def shape(self) -> DeltaShape | None:
        """What its delta events share; None if there are none."""

    @abstractmethod
    def closing(self, status: str) -> list[EventFields]:
        """The events after the last delta."""

    def _done(self, status: str) -> EventFields:
        return ("response.output_item.done", {"item": self.value(status), "output_index": self.index})


class _TextItem(Item):
    """An item whose text is one content part."""

    _text_event: ClassVar[str]  # the common part of the names of its events
    _delta_fields: ClassVar[str] = ""  # fields between item_id and output_index

    @abstractmethod
    def part(self) -> dict[str, Any]:
        """The content part as it stands."""

    def _done_fields(self) -> dict[str, Any]:
        return {}

    def opening(self) -> list[EventFields]:
        added = super().opening()
        return [*added, ("response.content_part.added", {**self._place(), "part": self.part()})]

    def shape(self) -> DeltaShape:
        name = f"{self._text_event}.delta"
        head = f'{{"type":"{name}","content_index":0,"delta":'
        item_id = encode_basestring(self.id)
        tail = f',"item_id":{item_id},{self._delta_fields}"output_index":{self.index},"sequence_number":'
        return DeltaShape("text", head, tail, self.index, name)

    def closing(self, status: str) -> list[EventFields]:
        return [
            (f"{self._text_event}.done", {**self._place(), **self._done_fields(), "text": self.text}),
            ("response.content_part.done", {**self._place(), "part": self.part()}),
            self._done(status),
        ]

    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self.id, "output_index": self.index}


class ReasoningItem(_TextItem):
    """Reasoning. Its encrypted form is a stand-in: response id and place."""

    _prefix = "rs"
    _text_event = "response.reasoning_text"

    def __init__(self, response_id: str, index: int) -> None:
        super().__init__(response_id, index)
        self._encrypted = f"{response_id}-{index}"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def value(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {
            "type": "reasoning",
            "id": self.id,
            "status": status,
            "content": content,
            "summary": [],
            "encrypted_content": self._encrypted,
        }


class MessageItem(_TextItem):
    """A message. It is the final answer until a call follows, which makes it commentary."""

    _prefix = "msg"
    _text_event = "response.output_text"
    _delta_fields = '"logprobs":[],'

    def __init__(self, response_id: str, index: int) -> None:
        super().__init__(response_id, index)
        self.logprobs: list[dict[str, Any]] = []
        self.phase = "final_answer"

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": list(self.logprobs), "text": self.text}

    def value(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {
            "type": "message",
            "id": self.id,
            "status": status,
            "role": "assistant",
            "phase": self.phase,
            "content": content,
        }

    def _done_fields(self) -> dict[str, Any]:
        return {"logprobs": list(self.logprobs)}


class _CallItem(Item):
    """A call whose deltas are written to `_field`."""

    _event: ClassVar[str]
    _field: ClassVar[str]

    def __init__(self, response_id: str, index: int, call_id: str, name: Mapping[str, str]) -> None:
        super().__init__(response_id, index)
        self.call_id = call_id
        self._name = dict(name)

    def shape(self) -> DeltaShape | None:
        name = f"{self._event}.delta"
        tail = f',"item_id":{encode_basestring(self.id)},"output_index":{self.index},"sequence_number":'
        return DeltaShape(self._field, f'{{"type":"{name}","delta":', tail, self.index, name)

    def closing(self, status: str) -> list[EventFields]:
        place = {"item_id": self.id, "output_index": self.index}
        return [(f"{self._event}.done", {**place, self._field: self.text}), self._done(status)]


class FunctionCallItem(_CallItem):
    """A call of a function; `name` holds `name` and, if it is known, `namespace`."""

    _prefix = "fc"
    _event = "response.function_call_arguments"
    _field = "arguments"

    def value(self, status: str) -> dict[str, Any]:
        head = {"type": "function_call", "id": self.id, "status": status, "call_id": self.call_id}
        return {**head, **self._name, "arguments": self.text}


class CustomCallItem(_CallItem):
    """A call of a custom tool: the one string parameter `input`, without its JSON, or else the JSON."""

    _prefix = "ctc"
    _event = "response.custom_tool_call_input"
    _field = "input"

    def __init__(self, response_id: str, index: int, call_id: str, name: Mapping[str, str]) -> None:
        super().__init__(response_id, index, call_id, name)
        self.reader = CustomInput()

    def value(self, status: str) -> dict[str, Any]:
        head = {"type": "custom_tool_call", "id": self.id, "status": status, "call_id": self.call_id}
        return {**head, **self._name, "input": self.text}


class SearchCallItem(_CallItem):
    """A client-side tool search. Its arguments appear when they are complete."""

    _prefix = "tsc"
    _event = ""
    _field = "arguments"

    def shape(self) -> None:
        return None

    def value(self, status: str) -> dict[str, Any]:
        arguments = _json_object(self.text) if status == "completed" else None
        return {
            "type": "tool_search_call",
            "id": self.id,
            "status": "incomplete" if arguments is None and status == "completed" else status,
            "call_id": self.call_id,
            "execution": "client",
            "arguments": arguments or {},
        }

    def closing(self, status: str) -> list[EventFields]:
        return [self._done(status)]


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value: object = loads(text)
    except JsonTextError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
