"""Every field of a chat request has its effect or is refused: limits, stops, penalties, what `SamplingParams` adds."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_core import LLM, SamplingParams, StructuredOutput
from deepinfer_core.errors import RequestError
from tests.core.inside import inside

MESSAGES = [{"role": "user", "content": "Hi"}]
GREEDY = SamplingParams(temperature=0, max_tokens=30)


def test_a_limit_in_the_request_wins_over_that_of_the_parameters(tiny_llm: LLM) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        answer = tiny_llm.chat(MESSAGES, GREEDY, thinking=False, **{field: 3})
        assert len(answer.output.outputs[0].token_ids) == 3
        assert answer.finish_reason == "length"


def test_a_stop_string_of_the_parameters_is_cut_from_the_message(tiny_llm: LLM) -> None:
    free = tiny_llm.chat(MESSAGES, SamplingParams(max_tokens=30, seed=4), thinking=False).content
    stop = free[5:7]
    params = SamplingParams(max_tokens=30, seed=4, stop=[stop])
    answer = tiny_llm.chat(MESSAGES, params, thinking=False)
    assert answer.content == free[: free.index(stop)]
    assert answer.finish_reason == "stop"
    inside(tiny_llm).scheduler.check_idle()


def test_a_form_holds_for_the_answer_and_leaves_the_thoughts_free(tiny_llm: LLM) -> None:
    form = StructuredOutput(choice=["sixty", "seventy"])
    answers = [
        tiny_llm.chat(MESSAGES, SamplingParams(max_tokens=400, seed=seed, structured=form), thinking=True)
        for seed in range(4)
    ]
    done = [answer for answer in answers if answer.finish_reason == "stop"]
    assert done, "no seed came to the end of its thoughts"
    for answer in done:
        assert answer.content in ("sixty", "seventy")
        assert answer.reasoning not in ("", "sixty", "seventy")
    at_once = tiny_llm.chat(MESSAGES, SamplingParams(max_tokens=9, structured=form), thinking=False)
    assert at_once.content in ("sixty", "seventy")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("frequency_penalty", 1.5, 1.5),
        ("presence_penalty", -1.0, -1.0),
        ("repetition_penalty", 1.25, 1.25),
        ("min_p", 0.5, 0.5),
        ("top_k", 7, 7),
        ("seed", 5, 5),
        ("logit_bias", {"17": 3}, {17: 3.0}),
    ],
)
def test_a_field_of_the_request_reaches_the_sampler(tiny_llm: LLM, field: str, value: Any, expected: Any) -> None:
    answer = tiny_llm.chat(MESSAGES, SamplingParams(max_tokens=2), thinking=False, **{field: value})
    assert getattr(answer.output.sampling_params, field) == expected


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 2_000}, "n"),
        ({"sampling_params": {"max_tokens": 3}}, "must be a SamplingParams"),
        ({"messages": None}, "messages is None"),
        ({"messages": "Hi"}, "messages is 'Hi'"),
        ({"thinking": "no"}, "thinking is 'no'"),
        ({"logit_bias": {"x": 1}}, "logit_bias key is 'x'"),
        ({"max_tokens": 100_000}, "context"),
        ({"messages": [{"role": "user", "content": "a " * 9_000}]}, "context"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_done_is_refused(tiny_llm: LLM, arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"messages": MESSAGES} | arguments
    with pytest.raises(RequestError, match=message):
        tiny_llm.chat(**given)
    inside(tiny_llm).scheduler.check_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_are_n_choices_and_each_is_that_of_its_seed(tiny_llm: LLM, stream: bool) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24)
    answer = tiny_llm.chat(MESSAGES, params, thinking=False, n=3)
    assert [choice["index"] for choice in answer.response["choices"]] == [0, 1, 2]
    contents = [message["content"] for message in answer.messages]
    assert len(set(contents)) > 1
    assert contents[0] == answer.content
    completion_tokens = 0
    for i, one in enumerate(answer.output.outputs):
        alone = tiny_llm.chat(MESSAGES, SamplingParams(temperature=1.0, seed=one.seed, max_tokens=24), thinking=False)
        assert alone.content == contents[i]
        completion_tokens += alone.response["usage"]["completion_tokens"]
    assert answer.response["usage"]["completion_tokens"] == completion_tokens
    if stream:
        texts = ["", "", ""]
        for event in tiny_llm.chat_stream(MESSAGES, params, thinking=False, n=3):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
        assert texts == contents
    inside(tiny_llm).scheduler.check_idle()


def test_usage_ends_with_the_stop_sequence_whatever_a_step_brought(tiny_llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=40)
    free = tiny_llm.chat(MESSAGES, params, thinking=False)
    ids = free.output.outputs[0].token_ids
    for length in range(1, 7):
        text = tiny_llm.tokenizer.decode(ids[:length])
        cut = tiny_llm.chat(MESSAGES, params, thinking=False, stop=[text])
        assert cut.response["usage"]["completion_tokens"] == length
        assert (cut.content, cut.finish_reason) == ("", "stop")


@pytest.mark.bad_input
def test_images_are_refused(tiny_llm: LLM) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with pytest.raises(RequestError, match="this version reads text only"):
        tiny_llm.chat([{"role": "user", "content": [{"type": "text", "text": "Hi"}, image]}], GREEDY)


@pytest.mark.bad_input
def test_two_forms_of_one_answer_are_refused(tiny_llm: LLM) -> None:
    params = SamplingParams(structured=StructuredOutput(regex="[ab]+"))
    with pytest.raises(RequestError, match="beside tools or a response_format"):
        tiny_llm.chat(MESSAGES, params, response_format={"type": "regex", "regex": "[cd]+"})


def test_a_stop_string_ends_the_choice_that_has_it_and_no_other(tiny_llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24)
    free = [message["content"] for message in tiny_llm.chat(MESSAGES, params, thinking=False, n=3).messages]
    stop = next(word for word in free[0].split() if not any(word in other for other in free[1:]))
    cut = [message["content"] for message in tiny_llm.chat(MESSAGES, params, thinking=False, n=3, stop=[stop]).messages]
    assert cut[0] == free[0][: free[0].index(stop)]
    assert cut[1:] == free[1:]
    inside(tiny_llm).scheduler.check_idle()
