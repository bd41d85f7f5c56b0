"""The worked examples of docs/recipe.md are true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import deepseek_recipe as recipe

TEXT = (Path(__file__).parents[2] / "docs" / "recipe.md").read_text(encoding="utf-8")


def test_the_three_example_requests_render_to_the_shown_prompt() -> None:
    section = TEXT.split("### One request an API")[1].split("### What decides")[0]
    bodies = [json.loads(body) for body in re.findall(r"```json\n(.*?)```", section, re.DOTALL)]
    (shown,) = re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)
    assert len(bodies) == 3
    requests = (recipe.ChatCompletionRequest, recipe.ResponsesRequest, recipe.MessagesRequest)
    for request_type, body in zip(requests, bodies, strict=True):
        converted = request_type(body).convert(recipe.ConversionOptions())
        rendered = recipe.encoding_for(converted.model_version).render_conversation(converted.conversation)
        pairs = zip(rendered.segments, rendered.is_special, strict=True)
        marked = "".join(f"[{text}]" if special else text for text, special in pairs)
        assert marked.endswith(shown)
        assert marked[: -len(shown)].endswith("to invoke tool calls.\n")
