"""Server-sent events: the bytes of a stream.

event: message_start        only where the protocol names its events
data: {"type": ...}         one line, for JSON escapes every line break
(blank line)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from deepseek_recipe.checks import require_str, shown
from deepseek_recipe.json_text import compact
from deepseek_recipe.streaming.events import StreamEvent
from deepseek_recipe.streaming.response import Response

__all__ = ["KEEP_ALIVE", "SseWriter"]

KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment, which clients skip. Send it when nothing else was sent for a while."""


class SseWriter:
    """Writes the events of one API, which `response_class` names (`ChatCompletionResponse`, ...)."""

    content_type: Final = "text/event-stream; charset=utf-8"

    def __init__(self, response_class: type[Response[Any]]) -> None:
        if Response not in getattr(response_class, "__mro__", ()):
            raise TypeError(f"argument 'response_class' must be a class of responses, not {response_class!r}")
        self._response_class = response_class

    def event(self, event: StreamEvent) -> bytes:
        """One event.

        Raises: TypeError for an event of another API, RuntimeError for one that was accumulated.
        """
        return _message(self._response_class.sse_event_name(event), event.to_json())

    def events(self, events: Iterable[StreamEvent]) -> bytes:
        """Several events in one piece, as a push gives them."""
        return b"".join(map(self.event, events))

    def error(self, message: str, *, kind: str = "server_error") -> bytes:
        """An error after the stream has begun, in the form that the clients of the API raise."""
        require_str("message", message)
        require_str("kind", kind)
        error = self._response_class.error_event(message, kind)
        name: str | None = error.get("type")
        return _message(name, compact(error))

    def done(self) -> bytes:
        """What ends the stream: `data: [DONE]` for Chat Completions, nothing for the others."""
        data = self._response_class.sse_done_data()
        return b"" if data is None else _message(None, data)


def _message(name: str | None, data: str) -> bytes:
    if name is not None and not name.isprintable():
        raise ValueError(f"the name of an event must be printable text, which a line break is not: {shown(name)}")
    text = f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"
    return text.encode()
