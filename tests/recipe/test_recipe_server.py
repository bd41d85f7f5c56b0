"""examples/recipe_server.py on loopback, driven by the real `openai` and `anthropic` clients."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import deepseek_recipe as recipe

anthropic = pytest.importorskip("anthropic")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

EXAMPLE = Path(__file__).parents[2] / "examples" / "recipe_server.py"
MODEL = "DeepSeek-V4.1-Flash"
USER = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}


class Server:
    """A running server, and the script and engine that it plays."""

    def __init__(self, url: str, engine: Any) -> None:
        self.url = url
        self.engine = engine
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=20)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=20)

    def wait_until_idle(self) -> bool:
        """Whether the engine stops all generation within a few seconds."""
        deadline = time.monotonic() + 10
        while self.engine.running and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.engine.running == 0


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_server", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def serve(example: ModuleType) -> Iterator[Callable[..., Server]]:
    """Starts servers on free ports; all of them stop at the end of the module."""
    running: list[tuple[Any, threading.Thread]] = []

    def start(engine: Any, tokenizer: recipe.Tokenizer | None = None) -> Server:
        config = uvicorn.Config(example.create_app(engine, tokenizer), host="127.0.0.1", port=0, log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        running.append((server, thread))
        port = server.servers[0].sockets[0].getsockname()[1]
        return Server(f"http://127.0.0.1:{port}", engine)

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def demo(example: ModuleType, serve: Callable[..., Server]) -> Server:
    return serve(example.ScriptedEngine(example.demo_script))


@pytest.fixture(scope="module")
def endless(example: ModuleType, serve: Callable[..., Server]) -> Server:
    """An engine that goes on for far longer than any test."""
    return serve(example.ScriptedEngine(lambda request: "word " * 100_000, delay_s=0.002))


# ---- Chat Completions ------------------------------------------------------------------------------------------------


def test_chat_completion(demo: Server) -> None:
    reply = demo.openai.chat.completions.create(model=MODEL, messages=USER)
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content) == ("You said: hello", "I should answer.")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.id.startswith("chatcmpl-")
    assert abs(reply.created - time.time()) < 60


def test_chat_completion_streamed_with_usage(demo: Server) -> None:
    chunks = list(
        demo.openai.chat.completions.create(
            model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "You said: hello"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I should answer."
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("streams", [False, True])
def test_chat_tool_call_round_trip(demo: Server, streams: bool) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    if streams:
        with demo.openai.chat.completions.stream(model=MODEL, messages=USER, tools=tools) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = demo.openai.chat.completions.create(model=MODEL, messages=USER, tools=tools).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "example", "days": 1})
    history = [
        *USER,
        {"role": "assistant", "tool_calls": [call.model_dump(include={"id", "type", "function"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    reply = demo.openai.chat.completions.create(model=MODEL, messages=history, tools=tools)
    assert reply.choices[0].message.content == "You said: sunny"


def test_chat_stop_sequence_and_length(demo: Server) -> None:
    thinking_off = {"thinking": {"type": "disabled"}}
    stopped = demo.openai.chat.completions.create(model=MODEL, messages=USER, stop=["said"], extra_body=thinking_off)
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("You ", "stop")
    cut = demo.openai.chat.completions.create(model=MODEL, messages=USER, max_tokens=2, extra_body=thinking_off)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("You said", "length")


def test_chat_errors_reach_the_client(demo: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        demo.openai.chat.completions.create(model="gpt-4", messages=USER)
    assert "gpt-4" in caught.value.body["message"] or MODEL in caught.value.body["message"]
    with pytest.raises(openai.BadRequestError, match="messages"):
        demo.openai.chat.completions.create(model=MODEL, messages=[])
    with pytest.raises(openai.BadRequestError, match="invalid JSON"):
        demo.openai.post("/chat/completions", cast_to=object, content=b"{", body=None)


# ---- Responses -------------------------------------------------------------------------------------------------------


def test_response(demo: Server) -> None:
    reply = demo.openai.responses.create(model=MODEL, input="hello")
    assert reply.output_text == "You said: hello"
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    assert (reply.status, reply.usage.total_tokens) == (
        "completed",
        reply.usage.input_tokens + reply.usage.output_tokens,
    )


def test_response_streamed(demo: Server) -> None:
    with demo.openai.responses.stream(model=MODEL, input="hello") as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert (kinds[0], kinds[-1], final.output_text) == ("response.created", "response.completed", "You said: hello")


def test_response_function_call_streamed(demo: Server) -> None:
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    with demo.openai.responses.stream(model=MODEL, input="hello", tools=tools) as events:
        final = events.until_done().get_final_response()
    call = final.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "weather",
        {"city": "example", "days": 1},
    )
    reply = demo.openai.responses.create(
        model=MODEL,
        tools=tools,
        input=[
            *USER,
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ],
    )
    assert reply.output_text == "You said: sunny"


def test_response_errors_reach_the_client(demo: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="input"):
        demo.openai.responses.create(model=MODEL, input=[])


# ---- Messages --------------------------------------------------------------------------------------------------------


def test_message_with_thinking(demo: Server) -> None:
    reply = demo.anthropic.messages.create(
        model=MODEL, messages=USER, max_tokens=100, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    thinking, text = reply.content
    assert (thinking.thinking, text.text, reply.stop_reason) == ("I should answer.", "You said: hello", "end_turn")
    assert thinking.signature == reply.id


def test_message_streamed(demo: Server) -> None:
    with demo.anthropic.messages.stream(
        model=MODEL, messages=USER, max_tokens=100, thinking={"type": "disabled"}
    ) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert (text, final.stop_reason, final.usage.output_tokens > 0) == ("You said: hello", "end_turn", True)


def test_message_tool_use_round_trip(demo: Server) -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    with demo.anthropic.messages.stream(model=MODEL, messages=USER, max_tokens=100, tools=tools) as events:
        final = events.get_final_message()
    use = final.content[-1]
    assert (use.type, use.name, use.input, final.stop_reason) == (
        "tool_use",
        "weather",
        {"city": "example", "days": 1},
        "tool_use",
    )
    history = [
        *USER,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in final.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]},
    ]
    reply = demo.anthropic.messages.create(model=MODEL, messages=history, max_tokens=100, tools=tools)
    assert reply.content[-1].text == "You said: sunny"


def test_message_stop_sequence(demo: Server) -> None:
    reply = demo.anthropic.messages.create(
        model=MODEL, messages=USER, max_tokens=100, stop_sequences=["said"], thinking={"type": "disabled"}
    )
    assert (reply.content[0].text, reply.stop_reason, reply.stop_sequence) == ("You ", "stop_sequence", "said")


def test_message_errors_have_the_shape_of_the_api(demo: Server) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        demo.anthropic.messages.create(model="claude", messages=USER, max_tokens=10)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_tokens_of_a_message_are_counted(
    example: ModuleType, serve: Callable[..., Server], v41_tokenizer: recipe.Tokenizer
) -> None:
    server = serve(example.ScriptedEngine(example.demo_script), v41_tokenizer)
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    counted = server.anthropic.messages.count_tokens(model=MODEL, messages=USER, system="Be brief.", tools=tools)
    conversation = recipe.Conversation(
        [recipe.SystemMessage("Be brief."), recipe.UserMessage("hello")],
        tools=[recipe.ToolDefinition("weather", None, SCHEMA)],
        reasoning_effort="high",
    )
    ids = recipe.DeepseekV41Encoding().with_tokenizer(v41_tokenizer).encode(conversation)
    assert counted.input_tokens == len(ids) > 100
    with pytest.raises(anthropic.BadRequestError, match="claude"):
        server.anthropic.messages.count_tokens(model="claude", messages=USER)
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        server.anthropic.messages.count_tokens(model=MODEL, messages=5)


def test_a_server_without_a_tokenizer_says_that_it_cannot_count(demo: Server) -> None:
    with pytest.raises(anthropic.APIStatusError, match="no tokenizer") as caught:
        demo.anthropic.messages.count_tokens(model=MODEL, messages=USER)
    assert caught.value.status_code == 501


# ---- Early ends ------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_a_stream_stops_the_engine(endless: Server) -> None:
    events = endless.openai.chat.completions.create(model=MODEL, messages=USER, stream=True)
    next(iter(events))
    assert endless.engine.running == 1
    events.close()
    assert endless.wait_until_idle()


def test_a_client_that_leaves_before_its_answer_stops_the_engine(endless: Server) -> None:
    with pytest.raises(anthropic.APITimeoutError):
        endless.anthropic.messages.create(model=MODEL, messages=USER, max_tokens=100_000, timeout=0.5)
    assert endless.wait_until_idle()


def test_an_engine_that_fails_in_mid_stream_is_reported(serve: Callable[..., Server]) -> None:
    class Broken:
        running = 0

        async def generate(self, request: recipe.ConversationRequest) -> AsyncIterator[recipe.InferenceChunk]:
            yield recipe.InferenceChunk.ready()
            raise OSError("out of memory")

    server = serve(Broken())
    with pytest.raises(openai.APIError, match="out of memory"):
        list(server.openai.chat.completions.create(model=MODEL, messages=USER, stream=True))
    with pytest.raises(anthropic.APIStatusError, match="out of memory"):
        list(server.anthropic.messages.create(model=MODEL, messages=USER, max_tokens=9, stream=True))


def test_an_answer_that_needs_more_context_than_there_is_is_refused(demo: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="131072"):
        demo.openai.chat.completions.create(model=MODEL, messages=USER, max_tokens=131_072)


def test_the_example_serves_on_a_port_of_its_own() -> None:
    command = [sys.executable, str(EXAMPLE), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "running on" in line)
            url = next(word for word in line.split() if word.startswith("http"))
            assert MODEL in [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
        finally:
            process.terminate()
