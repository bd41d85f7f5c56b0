"""What the three event generators have in common: identity, clock, call ids, and being consumed once.

call id = call_ + index (two digits) + _ + [ET_] + 20 letters or digits + 4 digits
          ET: thinking was on and no reasoning was written, which `ReasoningContentBehavior.Reject` reads back
"""

from __future__ import annotations

import copy
import random
import string
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from deepseek_recipe.checks import require_bool, require_str
from deepseek_recipe.enums import InferenceFinishReason
from deepseek_recipe.streaming.events import StreamEvent
from deepseek_recipe.streaming.parser import Part
from deepseek_recipe.streaming.stages import PartKind
from deepseek_recipe.streaming.usage import Usage

__all__ = ["ChunkGenerator", "random_call_suffix"]

_GeneratorT = TypeVar("_GeneratorT", bound="ChunkGenerator")
# From the operating system: forked workers must not give out the same ids.
_RANDOM = random.SystemRandom()
_LETTERS_AND_DIGITS = string.ascii_letters + string.digits


def random_call_suffix(index: int) -> str:
    """The random end of the id of call number `index`."""
    del index
    return "".join(_RANDOM.choices(_LETTERS_AND_DIGITS, k=20) + _RANDOM.choices(string.digits, k=4))


class ChunkGenerator(ABC):
    """Turns parts of parsed output into the events of one API. One response; a `StreamProcessor` consumes it."""

    _clock: Callable[[], float] = staticmethod(time.time)
    _call_suffix: Callable[[int], str] = staticmethod(random_call_suffix)

    def __init__(self, id: str, model: str, thinking_mode: bool) -> None:  # noqa: A002  (the name is part of the API)
        require_str("id", id)
        require_str("model", model)
        require_bool("thinking_mode", thinking_mode)
        self._id = id
        self._model = model
        self._is_thinking = thinking_mode
        self._created_s = int(self._clock())
        self._has_reasoned = False
        self._call_count = 0
        self._is_consumed = False

    def with_clock(self: _GeneratorT, clock: Callable[[], float]) -> _GeneratorT:
        """Consume this generator; the new one takes the time (seconds since 1970) from `clock`, once, now."""
        generator = self.take()
        generator._clock = clock
        generator._created_s = int(clock())
        return generator

    def with_call_ids(self: _GeneratorT, suffix: Callable[[int], str]) -> _GeneratorT:
        """Consume this generator; in the new one the id of call number i ends in `suffix(i)`."""
        generator = self.take()
        generator._call_suffix = suffix
        return generator

    def take(self: _GeneratorT) -> _GeneratorT:
        """Consume this generator and return its successor.

        Raises: RuntimeError if it was consumed before.
        """
        if self._is_consumed:
            raise RuntimeError("this chunk generator has been consumed; build a new one for every response")
        successor = copy.copy(self)
        self._is_consumed = True
        return successor

    @abstractmethod
    def start(self, usage: Usage, system_fingerprint: str | None) -> list[Any]:
        """The events before any output."""

    @abstractmethod
    def delta(self, kind: PartKind, text: str) -> StreamEvent | None:
        """The one event that continues the open reasoning, content or arguments; None if it takes more than one."""

    @abstractmethod
    def part(self, part: Part) -> list[Any]:
        """The events of any part."""

    @abstractmethod
    def finish(self, reason: InferenceFinishReason | None, usage: Usage, stop_sequence: str | None) -> list[Any]:
        """The events that end the response. `reason` None: the input ended without saying why, or a stop matched."""

    def _next_call_id(self) -> str:
        mark = "ET_" if self._is_thinking and not self._has_reasoned else ""
        index = self._call_count
        self._call_count += 1
        return f"call_{index:02d}_{mark}{self._call_suffix(index)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self._id!r}, model={self._model!r}, thinking_mode={self._is_thinking})"
