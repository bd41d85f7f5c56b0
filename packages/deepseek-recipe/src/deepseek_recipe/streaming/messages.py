"""Messages: events of a stream, and the complete message.

    message_start · [thinking block] · [text block] · tool_use blocks · message_delta · message_stop
    block = content_block_start · content_block_delta* · content_block_stop          ping after the first start

With thinking on its block opens at once, even if it stays empty, and ends with a signature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deepseek_recipe.checks import require_str
from deepseek_recipe.enums import InferenceFinishReason
from deepseek_recipe.json_text import JsonTextError, loads
from deepseek_recipe.streaming.events import DeltaShape, StreamEvent
from deepseek_recipe.streaming.generator import ChunkGenerator
from deepseek_recipe.streaming.parser import Part
from deepseek_recipe.streaming.response import Response
from deepseek_recipe.streaming.stages import PartKind
from deepseek_recipe.streaming.usage import Usage

__all__ = ["MessagesChunkGenerator", "MessagesResponse", "MessagesStreamEvent"]

_STOP_REASONS: Final = {
    InferenceFinishReason.Stop: "end_turn",
    InferenceFinishReason.Length: "max_tokens",
    InferenceFinishReason.ContentFilter: "refusal",
}
# Of a kind of part: the type of its delta and the field that carries the text.
_DELTAS: Final = {
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.CONTENT: ("text_delta", "text"),
    PartKind.ARGUMENTS: ("input_json_delta", "partial_json"),
}
_TEXT_FIELDS: Final = {"thinking": "thinking", "text": "text"}  # of a type of block


class MessagesStreamEvent(StreamEvent, eq=False):
    """One event of a Messages stream."""


class MessagesChunkGenerator(ChunkGenerator):
    """Events of Messages. Only this generator has a public constructor in the official bindings."""

    def __init__(self, id: str, model: str, thinking_mode: bool) -> None:  # noqa: A002  (the name is part of the API)
        super().__init__(id, model, thinking_mode)
        self._signature = id
        self._block_index = -1
        self._open_kind: PartKind | None = None  # of the open block; ARGUMENTS for tool_use
        self._shape: DeltaShape | None = None

    def with_signature(self, signature: str) -> MessagesChunkGenerator:
        """Consume this generator; the new one ends thinking blocks with `signature` instead of the response id."""
        require_str("signature", signature)
        generator = self.take()
        generator._signature = signature
        return generator

    def start(self, usage: Usage, system_fingerprint: str | None) -> list[MessagesStreamEvent]:
        message = _message(self._id, self._model, [], None, None, usage.messages())
        events = [_event("message_start", message=message)]
        if self._is_thinking:
            events += self._open_block(PartKind.REASONING, {"type": "thinking", "thinking": "", "signature": ""})
        return events

    def delta(self, kind: PartKind, text: str) -> MessagesStreamEvent | None:
        if kind is not self._open_kind:
            return None
        self._has_reasoned |= kind is PartKind.REASONING and text != ""
        return MessagesStreamEvent(self._shape, text)

    def part(self, part: Part) -> list[MessagesStreamEvent]:
        kind, text, _ = part
        events: list[MessagesStreamEvent] = []
        if kind is PartKind.CALL:
            call: dict[str, Any] = {"type": "tool_use", "id": self._next_call_id(), "name": text, "input": {}}
            return self._close_block() + self._open_block(PartKind.ARGUMENTS, call)
        if kind is PartKind.REASONING and self._open_kind is not kind:
            events += self._close_block()
            events += self._open_block(kind, {"type": "thinking", "thinking": "", "signature": ""})
        elif kind is PartKind.CONTENT and self._open_kind is not kind:
            events += self._close_block()
            events += self._open_block(kind, {"type": "text", "text": ""})
        event = self.delta(kind, text)
        return events if event is None else [*events, event]

    def finish(
        self, reason: InferenceFinishReason | None, usage: Usage, stop_sequence: str | None
    ) -> list[MessagesStreamEvent]:
        stop_reason = "end_turn" if reason is None else _STOP_REASONS[reason]
        if stop_sequence is not None:
            stop_reason = "stop_sequence"
        elif reason is InferenceFinishReason.Stop and self._call_count:
            stop_reason = "tool_use"
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        end = [_event("message_delta", delta=delta, usage=usage.messages()), _event("message_stop")]
        return self._close_block() + end

    def _open_block(self, kind: PartKind, block: Mapping[str, Any]) -> list[MessagesStreamEvent]:
        self._block_index += 1
        self._open_kind = kind
        delta_type, field = _DELTAS[kind]
        head = f'{{"type":"content_block_delta","index":{self._block_index},"delta":{{"type":"{delta_type}","{field}":'
        self._shape = DeltaShape(field, head, "}}", self._block_index, "content_block_delta")
        events = [_event("content_block_start", index=self._block_index, content_block=block)]
        return events if self._block_index else [*events, _event("ping")]

    def _close_block(self) -> list[MessagesStreamEvent]:
        if self._open_kind is None:
            return []
        events = [_event("content_block_stop", index=self._block_index)]
        if self._open_kind is PartKind.REASONING:
            delta = {"type": "signature_delta", "signature": self._signature}
            events.insert(0, _event("content_block_delta", index=self._block_index, delta=delta))
        self._open_kind = None
        return events


class MessagesResponse(Response[MessagesStreamEvent]):
    """A complete message, put together from the events of a stream.

    Before `message_start` it shows the caller's identity; afterwards that of the stream. Input of a tool that is not
    JSON is shown as {}.
    """

    _event_class = MessagesStreamEvent

    def __init__(self, id: str, model: str, created: int, prompt_tokens: int, prompt_cache_hit_tokens: int) -> None:  # noqa: A002
        super().__init__(id, model, created, prompt_tokens, prompt_cache_hit_tokens)
        self._usage: Mapping[str, Any] = Usage(self._prompt_tokens, self._hit_tokens).messages()
        self._blocks: list[tuple[dict[str, Any], list[str]]] = []
        self._stop: Mapping[str, Any] = {}

    def accumulate(self, chunk: MessagesStreamEvent) -> None:
        """Consume `chunk` and add what it says.

        Raises: TypeError for anything but an event of Messages, RuntimeError for one that was consumed before.
        """
        shape, text, data = self._consume(chunk)
        if shape is not None:
            self._blocks[shape.index][1].append(text)
            return
        kind = data.get("type")
        if kind == "message_start":
            message = data["message"]
            self._id, self._model, self._usage = message["id"], message["model"], message["usage"]
        elif kind == "content_block_start":
            self._blocks.append((dict(data["content_block"]), []))
        elif kind == "content_block_delta":
            index: int = data["index"]
            block, pieces = self._blocks[index]
            delta: Mapping[str, Any] = data["delta"]
            if delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                pieces.append(next(delta[field] for name, field in _DELTAS.values() if name == delta["type"]))
        elif kind == "content_block_stop":
            self._finish_block(data["index"])
        elif kind == "message_delta":
            self._stop, self._usage = data["delta"], data["usage"]

    def to_dict(self) -> dict[str, Any]:
        """The message so far."""
        content = [
            block if block["type"] == "tool_use" else {**block, _TEXT_FIELDS[block["type"]]: "".join(pieces)}
            for block, pieces in self._blocks
        ]
        stop = self._stop
        return _message(self._id, self._model, content, stop.get("stop_reason"), stop.get("stop_sequence"), self._usage)

    @classmethod
    def error_event(cls, message: str, kind: str) -> dict[str, Any]:
        """The `error` event of Messages, whose word for a fault of the server is `api_error`."""
        return {"type": "error", "error": {"type": "api_error" if kind == "server_error" else kind, "message": message}}

    def _finish_block(self, index: int) -> None:
        block, pieces = self._blocks[index]
        if block["type"] == "tool_use":
            block["input"] = parsed_arguments("".join(pieces))


def _event(event_type: str, **fields: Any) -> MessagesStreamEvent:
    return MessagesStreamEvent(None, "", {"type": event_type, **fields})


def _message(
    id_: str,
    model: str,
    content: list[dict[str, Any]],
    stop_reason: str | None,
    stop_sequence: str | None,
    usage: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "id": id_,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": usage,
    }


def parsed_arguments(text: str) -> Any:
    """The JSON value of a call's arguments; {} if they are not JSON."""
    try:
        return loads(text)
    except JsonTextError:
        return {}
