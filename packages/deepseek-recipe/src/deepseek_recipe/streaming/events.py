r"""Events: one JSON object each, built for streams in which nearly all of them differ in one string only.

delta event = head + JSON string of the text + tail + end    head and tail are made once a stream
any other   = a dictionary, written when it is asked for
"""

from __future__ import annotations

from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any, TypeVar

import msgspec

from deepseek_recipe.checks import clipped, shown
from deepseek_recipe.json_text import compact, is_object, json_value, loads

__all__ = ["DeltaShape", "StreamEvent"]

_EventT = TypeVar("_EventT", bound="StreamEvent")


class DeltaShape:
    """What the delta events of one kind share. `field`, `index`, `choice` tell an accumulator where the text goes."""

    __slots__ = ("choice", "event_name", "field", "head", "index", "tail")

    def __init__(self, field: str, head: str, tail: str, index: int = 0, event_name: str = "", choice: int = 0) -> None:
        self.field = field
        self.head = head
        self.tail = tail
        self.index = index
        self.event_name = event_name
        self.choice = choice


class StreamEvent(msgspec.Struct, eq=False):
    """One event of a stream. `to_json` gives its text; `accumulate` of a response consumes it.

    Events compare by content and survive `to_dict`/`from_dict` (or `to_json`/`from_json`). A struct, since nothing else
    in Python is made as fast, and a stream makes one a token.
    """

    _shape: DeltaShape | None
    _text: str = ""
    _data: Mapping[str, Any] | None = None
    _end: str = ""
    _is_consumed: bool = False

    def to_json(self) -> str:
        """The event as compact JSON.

        Raises: RuntimeError after a response has accumulated it.
        """
        self.require_fresh()
        shape = self._shape
        if shape is None:
            return compact(self._data)
        return f"{shape.head}{encode_basestring(self._text)}{shape.tail}{self._end}"

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON-compatible values. Raises as `to_json`."""
        return msgspec.json.decode(self.to_json())

    @classmethod
    def from_dict(cls: type[_EventT], values: Mapping[str, Any]) -> _EventT:
        """The event with these contents, as `to_dict` gave them.

        Raises: ValueError if its `type` is no word that an SSE stream can carry; as `json_value` for what is not JSON.
        """
        data = json_value(dict(values))
        name = data.get("type", "")
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError(f"the type of an event must be printable text, not {shown(name)}")
        return cls(None, "", data)

    @classmethod
    def from_json(cls: type[_EventT], text: str) -> _EventT:
        """The event that `to_json` wrote.

        Raises: ValueError if `text` is not a JSON object, otherwise as `from_dict`.
        """
        values = loads(text)
        if not is_object(values):
            raise ValueError(f"an event is a JSON object, not {clipped(text)}")
        return cls.from_dict(values)

    def consume(self) -> tuple[DeltaShape | None, str, Mapping[str, Any]]:
        """What an accumulator needs: the shape and the text of a delta, or the contents of any other event.

        Raises: RuntimeError the second time.
        """
        self.require_fresh()
        self._is_consumed = True
        return self._shape, self._text, self._data or {}

    def require_fresh(self) -> None:
        """Raises RuntimeError if a response has accumulated the event."""
        if self._is_consumed:
            raise RuntimeError("this event was consumed by accumulate; use it before")

    @property
    def name(self) -> str:
        """The `type` of the event, which is its name in an SSE stream; empty where the protocol has none."""
        return (self._data or {}).get("type", "") if self._shape is None else self._shape.event_name

    def _contents(self) -> str:
        """What `to_json` gives, consumed or not."""
        was_consumed, self._is_consumed = self._is_consumed, False
        try:
            return self.to_json()
        finally:
            self._is_consumed = was_consumed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamEvent) and type(self) is type(other) and self._contents() == other._contents()

    def __hash__(self) -> int:
        return hash(self._contents())

    def __repr__(self) -> str:
        return f"{type(self).__name__}.from_json({self._contents()!r})"
