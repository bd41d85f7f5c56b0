"""A prompt under construction and a finished one.

    segments   "<|bos|>"  "<|User|>"  "Hello"  "<|Assistant|>"  "</think>"
    is_special     1          1          0            1             1

Plain text that is written piece by piece becomes one segment, since everything between two special tokens is tokenized
together. Special tokens are marked where they are written, never found by scanning: a spelling inside user text stays
text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, compress

from deepseek_recipe.conversation import SystemMessage, ToolMessage, UserMessage
from deepseek_recipe.images.sources import ImageSource
from deepseek_recipe.tokens import SpecialToken

__all__ = ["PromptBuilder", "RenderedPrompt"]

_DEFAULT_IMAGE = SpecialToken.Image.default_str()


class RenderedPrompt:
    """A prompt: its text, and which spans of it are special tokens.

    `segments` are the spans of the text in order, none empty; `is_special` says which of them are special tokens. No
    two plain segments are neighbours.
    """

    __slots__ = ("_prompt", "image_sources", "is_special", "segments")

    def __init__(self, segments: list[str], is_special: bytearray, image_sources: list[ImageSource]) -> None:
        self.segments = segments
        self.is_special = is_special
        self.image_sources = image_sources
        self._prompt: str | None = None

    @property
    def prompt(self) -> str:
        """The text. A tokenizer that recognises special spellings must not see it: use `special_ranges`."""
        if self._prompt is None:
            self._prompt = "".join(self.segments)
        return self._prompt

    @property
    def special_ranges(self) -> list[tuple[int, int]]:
        """Half-open ranges [start, end) of the special tokens in `prompt`, in characters, ascending and disjoint."""
        ends = list(accumulate(map(len, self.segments)))
        starts = [0, *ends]
        return list(compress(zip(starts, ends, strict=False), self.is_special))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RenderedPrompt)
            and self.segments == other.segments
            and self.is_special == other.is_special
            and self.image_sources == other.image_sources
        )

    __hash__ = None  # type: ignore[assignment]  # mutable parts

    def __repr__(self) -> str:
        return f"RenderedPrompt(prompt=<{len(self.prompt)} characters>, image_sources={len(self.image_sources)})"


class PromptBuilder:
    """Collects text and special tokens in the order in which they are written."""

    __slots__ = ("_image_sources", "_is_special", "_plain", "_segments")

    def __init__(self) -> None:
        self._segments: list[str] = []
        self._is_special = bytearray()
        self._plain: list[str] = []
        self._image_sources: list[ImageSource] = []

    def text(self, text: str) -> None:
        """Writes plain text."""
        if text:
            self._plain.append(text)

    def special(self, spelling: str) -> None:
        """Writes a special token; one without a spelling is none."""
        if spelling:
            if self._plain:
                self._end_plain()
            self._segments.append(spelling)
            self._is_special.append(1)

    def joined(self, texts: Sequence[str], spelling: str) -> None:
        """Writes texts, none empty, with a special token between each and the next."""
        if not spelling:
            self.text("".join(texts))
            return
        segments = [spelling] * (2 * len(texts) - 1)
        segments[::2] = texts
        self.extend(segments, b"\0" + b"\1\0" * (len(texts) - 1))

    def extend(self, segments: Sequence[str], is_special: Sequence[int]) -> None:
        """Writes segments of a finished prompt that begin and end with a plain one."""
        self._plain.append(segments[0])
        if len(segments) > 1:
            self._end_plain()
            self._segments += segments[1:-1]
            self._is_special += bytes(is_special[1:-1])
            self._plain.append(segments[-1])

    def specials_in(self, text: str, pattern: re.Pattern[str]) -> None:
        """Writes `text` with every match of `pattern` as a special token."""
        end = 0
        for match in pattern.finditer(text):
            self.text(text[end : match.start()])
            self.special(match[0])
            end = match.end()
        self.text(text[end:] if end else text)

    def content(self, message: SystemMessage | UserMessage | ToolMessage) -> None:
        """Writes the content of a message with its image placeholders as special tokens."""
        if not message.image_sources:
            self.text(message.content)
            return
        # What was written into the message, whatever the encoding would write: another spelling in it is text.
        spelling = message.image_token or _DEFAULT_IMAGE
        end = 0
        for start in _placeholder_offsets(message, spelling):
            self.text(message.content[end:start])
            self.special(spelling)
            end = start + len(spelling)
        self.text(message.content[end:])
        self._image_sources.extend(message.image_sources)

    def finish(self) -> RenderedPrompt:
        """The prompt as written so far."""
        if self._plain:
            self._end_plain()
        return RenderedPrompt(self._segments, self._is_special, self._image_sources)

    def _end_plain(self) -> None:
        self._segments.append("".join(self._plain))
        self._is_special.append(0)
        self._plain.clear()


def _placeholder_offsets(message: SystemMessage | UserMessage | ToolMessage, spelling: str) -> Sequence[int]:
    """Where the placeholders of a message's images start: given offsets, or the first N occurrences."""
    content = message.content
    if message.image_offsets is not None:
        return [o for o in sorted(message.image_offsets) if o >= 0 and content.startswith(spelling, o)]
    offsets: list[int] = []
    start = content.find(spelling)
    while start >= 0 and len(offsets) < len(message.image_sources):
        offsets.append(start)
        start = content.find(spelling, start + len(spelling))
    return offsets
