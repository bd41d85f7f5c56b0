"""Chat Completions: chunks of a stream, and the complete response.

start  {"role": "assistant", "content": null, "reasoning_content": ""}      thinking
       {"role": "assistant", "content": "", "reasoning_content": null}      thinking, in an answer whose content goes on
       {"role": "assistant", "content": ""}                                 not thinking
parts  {"content": null, "reasoning_content": "..."}   {"content": "...", "reasoning_content": null}
       {"tool_calls": [{"index": 0, "id": ..., "type": "function", "function": {"name": ..., "arguments": ""}}]}
       {"tool_calls": [{"index": 0, "function": {"arguments": "..."}}]}
end    {"content": "", "reasoning_content": null}      with finish_reason and usage
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from json.encoder import encode_basestring
from typing import Any, Final

from deepseek_recipe.checks import require_int_in
from deepseek_recipe.enums import InferenceFinishReason
from deepseek_recipe.streaming.events import DeltaShape, StreamEvent
from deepseek_recipe.streaming.generator import ChunkGenerator
from deepseek_recipe.streaming.parser import Part
from deepseek_recipe.streaming.response import Response
from deepseek_recipe.streaming.stages import PartKind
from deepseek_recipe.streaming.usage import Usage, merged_chat_usage

__all__ = ["ChatCompletionChunk", "ChatCompletionChunkGenerator", "ChatCompletionResponse"]

_MAX_CHOICE_INDEX: Final = 2**32 - 1
_FINISH_REASONS: Final = {
    InferenceFinishReason.Stop: "stop",
    InferenceFinishReason.Length: "length",
    InferenceFinishReason.ContentFilter: "content_filter",
}


class ChatCompletionChunk(StreamEvent, eq=False):
    """One `chat.completion.chunk`. SSE gives it no name."""


class ChatCompletionChunkGenerator(ChunkGenerator):
    """Events of Chat Completions; `ChatCompletionRequest.chunk_generator` builds one for a request.

    `reports_null_usage`: chunks before the last carry `usage: null`, as with `stream_options.include_usage` or when
    nothing is streamed. `starts_in_reasoning`: what the output begins with when thinking. `choice_index`: which of the
    `n` answers to a request this is; each has its own generator.
    """

    def __init__(
        self,
        id: str,  # noqa: A002  (the name is part of the API)
        model: str,
        thinking_mode: bool,
        *,
        reports_null_usage: bool = False,
        starts_in_reasoning: bool = True,
        choice_index: int = 0,
    ) -> None:
        super().__init__(id, model, thinking_mode)
        require_int_in("choice_index", choice_index, 0, _MAX_CHOICE_INDEX)
        self._choice_index = choice_index
        self._reports_null_usage = reports_null_usage
        self._starts_in_reasoning = thinking_mode and starts_in_reasoning
        self._fingerprint: str | None = None
        self._shapes: dict[PartKind, DeltaShape] = {}

    def start(self, usage: Usage, system_fingerprint: str | None) -> list[ChatCompletionChunk]:
        self._fingerprint = system_fingerprint
        self._shapes = {
            PartKind.REASONING: self._shape("reasoning_content", '{"content":null,"reasoning_content":', "}"),
            PartKind.CONTENT: self._shape("content", '{"content":', ',"reasoning_content":null}'),
        }
        if not self._is_thinking:
            self._shapes[PartKind.CONTENT] = self._shape("content", '{"content":', "}")
        first = self._content_delta("")
        if self._starts_in_reasoning:
            first = {"content": None, "reasoning_content": ""}
        return [self._chunk({"role": "assistant", **first})]

    def delta(self, kind: PartKind, text: str) -> ChatCompletionChunk:
        if kind is PartKind.REASONING and text:
            self._has_reasoned = True
        return ChatCompletionChunk(self._shapes[kind], text)

    def part(self, part: Part) -> list[ChatCompletionChunk]:
        kind, text, logprobs = part
        if kind is PartKind.CALL:
            return [self._start_call(text)]
        if kind is PartKind.ARGUMENTS:
            return [ChatCompletionChunk(self._shapes[kind], text)]
        if logprobs is None:
            return [self.delta(kind, text)]
        if kind is PartKind.REASONING:
            self._has_reasoned |= text != ""
            return [self._chunk({"content": None, "reasoning_content": text}, logprobs={"reasoning_content": logprobs})]
        return [self._chunk(self._content_delta(text), logprobs={"content": logprobs})]

    def finish(
        self, reason: InferenceFinishReason | None, usage: Usage, stop_sequence: str | None
    ) -> list[ChatCompletionChunk]:
        calls_end = reason is InferenceFinishReason.Stop and self._call_count > 0
        if not self._is_thinking:
            usage = replace(usage, reasoning_tokens=None)
        finish_reason = "tool_calls" if calls_end else "stop" if reason is None else _FINISH_REASONS[reason]
        return [self._chunk(self._content_delta(""), finish_reason=finish_reason, usage=usage.chat())]

    def _content_delta(self, text: str) -> dict[str, Any]:
        return {"content": text, "reasoning_content": None} if self._is_thinking else {"content": text}

    def _start_call(self, name: str) -> ChatCompletionChunk:
        index, call_id = self._call_count, self._next_call_id()
        arguments = (f'{{"tool_calls":[{{"index":{index},"function":{{"arguments":', "}}]}")
        self._shapes[PartKind.ARGUMENTS] = self._shape("arguments", *arguments, index=index)
        function = {"name": name, "arguments": ""}
        return self._chunk({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]})

    def _shape(self, field: str, head: str, tail: str, index: int = 0) -> DeltaShape:
        fingerprint = "null" if self._fingerprint is None else encode_basestring(self._fingerprint)
        envelope = (
            f'{{"id":{encode_basestring(self._id)},"object":"chat.completion.chunk","created":{self._created_s},'
            f'"model":{encode_basestring(self._model)},"system_fingerprint":{fingerprint},'
            f'"choices":[{{"index":{self._choice_index},"delta":'
        )
        usage = ',"usage":null}' if self._reports_null_usage else "}"
        end = f'{tail},"logprobs":null,"finish_reason":null}}]{usage}'
        return DeltaShape(field, envelope + head, end, index, choice=self._choice_index)

    def _chunk(
        self,
        delta: Mapping[str, Any],
        *,
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> ChatCompletionChunk:
        index = self._choice_index
        data: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created_s,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}],
        }
        if usage is not None or self._reports_null_usage:
            data["usage"] = usage
        return ChatCompletionChunk(None, "", data)


class ChatCompletionResponse(Response[ChatCompletionChunk]):
    """A complete `chat.completion`, put together from the chunks of a stream, or of one stream a choice.

    Identity and time are the caller's; the fingerprint and the usage are those of the chunks, the usage of several
    choices being that of one prompt and of all completions.
    """

    _event_class = ChatCompletionChunk
    _done_data = "[DONE]"

    def __init__(self, id: str, model: str, created: int, prompt_tokens: int, prompt_cache_hit_tokens: int) -> None:  # noqa: A002
        super().__init__(id, model, created, prompt_tokens, prompt_cache_hit_tokens)
        self._fingerprint: str | None = None
        self._usages: dict[int, Mapping[str, Any]] = {}
        self._choices: dict[int, _Choice] = {}

    def accumulate(self, chunk: ChatCompletionChunk) -> None:
        """Consume `chunk` and add what it says.

        Raises: TypeError for anything but a chunk, RuntimeError for one that was consumed before.
        """
        shape, text, data = self._consume(chunk)
        if shape is None:
            self._add_chunk(data)
        elif shape.field == "arguments":
            self._choice(shape.choice).call(shape.index)[1].append(text)
        else:
            self._choice(shape.choice).add_text(shape.field, text)

    def to_dict(self) -> dict[str, Any]:
        """The response so far."""
        response: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created_s,
            "model": self._model,
            "choices": [choice.to_dict(index) for index, choice in sorted(self._choices.items()) if choice.has_begun],
        }
        if self._usages:
            response["usage"] = merged_chat_usage(list(self._usages.values()))
        response["system_fingerprint"] = self._fingerprint
        return response

    def _add_chunk(self, data: Mapping[str, Any]) -> None:
        self._fingerprint = data.get("system_fingerprint", self._fingerprint)
        index = 0
        for choice in data.get("choices", ()):
            index = choice.get("index", 0)
            self._choice(index).add(choice)
        if data.get("usage"):
            self._usages[index] = data["usage"]

    def _choice(self, index: int) -> _Choice:
        return self._choices.setdefault(index, _Choice())


class _Choice:
    """One answer under construction."""

    def __init__(self) -> None:
        self._text: dict[str, list[str]] = {}
        self._calls: dict[int, tuple[dict[str, Any], list[str]]] = {}
        self._logprobs: dict[str, list[Any]] = {}
        self._finish_reason: str | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to show."""
        return bool(self._text or self._calls)

    def to_dict(self, index: int) -> dict[str, Any]:
        """The choice so far."""
        message: dict[str, Any] = {"role": "assistant", "content": None}
        message |= {field: "".join(pieces) for field, pieces in self._text.items()}
        if self._calls:
            message["tool_calls"] = [_with_arguments(call, pieces) for call, pieces in self._calls.values()]
        return {
            "index": index,
            "message": message,
            "logprobs": dict(sorted(self._logprobs.items())) or None,
            "finish_reason": self._finish_reason,
        }

    def add(self, choice: Mapping[str, Any]) -> None:
        """Adds what a chunk says of this choice."""
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        logprobs: Mapping[str, list[Any]] = choice.get("logprobs") or {}
        for field, entries in logprobs.items():
            self._logprobs.setdefault(field, []).extend(entries)
        delta = choice.get("delta", {})
        for field in ("content", "reasoning_content"):
            if delta.get(field) is not None:
                self.add_text(field, delta[field])
        for call in delta.get("tool_calls", ()):
            self._add_call(call)

    def add_text(self, field: str, text: str) -> None:
        """Adds to the content or the reasoning."""
        self._text.setdefault(field, []).append(text)

    def call(self, index: int) -> tuple[dict[str, Any], list[str]]:
        """The header and the pieces of the arguments of a call."""
        return self._calls.setdefault(index, ({"index": index}, []))

    def _add_call(self, call: Mapping[str, Any]) -> None:
        header, pieces = self.call(call["index"])
        function = call.get("function", {})
        if "id" in call:
            header.update(id=call["id"], type=call.get("type", "function"), name=function.get("name", ""))
        pieces.append(function.get("arguments", ""))


def _with_arguments(header: Mapping[str, Any], pieces: list[str]) -> dict[str, Any]:
    function = {"name": header.get("name", ""), "arguments": "".join(pieces)}
    return {
        "index": header["index"],
        "id": header.get("id", ""),
        "type": header.get("type", "function"),
        "function": function,
    }
