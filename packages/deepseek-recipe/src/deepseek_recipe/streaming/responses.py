"""Responses: events of a stream, and the complete response.

    response.created · response.in_progress · items · response.completed | response.incomplete

Fields of an event are in alphabetical order after `type`; every event has a sequence number. The response object
repeats the settings of the request (its echo).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, Protocol

from deepseek_recipe.checks import require_instance, require_list, require_str, shown
from deepseek_recipe.enums import InferenceFinishReason
from deepseek_recipe.streaming.decoder import shortest_float32
from deepseek_recipe.streaming.events import DeltaShape, StreamEvent
from deepseek_recipe.streaming.generator import ChunkGenerator
from deepseek_recipe.streaming.items import (
    CustomCallItem,
    EventFields,
    FunctionCallItem,
    Item,
    MessageItem,
    ReasoningItem,
    SearchCallItem,
)
from deepseek_recipe.streaming.parser import Part
from deepseek_recipe.streaming.response import Response
from deepseek_recipe.streaming.stages import PartKind
from deepseek_recipe.streaming.usage import Usage

__all__ = ["Echo", "ResponsesChunkGenerator", "ResponsesResponse", "ResponsesStreamEvent"]

_INCOMPLETE_REASONS: Final = {
    InferenceFinishReason.Length: "max_output_tokens",
    InferenceFinishReason.ContentFilter: "content_filter",
}


class Echo(Protocol):
    """The settings of a request that its response repeats."""

    def to_dict(self) -> Mapping[str, Any]:
        """The values of the keys that `_UNSPECIFIED` lists."""
        ...


_UNSPECIFIED: Final[Mapping[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}, "verbosity": None},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "user": None,
}


class ResponsesStreamEvent(StreamEvent, eq=False):
    """One event of a Responses stream."""


class ResponsesChunkGenerator(ChunkGenerator):
    """Events of Responses; `ResponsesRequest.chunk_generator` builds one for a request.

    `custom_tools`: names whose calls are custom tool calls. `searches_tools`: `tool_search` is a client-side search.
    """

    def __init__(
        self,
        id: str,  # noqa: A002  (the name is part of the API)
        model: str,
        thinking_mode: bool,
        *,
        custom_tools: Collection[str] = (),
        searches_tools: bool = False,
    ) -> None:
        super().__init__(id, model, thinking_mode)
        self._custom_tools = frozenset(custom_tools)
        self._searches_tools = searches_tools
        self._namespaces: dict[str, tuple[str, str]] = {}
        self._echo: Mapping[str, Any] = _UNSPECIFIED
        self._sequence_number = 0
        self._finished_items: tuple[dict[str, Any], ...] = ()
        self._item: Item | None = None
        self._item_kind: PartKind | None = None  # of the parts that become deltas of the item as they are
        self._shape: DeltaShape | None = None

    def with_namespace_tool_map(self, namespace_tool_map: Mapping[str, tuple[str, str]]) -> ResponsesChunkGenerator:
        """Consume this generator; the new one splits the names in the map into (namespace, local name)."""
        require_instance("namespace_tool_map", namespace_tool_map, Mapping)
        names: dict[str, tuple[str, str]] = {}
        for name, pair in namespace_tool_map.items():
            require_str("namespace_tool_map", name)
            words = require_list(f"namespace_tool_map[{shown(name)}]", pair, str)
            if len(words) != 2:
                what = f"namespace_tool_map[{shown(name)}]"
                raise ValueError(f"{what} must be (namespace, local name), not {shown(pair)}")
            names[name] = (words[0], words[1])
        generator = self.take()
        generator._namespaces = names
        return generator

    def with_echo(self, echo: Echo) -> ResponsesChunkGenerator:
        """Consume this generator; the new one reports the settings of the request."""
        if not callable(getattr(echo, "to_dict", None)):
            raise TypeError(f"argument 'echo' must be a ResponsesEcho, not {type(echo).__name__}")
        settings = echo.to_dict()
        generator = self.take()
        generator._echo = settings
        return generator

    def start(self, usage: Usage, system_fingerprint: str | None) -> list[ResponsesStreamEvent]:
        response = self._response("in_progress", None, None)
        return [self._event(f"response.{name}", {"response": response}) for name in ("created", "in_progress")]

    def delta(self, kind: PartKind, text: str) -> ResponsesStreamEvent | None:
        item = self._item
        if item is None or kind is not self._item_kind:
            return None
        return self._delta(item, text)

    def _delta(self, item: Item, text: str) -> ResponsesStreamEvent:
        item.pieces.append(text)
        number = self._sequence_number
        self._sequence_number = number + 1
        return ResponsesStreamEvent(self._shape, text, None, f"{number}}}")

    def part(self, part: Part) -> list[ResponsesStreamEvent]:
        kind, text, logprobs = part
        if kind is PartKind.CALL:
            if isinstance(self._item, MessageItem):
                self._item.phase = "commentary"
            closing, call = self._close_item("completed"), self._new_call(text)
            return closing + self._open_item(PartKind.ARGUMENTS if isinstance(call, FunctionCallItem) else None, call)
        if kind is PartKind.ARGUMENTS:
            return self._arguments(text)
        events: list[ResponsesStreamEvent] = []
        if kind is not self._item_kind:
            new_item = ReasoningItem if kind is PartKind.REASONING else MessageItem
            events = self._close_item("completed")
            events += self._open_item(kind, new_item(self._id, len(self._finished_items)))
        self._has_reasoned |= kind is PartKind.REASONING
        if logprobs is not None and isinstance(self._item, MessageItem):
            return [*events, self._delta_with_logprobs(self._item, text, logprobs)]
        event = self.delta(kind, text)
        return events if event is None else [*events, event]

    def finish(
        self, reason: InferenceFinishReason | None, usage: Usage, stop_sequence: str | None
    ) -> list[ResponsesStreamEvent]:
        incomplete = None if reason is None else _INCOMPLETE_REASONS.get(reason)
        status = "completed" if incomplete is None else "incomplete"
        events = self._close_item(status)
        details = None if incomplete is None else {"reason": incomplete}
        return [*events, self._event(f"response.{status}", {"response": self._response(status, details, usage)})]

    def _new_call(self, name: str) -> Item:
        index, call_id = len(self._finished_items), self._next_call_id()
        if name in self._custom_tools:
            return CustomCallItem(self._id, index, call_id, {"name": name})
        if name == "tool_search" and self._searches_tools:
            return SearchCallItem(self._id, index, call_id, {})
        if name in self._namespaces:
            namespace, local = self._namespaces[name]
            return FunctionCallItem(self._id, index, call_id, {"name": local, "namespace": namespace})
        return FunctionCallItem(self._id, index, call_id, {"name": name})

    def _arguments(self, text: str) -> list[ResponsesStreamEvent]:
        item = self._item
        if isinstance(item, SearchCallItem):
            item.pieces.append(text)
            return []
        if isinstance(item, CustomCallItem):
            text = item.reader.push(text)
            if not text:
                return []
        return [] if item is None else [self._delta(item, text)]

    def _delta_with_logprobs(self, item: MessageItem, text: str, logprobs: list[Any]) -> ResponsesStreamEvent:
        item.pieces.append(text)
        item.logprobs += logprobs
        fields = {"content_index": 0, "delta": text, "item_id": item.id, "logprobs": logprobs}
        return self._event("response.output_text.delta", {**fields, "output_index": item.index})

    def _open_item(self, kind: PartKind | None, item: Item) -> list[ResponsesStreamEvent]:
        self._item, self._item_kind, self._shape = item, kind, item.shape()
        return self._events(item.opening())

    def _close_item(self, status: str) -> list[ResponsesStreamEvent]:
        item = self._item
        if item is None:
            return []
        events: list[ResponsesStreamEvent] = []
        if isinstance(item, CustomCallItem) and (rest := item.reader.finish()):
            events.append(self._delta(item, rest))
        events += self._events(item.closing(status))
        self._finished_items += (item.value(status),)
        self._item = self._item_kind = None
        return events

    def _events(self, events: list[EventFields]) -> list[ResponsesStreamEvent]:
        return [self._event(name, fields) for name, fields in events]

    def _event(self, name: str, fields: Mapping[str, Any]) -> ResponsesStreamEvent:
        numbered = {**fields, "sequence_number": self._sequence_number}
        self._sequence_number += 1
        return ResponsesStreamEvent(None, "", {"type": name, **dict(sorted(numbered.items()))})

    def _response(self, status: str, incomplete: Mapping[str, str] | None, usage: Usage | None) -> dict[str, Any]:
        return _response_object(
            self._id,
            self._model,
            self._created_s,
            status,
            self._echo,
            output=list(self._finished_items),
            incomplete=incomplete,
            usage=None if usage is None else usage.responses(),
        )


class ResponsesResponse(Response[ResponsesStreamEvent]):
    """A complete response, put together from the events of a stream.

    Before `response.created` it shows the caller's identity; afterwards the response of the stream.
    """

    _event_class = ResponsesStreamEvent

    def __init__(self, id: str, model: str, created: int, prompt_tokens: int, prompt_cache_hit_tokens: int) -> None:  # noqa: A002
        super().__init__(id, model, created, prompt_tokens, prompt_cache_hit_tokens)
        self._response: dict[str, Any] = _response_object(id, model, created, "in_progress", _UNSPECIFIED)
        self._items: dict[int, dict[str, Any]] = {}
        self._pieces: dict[int, list[str]] = {}

    def accumulate(self, chunk: ResponsesStreamEvent) -> None:
        """Consume `chunk` and add what it says.

        Raises: TypeError for anything but an event of Responses, RuntimeError for one that was consumed before.
        """
        shape, text, data = self._consume(chunk)
        if shape is not None:
            self._pieces[shape.index].append(text)
            return
        index = data.get("output_index", 0)
        if "response" in data:
            self._response = dict(data["response"])
            output: list[dict[str, Any]] = self._response["output"]
            self._items = dict(enumerate(output))
            self._pieces.clear()
        elif "item" in data:
            self._items[index] = data["item"]
            self._pieces[index] = []
        elif data.get("type") == "response.content_part.added":
            self._items[index] = {**self._items[index], "content": [data["part"]]}
        elif "delta" in data:
            self._pieces[index].append(data["delta"])
            self._add_logprobs(index, data.get("logprobs", ()))

    def to_dict(self) -> dict[str, Any]:
        """The response so far."""
        return {**self._response, "output": [self._item(index) for index in sorted(self._items)]}

    @classmethod
    def error_event(cls, message: str, kind: str) -> dict[str, Any]:
        """The `error` event of Responses."""
        return {"type": "error", "code": kind, "message": message, "param": None, "sequence_number": 0}

    def _item(self, index: int) -> dict[str, Any]:
        item, text = self._items[index], "".join(self._pieces.get(index, ()))
        if not text:
            return item
        if item.get("content"):
            return {**item, "content": [{**item["content"][0], "text": text}]}
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        return {**item, field: text}

    def _add_logprobs(self, index: int, logprobs: Collection[Any]) -> None:
        if logprobs:
            item = self._items[index]
            part = item["content"][0]
            self._items[index] = {**item, "content": [{**part, "logprobs": [*part["logprobs"], *logprobs]}]}


def _response_object(
    id_: str,
    model: str,
    created_s: int,
    status: str,
    echo: Mapping[str, Any],
    *,
    output: list[dict[str, Any]] | None = None,
    incomplete: Mapping[str, str] | None = None,
    usage: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The response object; what this codec has no notion of has a fixed value."""
    return {
        "id": id_,
        "object": "response",
        "created_at": created_s,
        "status": status,
        "background": False,
        "completed_at": None if status == "in_progress" else created_s,
        "content_filters": None,
        "error": None,
        "frequency_penalty": 0.0,
        "incomplete_details": incomplete,
        "instructions": echo["instructions"],
        "max_output_tokens": echo["max_output_tokens"],
        "max_tool_calls": None,
        "model": model,
        "moderation": None,
        "output": output or [],
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "prompt_cache_retention": None,
        "reasoning": echo["reasoning"],
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": shortest_float32(echo["temperature"]),
        "text": echo["text"],
        "tool_choice": echo["tool_choice"],
        "tools": echo["tools"],
        "top_logprobs": echo["top_logprobs"],
        "top_p": shortest_float32(echo["top_p"]),
        "truncation": "disabled",
        "usage": usage,
        "user": echo["user"],
        "metadata": {},
    }
