"""Prompts of the kinds of text that the bundled model knows; what a draft is worth depends on them.

prose      openings of novels, fairy tales and manuals: half a draft a step is accepted
stories    beginnings of stories from the grammar that it was trained on: about three drafts a step
chat       conversations in its chat format, with and without thinking: more than two
mixed      one of each in turn
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

from deepseek_recipe.conversation import Conversation
from deepseek_recipe.rendering.v41 import DeepseekV41Encoding

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tools/ is not an installed package

from tools.train_tiny import dialogues, stories

__all__ = ["KINDS", "prompt"]

_OPENING_WORDS = 12
_ENCODING = DeepseekV41Encoding()
_PROSE = (
    "It was a fine morning, and Elizabeth",
    "And it came to pass that",
    "The module provides",
    "The old man looked at the sea and",
    "In the beginning",
    "To install the package, first",
    "In the morning the king said to",
    "Her sister had never been so",
)
_TASKS: tuple[Callable[[random.Random], dialogues.Exchange], ...] = (
    dialogues.tell_story,
    dialogues.greeting,
    dialogues.retell,
    dialogues.arithmetic,
)


def prompt(kind: str, number: int) -> str:
    """Prompt `number` of a kind, with spellings of special tokens (`parse_special=True`)."""
    if kind == "mixed":
        kind = KINDS[number % 3]
    if kind == "prose":
        return _PROSE[number % len(_PROSE)]
    rng = random.Random(1_000_000 + number)
    if kind == "stories":
        return " ".join(stories.story(rng).split(" ")[:_OPENING_WORDS])
    exchange = _TASKS[number % len(_TASKS)](rng)
    conversation = Conversation(list(exchange.messages[:-1]), thinking_mode=rng.random() < 0.5)
    return "".join(_ENCODING.render_conversation(conversation).segments)


KINDS = ("prose", "stories", "chat", "mixed")
