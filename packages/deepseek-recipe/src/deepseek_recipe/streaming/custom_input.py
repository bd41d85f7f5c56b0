r"""The raw input of a custom tool, read out of its JSON arguments while they are being written.

    {"input": "*** Begin\nPatch"}      ─▶  *** Begin⏎Patch          unescaped; what follows the string is ignored
    {"other": 1}                       ─▶  {"other": 1}             anything else stays as it is

An invalid escape stands for itself, up to and with the character that makes it invalid, even a quote.
"""

from __future__ import annotations

import json
import re
from typing import Final

__all__ = ["CustomInput"]

_KEY: Final = '{"input": '
_VALUE_START = re.compile('[ \t\r\n]*(")?')
_HIGH: Final = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # the first half of a surrogate pair
_PIECE = re.compile(
    rf"""[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{{4}}|{_HIGH}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}"""
)
_BEGUN_ESCAPE = re.compile(rf"{_HIGH}(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?|\\(?:u[0-9a-fA-F]{{0,3}})?")


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
        seen = max(len(self._held), len(_KEY))
        self._held += text
        if not self._in_string:
            if _KEY.startswith(self._held):
                return ""
            start = _VALUE_START.match(self._held, seen)
            if start is None or not self._held.startswith(_KEY) or (start.end() < len(self._held) and not start[1]):
                self._is_raw = True
                return self._take_held()
            if not start[1]:
                return ""
            self._held = self._held[start.end() :]
            self._in_string = True
        return self._unescape_held()

    def finish(self) -> str:
        """What is still held at the end of the call, as it is."""
        return "" if self._is_done else self._take_held()

    def _unescape_held(self) -> str:
        shown: list[str] = []
        held, i = self._held, 0
        while i < len(held) and not self._is_done:
            piece, begun = _PIECE.match(held, i), _BEGUN_ESCAPE.match(held, i)
            if piece is not None:
                text = piece.group()
                shown.append(json.loads(f'"{text}"') if text[0] == "\\" else text)
                i = piece.end()
            elif begun is None:
                self._is_done = True  # the closing quote
            elif begun.end() == len(held):
                break
            else:
                shown.append(held[i : begun.end() + 1])
                i = begun.end() + 1
        self._held = held[i:]
        return "".join(shown)

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held
