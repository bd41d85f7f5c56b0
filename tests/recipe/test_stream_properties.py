"""What holds for every output and every way of chopping it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepseek_recipe as recipe
from deepseek_recipe.streaming.markers import MAX_CACHED_STATES, Marker, MarkerSet, Origin
from tests.recipe.stream_case import v4_tokenizer
from tests.recipe.stream_outputs import D, block, call, chopped, parameter, reply, texts

FRAGMENTS = (
    "a",
    "ab c",
    'q"\\',
    "\n",
    "\n\n",
    "<",
    "</",
    "</think>",
    "</thi",
    f"<{D}",
    f"</{D}",
    f"<{D} calls>\n",
    f"</{D} calls>",
    f'<{D} invoke name="f">',
    f"</{D} invoke>",
    f'<{D} parameter name="k" string="true">',
    f'<{D} parameter name="n" string="false">',
    f"</{D} parameter>",
    "parameter name=",
    'true">',
    '"k" ',
    "[1, 2]",
    "{",
    "```json\n",
    "\n```",
    "STOP",
    "ST",
    "OP",
    D,
    "é",
    "日本",
    "😀",
    "\x00",
)
OUTPUTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
CUTS = st.lists(st.integers(0, 10_000), max_size=40)
OPTIONS = st.builds(
    recipe.ParsingOptions,
    parse_tool_calls=st.booleans(),
    starts_in_tool_calls=st.booleans(),
    thinking_initial_stage=st.sampled_from([None, *recipe.ThinkingInitialStage]),
    stop_sequences=st.sampled_from([[], ["STOP"], ["OP", "STOP"], ["\n"], ["ab", "aab"]]),
    malformed_calls=st.sampled_from(["keep", "repair"]),
    leaked_markup=st.sampled_from(["keep", "suppress"]),
)
TEXT_ARGUMENTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda text: "<" not in text and D not in text and "\ufdd0" not in text
)


@settings(max_examples=400, deadline=None)
@given(OUTPUTS, CUTS, OPTIONS)
def test_chopping_changes_nothing_that_a_client_adds_up(
    text: str, cuts: list[int], options: recipe.ParsingOptions
) -> None:
    whole, pieces = reply(texts(text), options), reply(texts(*chopped(text, cuts)), options)
    assert (pieces.reasoning, pieces.content, pieces.calls) == (whole.reasoning, whole.content, whole.calls)
    assert pieces.finish_reason == whole.finish_reason


@settings(max_examples=150, deadline=None)
@given(OUTPUTS, CUTS, OPTIONS, st.booleans())
def test_chopping_token_ids_changes_nothing_either(
    text: str, cuts: list[int], options: recipe.ParsingOptions, spells_markers: bool
) -> None:
    tokenizer = v4_tokenizer()
    ids = tokenizer.encode_plain([text])[0] if spells_markers else tokenizer.encode(text)
    steps = [recipe.InferenceChunk.tokens(run) for run in _runs(ids, cuts)]
    whole = reply([recipe.InferenceChunk.tokens(ids)], options, tokenizer)
    pieces = reply(steps, options, tokenizer)
    assert (pieces.reasoning, pieces.content, pieces.calls) == (whole.reasoning, whole.content, whole.calls)


@settings(max_examples=300, deadline=None)
@given(OUTPUTS, CUTS)
def test_mended_arguments_are_always_a_json_object(text: str, cuts: list[int]) -> None:
    options = recipe.ParsingOptions(starts_in_tool_calls=True, malformed_calls="repair")
    for name, arguments in reply(texts(*chopped(text, cuts)), options).calls:
        assert name
        assert isinstance(json.loads(arguments), dict)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.from_regex(r"[a-z_]{1,8}", fullmatch=True), TEXT_ARGUMENTS | st.integers() | st.lists(st.none())
        ),
        min_size=1,
        max_size=3,
    ),
    CUTS,
    st.sampled_from(["v4", "v4.1"]),
    st.sampled_from(["keep", "repair", "reject"]),
)
def test_well_formed_calls_come_back_in_every_mode(
    calls: list[dict[str, object]], cuts: list[int], style: str, mode: str
) -> None:
    written = [
        call(f"f{i}", *(_written_parameter(name, value) for name, value in arguments.items()))
        for i, arguments in enumerate(calls)
    ]
    text = f"why</think>text{block(*written, style=style)}"
    options = recipe.ParsingOptions.from_dict({"thinking_initial_stage": "ReasoningStart", "malformed_calls": mode})
    seen = reply(texts(*chopped(text, cuts)), options)
    assert (seen.reasoning, seen.content) == ("why", "text")
    assert [(name, json.loads(arguments)) for name, arguments in seen.calls] == [
        (f"f{i}", arguments) for i, arguments in enumerate(calls)
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 300) | st.integers(128_795, 128_830), max_size=30), CUTS)
def test_any_ids_decode_to_what_their_bytes_say(ids: list[int], cuts: list[int]) -> None:
    tokenizer = v4_tokenizer()
    options = recipe.ParsingOptions(parse_tool_calls=False)
    ids += tokenizer.encode("!")  # releases what is held
    chunks = [recipe.InferenceChunk.tokens(run) for run in _runs(ids, cuts)]
    spelled = b"".join(map(tokenizer.vocabulary.token_bytes, ids)).decode("utf-8", "replace")
    content = reply(chunks, options, tokenizer, is_thinking=False).content
    assert content == spelled.lstrip("\n").replace("</think>", "")


OPEN_CALL = f'<{D} calls><{D} invoke name="f">'
# The pieces of an output of about n tokens.
ADVERSARIAL: dict[str, Callable[[int], list[str]]] = {
    "beginnings of markers": lambda n: ["<"] * n,
    "newlines": lambda n: ["\n"] * n,
    "newlines around a marker": lambda n: [*["\n"] * n, "</think>" + "\n" * n],
    "markers in halves": lambda n: ["</think", ">"] * (n // 2),
    "empty pieces": lambda n: ["", "\n"] * (n // 2),
    "almost a stop sequence": lambda n: ["a" * 99 + "b"] * (n // 100),
    "a prefix of a stop sequence": lambda n: ["a"] * n,
    "a name without end": lambda n: [f'<{D} calls><{D} invoke name="'] + ["x"] * n,
    "a string of beginnings": lambda n: [f'{OPEN_CALL}<{D} parameter name="k" string="true">'] + ["<"] * n,
    "a value of closings": lambda n: [f'{OPEN_CALL}<{D} parameter name="k" string="false">'] + ["</" + D] * n,
    "calls without end": lambda n: [f"<{D} calls>"] + [f'<{D} invoke name="f">'] * (n // 8),
    "everything in one piece": lambda n: [block(*[call("f", parameter("k", "v"))] * (n // 8))],
    "blocks in one piece": lambda n: [block() * (n // 4)],
    "junk in one piece": lambda n: [f"<{D} calls>" + "<a>" * n],
    "names in a name": lambda n: [f"<{D} calls>"] + [f"<{D} invoke {'name=' * 150}>"] * (n // 150),
}


@pytest.mark.parametrize("output", ADVERSARIAL)
@pytest.mark.parametrize("mode", ["keep", "repair"])
def test_time_is_linear_in_the_length_of_an_adversarial_output(output: str, mode: str) -> None:
    pieces = ADVERSARIAL[output]
    options = recipe.ParsingOptions.from_dict(
        {
            "thinking_initial_stage": "ReasoningStart",
            "stop_sequences": ["a" * 200, "a" * 150 + "c"],
            "malformed_calls": mode,
        }
    )

    def seconds(count: int) -> float:
        processor = recipe.StreamProcessor(recipe.MessagesChunkGenerator("id", "m", True), options)
        chunks = texts(*pieces(count))
        start = time.process_time()
        for chunk in chunks:
            processor.push(chunk)
        processor.finish()
        return time.process_time() - start

    seconds(100)
    small, large = min(seconds(2_000) for _ in range(3)), min(seconds(16_000) for _ in range(2))
    assert large < 24 * small + 0.05  # 8 times the output; quadratic work would take 64 times as long


def test_a_long_stop_sequence_keeps_a_bounded_number_of_states() -> None:
    markers = MarkerSet([Marker("ab" * 5_000 + "c")])
    state = markers.root
    for char in "ab" * 20_000:
        state = markers.step(state, char, Origin.TEXT)
    assert len(markers._states) <= MAX_CACHED_STATES
    assert markers.step(state, "c", Origin.TEXT).matched == 0


def _written_parameter(name: str, value: object) -> str:
    is_string = isinstance(value, str)
    return parameter(name, str(value) if is_string else json.dumps(value), is_string=is_string)


def _runs(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in pairwise(places)]
