"""What the three complete responses have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from deepseek_recipe.checks import require_instance, require_str
from deepseek_recipe.json_text import compact
from deepseek_recipe.streaming.chunks import checked_int
from deepseek_recipe.streaming.events import DeltaShape, StreamEvent

__all__ = ["Response"]

_EventT = TypeVar("_EventT", bound=StreamEvent)
_MAX_COUNT = 2**64 - 1


class Response(ABC, Generic[_EventT]):
    """A response that grows with every event. `prompt_tokens` and hits are reported until the stream says otherwise.

    Raises: TypeError for an argument of a wrong type, OverflowError for a count outside [0, 2**64).
    """

    _event_class: ClassVar[type[Any]]
    _done_data: ClassVar[str | None] = None

    def __init__(self, id: str, model: str, created: int, prompt_tokens: int, prompt_cache_hit_tokens: int) -> None:  # noqa: A002
        require_str("id", id)
        require_str("model", model)
        self._id = id
        self._model = model
        self._created_s = checked_int("created", created, _MAX_COUNT)
        self._prompt_tokens = checked_int("prompt_tokens", prompt_tokens, _MAX_COUNT)
        self._hit_tokens = checked_int("prompt_cache_hit_tokens", prompt_cache_hit_tokens, _MAX_COUNT)

    @abstractmethod
    def accumulate(self, chunk: _EventT) -> None:
        """Consume `chunk` and add what it says."""

    @abstractmethod
    def to_dict(self) -> Mapping[str, Any]:
        """The response so far, as JSON-compatible values."""

    def to_json(self) -> str:
        """The response so far, as compact JSON."""
        return compact(self.to_dict())

    @classmethod
    def sse_event_name(cls, chunk: _EventT) -> str | None:
        """The name of the SSE message that carries `chunk`; None if it has none.

        Raises: TypeError for an event of another API, RuntimeError after a response has accumulated it.
        """
        require_instance("chunk", chunk, cls._event_class)
        chunk.require_fresh()
        return chunk.name or None

    @classmethod
    def sse_done_data(cls) -> str | None:
        """The data of the message that ends a stream; None if nothing is sent."""
        return cls._done_data

    @classmethod
    def error_event(cls, message: str, kind: str) -> dict[str, Any]:
        """The event that reports an error after the stream has begun."""
        return {"error": {"message": message, "type": kind, "param": None, "code": kind}}

    @classmethod
    def _consume(cls, chunk: _EventT) -> tuple[DeltaShape | None, str, Mapping[str, Any]]:
        require_instance("chunk", chunk, cls._event_class)
        return chunk.consume()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Response) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.to_json()}>"
