"""Lark with special tokens and embedded JSON Schemas: what the codec's constraints on tool calls are written in."""

from __future__ import annotations

import pytest

from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.lark import lark_dialect


def test_a_special_token_is_named_by_its_id() -> None:
    assert "<[9]>" in lark_dialect('start: "<" <[9]> " calls>"').text


def test_an_embedded_schema_gets_the_same_options_as_one_that_stands_alone() -> None:
    text = lark_dialect('start: "a" %json {"type": "integer", "minimum": 3} "b"').text
    assert '"x-guidance"' in text
    assert '"minimum": 3' in text
    assert text.rstrip().endswith('"b"')


def test_lines_behind_a_schema_of_several_lines_are_counted_on() -> None:
    with pytest.raises(GrammarError, match="line 4"):
        lark_dialect('start: %json {\n"type":\n"integer"}\nother: <think>')


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('start: %json {"type": "array", "uniqueItems": true}', "uniqueItems"),
        ('start: %json {"type": ', "no JSON object"),
        ("start: %json [1]", "not Lark"),
        ("start: %json {" + '"a": {' * 5000, "no JSON object"),
        ("start: <[99999999999]>", "99999999999"),
        ('start: %json {"x-guidance": {"lenient": true}, "$ref": "http://elsewhere/x"}', "elsewhere"),
    ],
)
def test_what_cannot_be_enforced_is_named(text: str, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        lark_dialect(text)


def test_a_schema_cannot_bring_options_of_its_own() -> None:
    text = lark_dialect('start: %json {"type": "integer", "x-guidance": {"lenient": true}}').text
    assert '"lenient": true' not in text
