"""Model outputs for the stream tests, and what a client would make of their events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import deepseek_recipe as recipe

D = "｜DSML｜"


def block(*calls: str, style: str = "v4.1") -> str:
    """A block of calls in the spelling of V4.1 or V4."""
    text = f"\n\n<{D} calls>\n{''.join(calls)}</{D} calls>"
    return text if style == "v4.1" else text.replace(f"{D} calls", f"{D}tool_calls").replace(f"{D} ", D)


def call(name: str, *parameters: str) -> str:
    """One call; `name` without quotes."""
    return f'<{D} invoke name="{name}">\n{"".join(parameters)}</{D} invoke>\n'


def parameter(name: str, value: str, *, is_string: bool = True) -> str:
    """One parameter; `value` as the model writes it."""
    return f'<{D} parameter name="{name}" string="{str(is_string).lower()}">{value}</{D} parameter>\n'


@dataclass
class Reply:
    """What a client of Chat Completions has at the end."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)


def texts(*pieces: str) -> list[recipe.InferenceChunk]:
    """Text chunks of one token each."""
    return [recipe.InferenceChunk.text(piece, 1) for piece in pieces]


def reply(
    chunks: Iterable[recipe.InferenceChunk],
    options: recipe.ParsingOptions | None = None,
    tokenizer: recipe.Tokenizer | None = None,
    *,
    is_thinking: bool = True,
) -> Reply:
    """Stream `chunks` as Chat Completions and add the deltas up."""
    generator = recipe.ChatCompletionChunkGenerator("id", "model", is_thinking)
    processor = recipe.StreamProcessor(generator, options or recipe.ParsingOptions(), tokenizer)
    result = Reply()
    for chunk in chunks:
        _add(result, processor.push(chunk))
        if processor.finished:
            break
    _add(result, processor.finish())
    return result


def chopped(text: str, cuts: Sequence[int]) -> list[str]:
    """`text` cut at these places, which are taken modulo its length."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


def _add(result: Reply, events: list[recipe.ChatCompletionChunk]) -> None:
    for event in events:
        data = event.to_dict()
        choice = data["choices"][0]
        delta = choice["delta"]
        result.reasoning += delta.get("reasoning_content") or ""
        result.content += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            function = piece["function"]
            if "name" in function:
                result.calls.append((function["name"], ""))
            name, arguments = result.calls[piece["index"]]
            result.calls[piece["index"]] = (name, arguments + function["arguments"])
        result.finish_reason = choice["finish_reason"] or result.finish_reason
        result.usage = data.get("usage") or result.usage
