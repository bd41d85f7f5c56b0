"""Calls that deviate from the format: kept, mended or refused; and markup that leaks while tools are off."""

from __future__ import annotations

import json

import pytest

import deepseek_recipe as recipe
from deepseek_recipe.errors import MalformedToolCallError
from tests.recipe.stream_outputs import D, block, call, parameter, reply, texts

REPAIR = recipe.ParsingOptions(malformed_calls="repair")
REJECT = recipe.ParsingOptions(malformed_calls="reject")
OPEN = f"<{D} calls>\n"
OPEN_CALL = f'{OPEN}<{D} invoke name="f">'

# What the model wrote, and (name, arguments) of the calls that it means.
MENDED = {
    "a space in the name of a function": (block(call("my tool")), [("my tool", {})]),
    "a space in the name of a parameter": (block(call("f", parameter("a b", "v"))), [("f", {"a b": "v"})]),
    "a quote in the name of a parameter": (block(call("f", parameter('a"b', "v"))), [("f", {'a"b': "v"})]),
    "single quotes": (
        block(f"<{D} invoke name='f'>{parameter('k', 'v').replace(chr(34), chr(39))}</{D} invoke>"),
        [("f", {"k": "v"})],
    ),
    "a value that is not JSON": (block(call("f", parameter("k", "{x", is_string=False))), [("f", {"k": "{x"})]),
    "NaN": (block(call("f", parameter("k", "NaN", is_string=False))), [("f", {"k": "NaN"})]),
    "an empty value": (block(call("f", parameter("k", "", is_string=False))), [("f", {"k": ""})]),
    "no string attribute": (
        block(call("f", f'<{D} parameter name="k">12</{D} parameter><{D} parameter name="z">abc</{D} parameter>')),
        [("f", {"k": 12, "z": "abc"})],
    ),
    "another order of the attributes": (
        block(call("f", f'<{D} parameter string="false" name="k">12</{D} parameter>')),
        [("f", {"k": 12})],
    ),
    "an extra attribute": (
        block(call("f", f'<{D} parameter name="k" type="int" string="false">12</{D} parameter>')),
        [("f", {"k": 12})],
    ),
    "a parameter given twice": (block(call("f", parameter("k", "1"), parameter("k", "2"))), [("f", {"k": "1"})]),
    "a string that is cut off": (f'{OPEN_CALL}<{D} parameter name="k" string="true">ab', [("f", {"k": "ab"})]),
    "a closing tag that is cut off": (
        f'{OPEN_CALL}<{D} parameter name="k" string="true">ab</{D} par',
        [("f", {"k": "ab"})],
    ),
    "JSON that is cut off": (f'{OPEN_CALL}<{D} parameter name="k" string="false">[1', [("f", {"k": "[1"})]),
    "a tag that is cut off": (f'{OPEN_CALL}<{D} parameter name="k"', [("f", {})]),
    "a name that is cut off": (f'{OPEN}<{D} invoke name="f', []),
    "an unclosed parameter": (
        f'{OPEN_CALL}<{D} parameter name="k" string="true">ab</{D} invoke></{D} calls>',
        [("f", {"k": "ab"})],
    ),
    "an unclosed call": (f'{OPEN_CALL}<{D} invoke name="g"></{D} invoke></{D} calls>', [("f", {}), ("g", {})]),
    "text between the tags": (block("junk", call("f", "junk")), [("f", {})]),
    "an unknown tag": (block(f"<{D} note>", call("f")), [("f", {})]),
    "a call without a name": (block(call("", parameter("k", "1")), call("g")), [("g", {})]),
    "a call outside of a block": (call("f", parameter("k", "1")), [("f", {"k": "1"})]),
    "a tag that never ends": (block(f"<{D}{'x' * 5000}", call("f")), [("f", {})]),
}


@pytest.mark.parametrize("deviation", MENDED)
def test_a_malformed_call_is_mended(deviation: str) -> None:
    text, meant = MENDED[deviation]
    for pieces in ([text], list(text)):
        calls = reply(texts(*pieces), REPAIR, is_thinking=False).calls
        assert [(name, json.loads(arguments)) for name, arguments in calls] == meant


@pytest.mark.bad_input
@pytest.mark.parametrize("deviation", sorted(MENDED.keys() - {"a space in the name of a parameter"}))
def test_a_malformed_call_is_refused(deviation: str) -> None:
    text, _ = MENDED[deviation]
    for pieces in ([text], list(text)):
        with pytest.raises(MalformedToolCallError, match="malformed_calls="):
            reply(texts(*pieces), REJECT, is_thinking=False)


def test_a_space_in_the_name_of_a_parameter_is_no_deviation() -> None:
    text, _ = MENDED["a space in the name of a parameter"]
    assert reply(texts(*text), REJECT, is_thinking=False).calls == [("f", '{"a b": "v"}')]


@pytest.mark.bad_input
def test_a_refused_call_closes_the_processor() -> None:
    processor = recipe.StreamProcessor(recipe.ChatCompletionChunkGenerator("id", "m", False), REJECT)
    with pytest.raises(MalformedToolCallError):
        processor.push(recipe.InferenceChunk.text(block("junk")))
    with pytest.raises(RuntimeError, match="closed"):
        processor.finish()


def test_text_and_a_second_block_behind_a_block_survive_mending() -> None:
    text = f"one{block(call('f'))}\n\ntwo{block(call('g'))} three"
    seen = reply(texts(*text), REPAIR, is_thinking=False)
    assert (seen.content, seen.calls) == ("onetwo three", [("f", "{}"), ("g", "{}")])


@pytest.mark.bad_input
@pytest.mark.parametrize("tail", ["tail", block(call("g"))])
def test_text_behind_a_block_is_refused(tail: str) -> None:
    with pytest.raises(MalformedToolCallError, match="after the block"):
        reply(texts(*block(call("f")), *tail), REJECT, is_thinking=False)


def test_newlines_behind_a_block_are_no_deviation() -> None:
    assert reply(texts(f"{block(call('f'))}\n\n"), REJECT, is_thinking=False).calls == [("f", "{}")]


@pytest.mark.parametrize("options", [REPAIR, REJECT], ids=["repair", "reject"])
def test_a_lone_marker_is_content_unless_calls_are_kept_as_they_are(options: recipe.ParsingOptions) -> None:
    text = f"the marker <{D} opens a block"
    assert reply(texts(*text), options, is_thinking=False).content == text
    assert reply(texts(*text), is_thinking=False).content == "the marker "


def test_a_marker_inside_a_string_stays_text_when_calls_are_mended() -> None:
    text = block(call("f", parameter("k", f"a </{D} foo> <{D} b")))
    calls = reply(texts(*text), REPAIR, is_thinking=False).calls
    assert [json.loads(arguments) for _, arguments in calls] == [{"k": f"a </{D} foo> <{D} b"}]


def test_a_required_call_is_mended_from_the_first_token() -> None:
    options = recipe.ParsingOptions(starts_in_tool_calls=True, malformed_calls="repair")
    seen = reply(texts(call("f", parameter("k", "v")), f"</{D} calls>tail"), options, is_thinking=False)
    assert (seen.content, seen.calls) == ("tail", [("f", '{"k": "v"}')])


def test_strings_stream_while_calls_are_mended() -> None:
    processor = recipe.StreamProcessor(recipe.ChatCompletionChunkGenerator("id", "m", False), REPAIR)
    processor.push(recipe.InferenceChunk.text(f'{OPEN_CALL}<{D} parameter name="k" string="true">'))
    (event,) = processor.push(recipe.InferenceChunk.text("one"))
    assert event.to_dict()["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] == "one"


@pytest.mark.parametrize("stage", [None, "ReasoningStart"])
def test_leaked_markup_is_suppressed_while_tools_are_off(stage: str | None) -> None:
    options = {"parse_tool_calls": False, "thinking_initial_stage": stage}
    text = f"one{block(call('f', parameter('k', 'v')))} two"
    kept = reply(texts(*text), recipe.ParsingOptions.from_dict(options), is_thinking=stage is not None)
    assert kept.reasoning + kept.content == text
    options["leaked_markup"] = "suppress"
    seen = reply(texts(*text), recipe.ParsingOptions.from_dict(options), is_thinking=stage is not None)
    assert (seen.reasoning + seen.content, seen.calls, seen.finish_reason) == ("one two", [], "stop")


@pytest.mark.parametrize("setting", ["malformed_calls", "leaked_markup"])
@pytest.mark.bad_input
def test_an_unknown_mode_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be one of keep, .*'mend'"):
        recipe.ParsingOptions.from_dict({setting: "mend"})


def test_a_long_block_in_one_piece_reads_as_it_does_token_by_token() -> None:
    calls = [
        call(f"f{i}", parameter("k", "v" * (i % 97)), parameter("n", f"[{i}]", is_string=False)) for i in range(200)
    ]
    text = f"one{block(*calls)}two{block(call('g'))}three"
    whole, pieces = (reply(texts(*split), REPAIR, is_thinking=False) for split in ([text], list(text)))
    assert (whole.content, whole.calls) == (pieces.content, pieces.calls)
    assert (whole.content, len(whole.calls)) == ("onetwothree", 201)
