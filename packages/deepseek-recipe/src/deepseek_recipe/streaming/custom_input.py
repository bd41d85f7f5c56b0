r"""The raw input of a custom tool, read out of its JSON arguments while they are being written.

{"input": "*** Begin\nPatch"}      ─▶  *** Begin⏎Patch          unescaped; what follows the string is ignored
{"other": 1}                       ─▶  {"other": 1}             anything else stays as it is
"""

from __future__ import annotations

import json
import re
from typing import Final

__all__ = ["CustomInput"]

_PREFIX: Final = '{"input": "'
# Characters and whole escapes; a surrogate pair is one escape.
_STRING_PART = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*'
)


class CustomInput:
    """Reads one call. `push` takes JSON text as it comes and gives what may be shown of the input."""

    def __init__(self) -> None:
        self._held = ""
        self._is_raw = False
        self._in_string = False
        self._is_done = False

    def push(self, text: str) -> str:
        """The input that `text` adds."""
        if self._is_raw:
            return text
        if self._is_done:
            return ""
        self._held += text
        if not self._in_string:
            if _PREFIX.startswith(self._held):
                return ""
            if not self._held.startswith(_PREFIX):
                self._is_raw = True
                return self._take_held()
            self._held = self._held[len(_PREFIX) :]
            self._in_string = True
        return self._unescape_held()

    def finish(self) -> str:
        """What is still held at the end of the call, as it is."""
        return "" if self._is_done or self._in_string else self._take_held()

    def _unescape_held(self) -> str:
        part = _STRING_PART.match(self._held)
        complete = part.group() if part else ""
        self._held = self._held[len(complete) :]
        if self._held.startswith('"'):
            self._is_done = True
        return json.loads(f'"{complete}"', strict=False)

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held
