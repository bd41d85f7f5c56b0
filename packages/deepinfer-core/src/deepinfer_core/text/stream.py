"""`TextStream`: the text of one answer, token by token, with its stop strings.

    tokens     "Ca"  "f"  C3  A9  " E"  "N"  "D"           stop = ["END"]
    text       "Ca"  "f"  ""  "é" " "   ""   ""            bytes that are no whole character yet are held back
    take_new   "Ca"  "f"  ""  "é" " "   ""   ""            so is what may still become a stop string

The text always equals that of all tokens decoded at once, up to the stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from deepinfer_core.text.tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Decodes tokens as they come. `text` is the answer so far; `stopped_by` the stop string that ended it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._stop, self._include_stop = tuple(stop), include_stop
        self._longest_stop = max(map(len, self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._taken = 0  # characters of `text` that take_new has handed out
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Add a token; True when a stop string is complete. With `may_stop=False` stop strings are not looked for."""
        if token_id in self._skipped:
            return False
        new = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        return self._append(new, may_stop)

    def finish(self, *, may_stop: bool = True) -> bool:
        """No token follows: bytes still held back are no character and become U+FFFD. True as for `push`."""
        return self._append(self._decoder.decode(b"", final=True), may_stop) if self.stopped_by is None else False

    def take_new(self, *, finished: bool) -> str:
        """Text since the last call, less what may yet turn out to be the beginning of a stop string."""
        end = len(self.text) if finished else len(self.text) - self._held_characters()
        new = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return new

    def _append(self, new: str, may_stop: bool) -> bool:
        known = len(self.text)
        self.text += new
        if not (may_stop and new and self._stop):
            return False
        # A match ends in the new text: one that ended before was ruled out then, or came too early to count.
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, max(0, known - len(stop) + 1))) >= 0]
        if not found:
            return False
        at, self.stopped_by = min(found, key=lambda match: match[0])
        self.text = self.text[: at + (len(self.stopped_by) if self._include_stop else 0)]
        return True

    def _held_characters(self) -> int:
        longest = min(self._longest_stop - 1, len(self.text))
        for length in range(longest, 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
