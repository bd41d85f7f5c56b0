# What must be refused has the wrong type on purpose.
# pyright: reportArgumentType=false
"""The life of a processor, its chunks, options and events; what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

import deepseek_recipe as recipe
from deepseek_recipe.streaming.custom_input import CustomInput
from deepseek_recipe.streaming.decoder import shortest_float32
from tests.recipe.stream_case import v4_tokenizer
from tests.recipe.stream_outputs import block, call, parameter, reply, texts

Chunk = recipe.InferenceChunk
STOP = Chunk.finish(recipe.InferenceFinishReason.Stop)
THINKING = recipe.ParsingOptions(thinking_initial_stage=recipe.ThinkingInitialStage.ReasoningStart)


def generators() -> list[Any]:
    return [
        recipe.ChatCompletionChunkGenerator("id", "model", True),
        recipe.MessagesChunkGenerator("id", "model", True),
        recipe.ResponsesChunkGenerator("id", "model", True),
    ]


RESPONSES = (recipe.ChatCompletionResponse, recipe.MessagesResponse, recipe.ResponsesResponse)
API_INDEX = pytest.mark.parametrize("api", range(3), ids=["chat", "messages", "responses"])


def events_of(api: int, text: str) -> list[Any]:
    generator = generators()[api].with_clock(lambda: 1234.5).with_call_ids(lambda index: f"suffix{index}")
    processor = recipe.StreamProcessor(generator, THINKING)
    return [event for chunk in [*texts(*text), STOP] for event in processor.push(chunk)]


TEXT = f"why</think>text\n{block(call('f', parameter('k', 'v')))}"


@API_INDEX
def test_a_clock_and_a_source_of_ids_make_a_stream_repeatable(api: int) -> None:
    first, second = events_of(api, TEXT), events_of(api, TEXT)
    assert first == second
    assert [event.to_json() for event in first] == [event.to_json() for event in second]
    assert "call_00_suffix0" in "".join(event.to_json() for event in first)


def test_the_clock_is_read_once_a_stream() -> None:
    assert {event.to_dict()["created"] for event in events_of(0, TEXT)} == {1234}


def test_call_ids_are_random_and_of_the_documented_form() -> None:
    processor = recipe.StreamProcessor(recipe.ChatCompletionChunkGenerator("id", "m", True), THINKING)
    events = processor.push(Chunk.text(f"</think>{block(*(call(f'f{i}') for i in range(101)))}"))
    ids = [c["id"] for e in events for c in e.to_dict()["choices"][0]["delta"].get("tool_calls", ()) if "id" in c]
    assert len(set(ids)) == 101
    assert ids[0].startswith("call_00_ET_")
    assert ids[100].startswith("call_100_ET_")
    suffix = ids[7].removeprefix("call_07_ET_")
    assert (len(suffix), suffix[-4:].isdigit(), suffix.isalnum()) == (24, True, True)


@API_INDEX
def test_events_survive_json_and_accumulate_alike(api: int) -> None:
    made = events_of(api, TEXT)
    read = [type(event).from_json(event.to_json()) for event in made]
    assert read == made
    assert [type(event).from_dict(event.to_dict()) for event in made] == made
    assert all(repr(event) == repr(copy) and hash(event) == hash(copy) for event, copy in zip(made, read, strict=True))
    one, other = (RESPONSES[api]("id", "model", 1234, 0, 0) for _ in range(2))
    for event, copy in zip(made, read, strict=True):
        one.accumulate(event)
        other.accumulate(copy)
        assert one == other
    assert one.to_json() == other.to_json()


def test_the_answers_to_one_request_have_indices_and_make_one_response() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "hi"}], "n": 2, "tools": tools}
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions(dialect="extended"))
    response = recipe.ChatCompletionResponse("id", "m", 0, 0, 0)
    for index, text in reversed([*enumerate([TEXT, "b</think>c"])]):
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "m", choice_index=index)
        processor = recipe.StreamProcessor(generator, request.parsing_options)
        usage = recipe.PromptUsage(prompt_tokens=7)
        chunks = [Chunk.ready(prompt_usage=usage), Chunk.text(text, 5), Chunk.finish(recipe.InferenceFinishReason.Stop)]
        for event in [event for chunk in chunks for event in processor.push(chunk)]:
            assert [choice["index"] for choice in event.to_dict()["choices"]] == [index]
            response.accumulate(event)
    whole = response.to_dict()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["choices"][0]["message"]["tool_calls"][0]["index"] == 0
    assert whole["choices"][1]["message"]["content"] == "c"
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["tool_calls", "stop"]
    assert (whole["usage"]["completion_tokens"], whole["usage"]["total_tokens"]) == (10, 17)


@pytest.mark.parametrize(
    ("prefix", "first", "message"),
    [
        (
            {"content": "2 + 2 is"},
            {"role": "assistant", "content": "", "reasoning_content": None},
            {"role": "assistant", "content": "t"},
        ),
        (
            {"content": "", "reasoning_content": "so"},
            {"role": "assistant", "content": None, "reasoning_content": ""},
            {"role": "assistant", "content": None, "reasoning_content": "t"},
        ),
    ],
    ids=["content", "reasoning"],
)
def test_a_continued_answer_starts_with_what_is_continued(prefix: Any, first: Any, message: Any) -> None:
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "prefix": True, **prefix}]
    body = {"model": "DeepSeek-V4.1-Flash", "messages": turns, "thinking": {"type": "enabled"}}
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "model")
    processor = recipe.StreamProcessor(generator, request.parsing_options)
    events = processor.push(Chunk.text("t"))
    assert events[0].to_dict()["choices"][0]["delta"] == first
    response = recipe.ChatCompletionResponse("id", "model", 0, 0, 0)
    for event in events:
        response.accumulate(event)
    assert response.to_dict()["choices"][0]["message"] == message


@API_INDEX
def test_an_accumulated_event_is_consumed(api: int) -> None:
    event = events_of(api, "a")[0]
    response = RESPONSES[api]("id", "model", 0, 0, 0)
    response.accumulate(event)
    with pytest.raises(RuntimeError, match="consumed"):
        response.accumulate(event)
    with pytest.raises(RuntimeError, match="consumed"):
        response.sse_event_name(event)
    with pytest.raises(RuntimeError, match="consumed"):
        event.to_json()
    assert "from_json" in repr(event)


@pytest.mark.bad_input
@API_INDEX
def test_an_event_of_another_api_is_refused(api: int) -> None:
    event = events_of((api + 1) % 3, "a")[0]
    with pytest.raises(TypeError, match="chunk"):
        RESPONSES[api]("id", "model", 0, 0, 0).accumulate(event)
    with pytest.raises(TypeError, match="chunk"):
        RESPONSES[api].sse_event_name(event)


@pytest.mark.bad_input
def test_a_generator_is_consumed_once() -> None:
    for generator in generators():
        recipe.StreamProcessor(generator, THINKING)
        with pytest.raises(RuntimeError, match="consumed"):
            recipe.StreamProcessor(generator, THINKING)
        with pytest.raises(RuntimeError, match="consumed"):
            generator.with_clock(lambda: 0)
    signed = recipe.MessagesChunkGenerator("id", "m", True)
    signed.with_signature("s")
    with pytest.raises(RuntimeError, match="consumed"):
        signed.with_signature("t")


def test_the_options_are_read_when_the_processor_is_built() -> None:
    options = recipe.ParsingOptions(stop_sequences=["STOP"])
    processor = recipe.StreamProcessor(recipe.ChatCompletionChunkGenerator("id", "m", False), options)
    options.stop_sequences = []
    processor.push(Chunk.text("aSTOP"))
    assert processor.finished


def test_finish_ends_once_and_close_ends_for_good() -> None:
    processor = recipe.StreamProcessor(recipe.ChatCompletionChunkGenerator("id", "m", False), recipe.ParsingOptions())
    assert len(processor.finish()) == 2
    assert (processor.finish(), processor.finished) == ([], True)
    processor.close()
    processor.close()
    assert not processor.finished
    with pytest.raises(RuntimeError, match="closed"):
        processor.finish()


@pytest.mark.bad_input
def test_nothing_may_follow_the_end() -> None:
    processor = recipe.StreamProcessor(recipe.ChatCompletionChunkGenerator("id", "m", False), recipe.ParsingOptions())
    processor.push(STOP)
    with pytest.raises(RuntimeError, match="finished"):
        processor.push(Chunk.text("a"))
    assert processor.finish() == []


@pytest.mark.bad_input
def test_token_ids_without_a_tokenizer_close_the_processor() -> None:
    processor = recipe.StreamProcessor(recipe.ChatCompletionChunkGenerator("id", "m", False), recipe.ParsingOptions())
    with pytest.raises(RuntimeError, match="tokenizer"):
        processor.push(Chunk.tokens([1]))
    with pytest.raises(RuntimeError, match="closed"):
        processor.push(Chunk.text("a"))


@pytest.mark.bad_input
def test_a_chunk_of_a_wrong_type_leaves_the_processor_open() -> None:
    processor = recipe.StreamProcessor(recipe.ChatCompletionChunkGenerator("id", "m", False), recipe.ParsingOptions())
    with pytest.raises(TypeError, match="InferenceChunk"):
        processor.push("text")  # type: ignore[arg-type]  # the mistake under test
    assert processor.push(Chunk.text("a"))


@pytest.mark.bad_input
def test_one_log_probability_an_id_is_required() -> None:
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionChunkGenerator("id", "m", False), recipe.ParsingOptions(), v4_tokenizer()
    )
    with pytest.raises(RuntimeError, match="2 log probabilities for 1 token ids"):
        processor.push(Chunk.tokens([67], [(-0.5, []), (-0.5, [])]))


def test_text_and_ids_of_the_same_output_add_up_alike() -> None:
    tokenizer = v4_tokenizer()
    ids = tokenizer.encode(TEXT)
    from_ids = reply([Chunk.tokens([token_id]) for token_id in ids], THINKING, tokenizer)
    from_text = reply(texts(TEXT), THINKING)
    assert (from_ids.reasoning, from_ids.content, from_ids.calls) == ("why", "text", [("f", '{"k": "v"}')])
    assert (from_text.reasoning, from_text.content, from_text.calls) == ("why", "text", [("f", '{"k": "v"}')])
    assert from_ids.usage["completion_tokens"] == len(ids)
    assert from_ids.usage["completion_tokens_details"] == {"reasoning_tokens": len(tokenizer.encode("why"))}


def test_a_log_probability_that_json_cannot_say_is_null() -> None:
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionChunkGenerator("id", "m", False), recipe.ParsingOptions(), v4_tokenizer()
    )
    events = processor.push(Chunk.tokens([67], [(-math.inf, [(67, math.nan)])]))
    (entry,) = events[-1].to_dict()["choices"][0]["logprobs"]["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (None, None)


@pytest.mark.parametrize(
    ("value", "shortest"), [(0.1, 0.1), (1 / 3, 0.33333334), (123456789.123, 123456790.0), (1e-7, 1e-7), (-0.0, -0.0)]
)
def test_log_probabilities_are_single_precision_in_their_shortest_spelling(value: float, shortest: float) -> None:
    assert repr(shortest_float32(value)) == repr(shortest)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk.ready(prompt_usage=recipe.PromptUsage(prompt_tokens=3, prompt_cache_hit_tokens=1)),
        Chunk.ready(system_fingerprint="fp"),
        Chunk.text("é\n", 2),
        Chunk.tokens([1, 2], [(-0.5, [(1, -0.5)]), (-1.0, [])]),
        Chunk.tokens(range(3)),
        STOP,
    ],
    ids=repr,
)
def test_a_chunk_survives_its_dictionary(chunk: recipe.InferenceChunk) -> None:
    copy = Chunk.from_dict(chunk.to_dict())
    assert (copy, hash(copy), repr(copy)) == (chunk, hash(chunk), repr(chunk))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (r"a\n\"b\"", 'a\n"b"'),
        (r"\ud83d\ude00", "😀"),
        (r"a\qb", r"a\qb"),
        (r"\u12zz", r"\u12zz"),
        (r"\ud800x", r"\ud800x"),
        ("a\nb", "a\nb"),
        ('a"ignored', "a"),
    ],
)
def test_the_input_of_a_custom_tool_is_unescaped_however_it_is_chopped(written: str, shown: str) -> None:
    arguments = f'{{"input": "{written}"}}'
    for pieces in ([arguments], list(arguments)):
        reader = CustomInput()
        assert "".join(map(reader.push, pieces)) + reader.finish() == shown


def test_an_escape_that_is_cut_off_is_shown_as_it_is() -> None:
    reader = CustomInput()
    assert reader.push('{"input": "a\\ud83d') + reader.finish() == "a\\ud83d"


@pytest.mark.bad_input
def test_chunks_and_counts_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="content"):
        Chunk.text("a").content = "b"
    with pytest.raises(AttributeError):
        recipe.PromptUsage().prompt_tokens = 1  # type: ignore[misc]  # the mistake under test


def test_options_survive_their_dictionary() -> None:
    options = recipe.ParsingOptions(
        parse_json_output=True,
        thinking_initial_stage=recipe.ThinkingInitialStage.ContentContinuation,
        stop_sequences=["a", ""],
        special_tokens=recipe.SpecialTokens(dsml="#"),
        malformed_calls="repair",
    )
    assert recipe.ParsingOptions.from_dict(options.to_dict()) == options
    assert "stop_sequences=['a', '']" in repr(options)
    assert repr(recipe.ParsingOptions()) == "ParsingOptions()"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Chunk.tokens([-1]), OverflowError),
        (lambda: Chunk.tokens([2**32]), OverflowError),
        (lambda: Chunk.tokens([1.0]), TypeError),
        (lambda: Chunk.tokens("12"), TypeError),
        (lambda: Chunk.tokens({1}), TypeError),
        (lambda: Chunk.tokens([1], [0.5]), TypeError),
        (lambda: Chunk.tokens([1], [(0.5, [(-1, 0.5)])]), OverflowError),
        (lambda: Chunk.text(b"a"), TypeError),
        (lambda: Chunk.text("\ud800"), UnicodeEncodeError),
        (lambda: Chunk.text("a", -1), OverflowError),
        (lambda: Chunk.text("a", 2**64), OverflowError),
        (lambda: Chunk.finish("stop"), TypeError),
        (lambda: Chunk.ready(prompt_usage=3), TypeError),
        (lambda: Chunk(), TypeError),
        (lambda: Chunk.from_dict({"kind": "other"}), ValueError),
        (lambda: Chunk.from_dict({"kind": "finish", "finish_reason": "Done"}), ValueError),
        (lambda: recipe.PromptUsage(prompt_tokens=-1), OverflowError),
        (lambda: recipe.ParsingOptions(stop_sequences="ab"), TypeError),
        (lambda: recipe.ParsingOptions(stop_sequences=[1]), TypeError),
        (lambda: recipe.ParsingOptions(stop_sequences=["\ud800"]), UnicodeEncodeError),
        (lambda: recipe.ParsingOptions(parse_tool_calls=1), TypeError),
        (lambda: recipe.ParsingOptions(thinking_initial_stage="ReasoningStart"), TypeError),
        (lambda: recipe.ParsingOptions.from_dict({"thinking_initial_stage": "Middle"}), ValueError),
        (lambda: recipe.ParsingOptions.from_dict({"stop": []}), TypeError),
        (lambda: recipe.StreamProcessor(1, recipe.ParsingOptions()), TypeError),
        (lambda: recipe.StreamProcessor(recipe.MessagesChunkGenerator("a", "b", True), None), TypeError),
        (lambda: recipe.StreamProcessor(recipe.MessagesChunkGenerator("a", "b", True), THINKING, 1), TypeError),
        (lambda: recipe.MessagesChunkGenerator("a", "b", 1), TypeError),
        (lambda: recipe.MessagesChunkGenerator("a", "\ud800", True), UnicodeEncodeError),
        (lambda: recipe.MessagesChunkGenerator("a", "b", True).with_signature(1), TypeError),
        (lambda: recipe.ResponsesChunkGenerator("a", "b", True).with_namespace_tool_map({"a": 1}), TypeError),
        (lambda: recipe.ResponsesChunkGenerator("a", "b", True).with_namespace_tool_map({"a": ("b",)}), ValueError),
        (lambda: recipe.ResponsesChunkGenerator("a", "b", True).with_namespace_tool_map({1: ("b", "c")}), TypeError),
        (lambda: recipe.ResponsesChunkGenerator("a", "b", True).with_namespace_tool_map(None), TypeError),
        (lambda: recipe.ResponsesChunkGenerator("a", "b", True).with_echo(None), TypeError),
        (lambda: recipe.InferenceChunk.tokens([1], [("0.5", [])]), TypeError),
        (lambda: recipe.MessagesResponse("a", "b", -1, 0, 0), OverflowError),
        (lambda: recipe.MessagesStreamEvent.from_json("[]"), ValueError),
        (lambda: recipe.MessagesStreamEvent.from_json("{"), ValueError),
        (lambda: recipe.MessagesStreamEvent.from_json('{"type": "a\\ndata: forged"}'), ValueError),
        (lambda: recipe.MessagesStreamEvent.from_dict({"type": "a\rb"}), ValueError),
        (lambda: recipe.MessagesStreamEvent.from_dict({"type": 5}), ValueError),
        (lambda: recipe.MessagesStreamEvent.from_dict({"index": float("nan")}), ValueError),
        (lambda: recipe.ChatCompletionChunkGenerator("a", "b", True, choice_index=-1), OverflowError),
        (lambda: recipe.ChatCompletionChunkGenerator("a", "b", True, choice_index=True), TypeError),
    ],
)
def test_bad_arguments_are_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()
