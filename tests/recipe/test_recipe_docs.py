"""The example of docs/recipe.md on the output side runs and says what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import deepseek_recipe as recipe

PAGE = (Path(__file__).parents[2] / "docs" / "recipe.md").read_text()


def test_the_example_of_the_output_side_streams_what_the_page_shows() -> None:
    section = PAGE[PAGE.index("## Output side") :]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    shown = re.search(r"```json\n(.*?)```", section, re.DOTALL)
    assert code is not None
    assert shown is not None
    sent: list[bytes] = []
    usage = recipe.PromptUsage(prompt_tokens=10, prompt_cache_hit_tokens=4)
    engine = [
        recipe.InferenceChunk.ready(prompt_usage=usage),
        recipe.InferenceChunk.text("r</think>a", 1),
        recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop),
    ]
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    names = {"recipe": recipe, "body": json.dumps(body), "engine": engine, "tokenizer": None, "send": sent.append}
    exec(code[1], names)
    messages = b"".join(sent).decode().split("\n\n")
    deltas = [json.loads(message[len("data: ") :])["choices"][0]["delta"] for message in messages[:-2]]
    assert deltas == [json.loads(line) for line in shown[1].splitlines()]
    assert messages[-2:] == ["data: [DONE]", ""]
