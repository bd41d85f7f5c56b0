"""Conversation objects are checked, immutable values, and survive the trip through JSON."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepseek_recipe as recipe
from deepseek_recipe.conversation_json import conversation_from_json, conversation_to_json

TEXT = st.text(max_size=12)
SOURCES = st.lists(
    st.one_of(
        TEXT.map(recipe.UrlImageSource),
        TEXT.map(lambda url: recipe.DataUrlImageSource(url, "low", path="p")),
        st.binary(max_size=5).map(recipe.BytesImageSource),
    ),
    max_size=2,
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
TOOLS = st.lists(
    st.builds(recipe.ToolDefinition, TEXT, st.none() | TEXT, JSON, st.none() | st.booleans(), st.booleans()), max_size=2
)
CALLS = st.none() | st.lists(st.builds(recipe.ToolCall, TEXT, TEXT, TEXT), max_size=3)
PLACES = {
    "image_token": st.none() | st.text(min_size=1, max_size=3),
    "image_offsets": st.none() | st.lists(st.integers(0, 9), max_size=2),
}
MESSAGES = st.one_of(
    st.builds(recipe.SystemMessage, TEXT, SOURCES, st.none() | TOOLS),
    st.builds(recipe.UserMessage, TEXT, SOURCES, **PLACES),
    st.builds(recipe.AssistantMessage, TEXT, st.none() | TEXT, CALLS, st.booleans()),
    st.builds(recipe.ToolMessage, TEXT, st.none() | TEXT, SOURCES, **PLACES),
    st.builds(recipe.LatestReminderMessage, TEXT),
)
FORMATS = st.one_of(
    st.sampled_from([{"response_format": "text"}, {"response_format": "json_object"}]),
    JSON.filter(lambda value: value is not None).map(lambda schema: {"response_schema": schema}),
    TEXT.map(lambda regex: {"response_regex": regex}),
)
CONVERSATIONS = st.builds(
    lambda messages, thinking, tools, choice, effort, form: recipe.Conversation(
        messages, thinking_mode=thinking, tools=tools, tool_choice=choice, reasoning_effort=effort, **form
    ),
    st.lists(MESSAGES, max_size=5),
    st.booleans(),
    TOOLS,
    st.sampled_from(["auto", "none", "required"]),
    st.sampled_from([None, "low", "high", "xhigh", "max"]),
    FORMATS,
)


@settings(max_examples=150, deadline=None)
@given(CONVERSATIONS)
def test_a_conversation_survives_json(conversation: recipe.Conversation) -> None:
    assert conversation_from_json(conversation_to_json(conversation)) == conversation


@settings(max_examples=150, deadline=None)
@given(CONVERSATIONS)
def test_ranges_are_ascending_disjoint_and_cover_what_was_marked(conversation: recipe.Conversation) -> None:
    for encoding in (recipe.DeepseekV4Encoding(), recipe.DeepseekV41Encoding()):
        rendered = encoding.render_conversation(conversation)
        end = 0
        for start, stop in rendered.special_ranges:
            assert end <= start < stop <= len(rendered.prompt)
            end = stop
        marked = [s for s, special in zip(rendered.segments, rendered.is_special, strict=True) if special]
        assert [rendered.prompt[start:stop] for start, stop in rendered.special_ranges] == marked
        plain = list(rendered.is_special)
        assert not any(a == b == 0 for a, b in pairwise(plain))


@settings(max_examples=60, deadline=None)
@given(CONVERSATIONS)
def test_rendering_is_repeatable(conversation: recipe.Conversation) -> None:
    encoding = recipe.DeepseekV41Encoding()
    assert encoding.render_conversation(conversation) == encoding.render_conversation(conversation)


def test_values_compare_and_print() -> None:
    assert recipe.UserMessage("a") == recipe.UserMessage("a") != recipe.UserMessage("b")
    assert repr(recipe.UserMessage('a"b')) == 'UserMessage("a\\"b", image_sources=0)'
    assert repr(recipe.ToolCall("i", "n", "{}")) == 'ToolCall(id="i", name="n", arguments="{}")'
    assert str(recipe.SpecialToken.Bos) == repr(recipe.SpecialToken.Bos) == "SpecialToken.Bos"
    assert repr(recipe.SpecialTokens(user="U")) == "SpecialTokens(user='U')"
    assert repr(recipe.BytesImageSource(bytes(5))) == 'BytesImageSource(<5 bytes>, detail="high", path="")'
    assert repr(recipe.UrlImageSource("u", path="p")) == 'UrlImageSource("u", detail="high", path="p")'


def test_lists_are_copied() -> None:
    messages: list[recipe.Message] = [recipe.UserMessage("a")]
    conversation = recipe.Conversation(messages)
    messages.clear()
    assert len(conversation.messages) == 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: recipe.UserMessage(5), TypeError),  # type: ignore[arg-type]
        (lambda: recipe.UserMessage("a", "b"), TypeError),  # type: ignore[arg-type]
        (lambda: recipe.UserMessage("a", [5]), TypeError),  # type: ignore[list-item]
        (lambda: recipe.UserMessage("a", ""), TypeError),  # type: ignore[arg-type]
        (lambda: recipe.UserMessage("a", image_token=""), ValueError),
        (lambda: recipe.UserMessage("a", [], "x"), TypeError),  # type: ignore[misc]
        (lambda: recipe.ToolMessage("a", "c", [], "x"), TypeError),  # type: ignore[misc]
        (lambda: recipe.Conversation([], False), TypeError),  # type: ignore[misc]
        (lambda: recipe.Conversation(tool_choice=None), TypeError),  # type: ignore[arg-type]
        (lambda: recipe.UrlImageSource("u", "low", "p"), TypeError),  # type: ignore[misc]
        (lambda: recipe.ImageInfo("x", 1, 1), TypeError),  # type: ignore[arg-type]
        (lambda: recipe.SpecialTokens(bos="\ud800"), UnicodeEncodeError),
        (lambda: recipe.SpecialTokens().token("bos"), TypeError),  # type: ignore[arg-type]
        (lambda: recipe.DeepseekV4Encoding().with_tokenizer(3), TypeError),  # type: ignore[arg-type]
        (lambda: recipe.ConversionOptions().with_model_versions_by_name([]), TypeError),  # type: ignore[arg-type]
        (lambda: recipe.UserMessage("\ud800"), UnicodeEncodeError),
        (lambda: recipe.AssistantMessage("a", prefix=1), TypeError),  # type: ignore[arg-type]
        (lambda: recipe.ToolDefinition("f", parameters=float("nan")), ValueError),
        (lambda: recipe.ToolDefinition("f", parameters={1: 2}), TypeError),
        (lambda: recipe.Conversation([5]), TypeError),  # type: ignore[list-item]
        (lambda: recipe.Conversation(tool_choice="any"), ValueError),  # type: ignore[arg-type]
        (lambda: recipe.Conversation(reasoning_effort="medium"), ValueError),  # type: ignore[arg-type]
        (lambda: recipe.Conversation(response_format="regex"), ValueError),
        (lambda: recipe.Conversation(response_schema={}, response_regex="a"), ValueError),
        (lambda: recipe.Conversation(response_schema={}, response_format="json_object"), ValueError),
        (lambda: recipe.UrlImageSource("u", "huge"), ValueError),  # type: ignore[arg-type]
        (lambda: recipe.BytesImageSource("x"), TypeError),  # type: ignore[arg-type]
        (lambda: recipe.ConversionOptions(thinking_max_tokens_upper_bound=-1), OverflowError),
        (lambda: recipe.ConversionOptions(dialect="loose"), ValueError),  # type: ignore[arg-type]
        (lambda: recipe.SpecialTokens(bos=5), TypeError),  # type: ignore[arg-type]
        (lambda: recipe.ConversationRequest(5, recipe.ModelVersion.DeepseekV4Pro), TypeError),  # type: ignore[arg-type]
        (lambda: conversation_from_json({"messages": [{"role": "robot"}]}), ValueError),
        (lambda: conversation_from_json({"mesages": []}), ValueError),
        (lambda: conversation_from_json({"messages": [5]}), ValueError),
        (lambda: conversation_from_json({"messages": {"role": "user"}}), ValueError),
        (lambda: conversation_from_json({"messages": [{"role": "user", "image_sources": [5]}]}), ValueError),
        (
            lambda: conversation_from_json({"messages": [{"role": "user", "image_sources": [{"kind": "url"}]}]}),
            ValueError,
        ),
        (
            lambda: conversation_from_json({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}),
            ValueError,
        ),
        (
            lambda: conversation_from_json({"messages": [{"role": "user", "image_sources": [{"kind": []}]}]}),
            ValueError,
        ),
        (lambda: conversation_from_json({"messages": [{"role": {}}]}), ValueError),
        (lambda: conversation_from_json({"tools": [5]}), ValueError),
    ],
)
def test_wrong_arguments_are_refused(build: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        build()


def test_options_are_changed_under_the_names_of_the_properties() -> None:
    changes: dict[str, Any] = {
        "default_thinking_mode": False,
        "reasoning_content_behavior": recipe.ReasoningContentBehavior.Reject,
        "responses_web_search": recipe.WebSearchBehavior.Reject,
        "messages_web_search": recipe.WebSearchBehavior.Drop,
        "special_tokens": recipe.SpecialTokens(bos="b"),
        "model_versions_by_name": {"x": recipe.ModelVersion.DeepseekV4Pro},
        "thinking_max_tokens_upper_bound": 3,
        "non_thinking_max_tokens_upper_bound": 4,
    }
    for name, value in changes.items():
        assert getattr(getattr(recipe.ConversionOptions(), f"with_{name}")(**{name: value}), name) == value
    alias = recipe.ConversionOptions().with_model_alias(model="m", model_version=recipe.ModelVersion.DeepseekV4Pro)
    assert alias.model_versions_by_name["m"] is recipe.ModelVersion.DeepseekV4Pro


@pytest.mark.bad_input
def test_values_cannot_be_changed() -> None:
    message = recipe.UserMessage("a")
    with pytest.raises(AttributeError):
        message.content = "b"  # type: ignore[misc]


@pytest.mark.bad_input
@pytest.mark.parametrize("numbers", [(-1, 5), (1, 2**32)])
def test_token_numbers_have_a_range(numbers: tuple[int, int]) -> None:
    request = recipe.ConversationRequest(recipe.Conversation(), recipe.ModelVersion.DeepseekV4Pro)
    with pytest.raises(OverflowError):
        request.resolve_max_tokens(*numbers)


def test_spellings_can_be_changed() -> None:
    table = recipe.SpecialTokens(user="[U]", dsml="[D]", ref="<<", ref_end="<<<")
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(table)
    call = recipe.ToolCall("c", "f", '{"a": 1}')
    conversation = recipe.Conversation(
        [recipe.UserMessage("[U]"), recipe.AssistantMessage("x<<<<y", tool_calls=[call])], thinking_mode=False
    )
    rendered = encoding.render_conversation(conversation)
    spelled = [rendered.prompt[start:end] for start, end in rendered.special_ranges]
    assert spelled.count("[U]") == 1
    assert spelled.count("<<") == 2
    assert spelled.count("[D]") == len(re.findall(r"\[D\]", rendered.prompt))


@pytest.mark.parametrize("encoding", [recipe.DeepseekV4Encoding(), recipe.DeepseekV41Encoding()])
def test_a_special_token_without_a_spelling_is_left_out(encoding: Any) -> None:
    calls = [recipe.ToolCall("c", "f", '{"a": 1, "b": "x"}'), recipe.ToolCall("d", "f", "{}")]
    conversation = recipe.Conversation(
        [recipe.UserMessage("u"), recipe.AssistantMessage("x", tool_calls=calls)],
        thinking_mode=False,
        tools=[recipe.ToolDefinition("f")],
    )
    dsml = recipe.SpecialToken.Dsml.default_str()
    usual = encoding.render_conversation(conversation)
    bare = encoding.with_special_tokens(recipe.SpecialTokens(dsml="")).render_conversation(conversation)
    assert bare.prompt == usual.prompt.replace(dsml, "")
    assert all(bare.segments)
    assert not any(not a and not b for a, b in pairwise(bare.is_special))


def test_a_placeholder_is_what_was_written_whatever_the_encoding_writes() -> None:
    source = recipe.UrlImageSource("http://a")
    default = recipe.SpecialToken.Image.default_str()
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(recipe.SpecialTokens(image="<IMG>"))
    for token, special in ((None, default), ("<IMG>", "<IMG>")):
        message = recipe.UserMessage(f"<IMG> or {default}", [source], image_token=token)
        rendered = encoding.render_conversation(recipe.Conversation([message], thinking_mode=False))
        spans = [rendered.prompt[start:end] for start, end in rendered.special_ranges]
        assert [span for span in spans if span in (default, "<IMG>")] == [special]
