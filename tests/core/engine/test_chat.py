"""`LLM.chat` end to end on the bundled model: the protocol codec, thinking, JSON, required tool calls, streaming."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
from jsonschema import validate

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.chat import ChatCodec
from deepinfer_core.errors import ConfigError, RequestError
from tests.core.inside import inside

QUESTION = [{"role": "user", "content": "What is 3 + 4? Answer in json."}]
PARAMS = SamplingParams(seed=1, max_tokens=200)


def test_thinking_comes_apart_from_the_answer(tiny_llm: LLM) -> None:
    answer = tiny_llm.chat(QUESTION, PARAMS, thinking=True)
    assert answer.message["role"] == "assistant"
    assert answer.reasoning
    assert "</think>" not in answer.reasoning + answer.content
    usage = answer.response["usage"]
    assert usage["prompt_tokens"] == len(answer.output.prompt_token_ids)
    assert usage["completion_tokens"] > usage["completion_tokens_details"]["reasoning_tokens"] > 0


def test_without_thinking_there_is_only_an_answer(tiny_llm: LLM) -> None:
    answer = tiny_llm.chat(QUESTION, PARAMS, thinking=False)
    assert answer.content
    assert not answer.reasoning
    assert answer.finish_reason in ("stop", "length")


def test_the_same_conversation_and_seed_give_the_same_answer(tiny_llm: LLM) -> None:
    assert tiny_llm.chat(QUESTION, PARAMS).content == tiny_llm.chat(QUESTION, PARAMS).content


@pytest.mark.parametrize("thinking", [True, False])
def test_a_json_schema_is_enforced_behind_the_thinking(tiny_llm: LLM, thinking: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}, "sure": {"type": "boolean"}},
        "required": ["sum", "sure"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    answer = tiny_llm.chat(QUESTION, PARAMS, thinking=thinking, response_format=wanted)
    validate(json.loads(answer.content), schema)


def test_streamed_deltas_add_up_to_the_answer(tiny_llm: LLM) -> None:
    whole = tiny_llm.chat(QUESTION, PARAMS)
    deltas = [event["choices"][0]["delta"] for event in tiny_llm.chat_stream(QUESTION, PARAMS)]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole.content
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == whole.reasoning


def test_a_closed_stream_frees_everything(tiny_llm: LLM) -> None:
    stream = tiny_llm.chat_stream(QUESTION, PARAMS)
    next(stream)
    stream.close()
    inside(tiny_llm).scheduler.check_idle()


@pytest.mark.bad_input
def test_a_bad_request_is_refused_with_the_codecs_reason(tiny_llm: LLM) -> None:
    with pytest.raises(RequestError, match="messages"):
        tiny_llm.chat([])
    with pytest.raises(RequestError, match="role"):
        tiny_llm.chat([{"role": "nobody", "content": "x"}])


@pytest.mark.bad_input
def test_a_misspelt_field_is_named(tiny_llm: LLM) -> None:
    with pytest.raises(RequestError, match="temprature"):
        tiny_llm.chat(QUESTION, PARAMS, temprature=0)


@pytest.mark.bad_input
def test_the_official_codec_in_our_place_is_named(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepseek_recipe", ModuleType("deepseek_recipe"))
    with pytest.raises(ConfigError, match=r"deepinfer-core\[chat\]"):
        ChatCodec(tiny_llm._engine.folder, 1, 100)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("question", ["What is the weather in Paris?", "Say hello."])
def test_a_required_call_is_a_call_whatever_the_model_wants(tiny_llm: LLM, thinking: bool, question: str) -> None:
    answer = tiny_llm.chat(
        [{"role": "user", "content": question}], PARAMS, thinking=thinking, tools=[WEATHER], tool_choice="required"
    )
    assert answer.finish_reason == "tool_calls"
    again = tiny_llm.chat(
        [{"role": "user", "content": question}], PARAMS, thinking=thinking, tools=[WEATHER], tool_choice="required"
    )
    assert again.message == answer.message  # ids of the calls included
    for call in answer.tool_calls:
        assert call["function"]["name"] == "get_weather"
        validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])


def test_a_call_and_its_result_go_back_into_the_conversation(tiny_llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    call = tiny_llm.chat(messages, PARAMS, thinking=False, tools=[WEATHER], tool_choice="required")
    messages.append({key: value for key, value in call.message.items() if key != "reasoning_content"})
    messages += [
        {"role": "tool", "tool_call_id": one["id"], "content": '{"temperature": 21}'} for one in call.tool_calls
    ]
    answer = tiny_llm.chat(messages, PARAMS, thinking=False, tools=[WEATHER])
    assert answer.content or answer.tool_calls
    assert len(answer.output.prompt_token_ids) > len(call.output.prompt_token_ids)
