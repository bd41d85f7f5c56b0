"""A small server of Chat Completions, Responses and Messages around any engine: what deepseek-recipe leaves to you.

    uv run examples/recipe_server.py                  starts, asks itself one question, prints the stream, and stops
    uv run examples/recipe_server.py --port 8000      serves http://127.0.0.1:8000/v1 until it is interrupted

    body ─▶ request ─▶ conversation ─▶ engine.generate ─▶ chunks ─▶ events ─▶ stream, or one response
                                       └──────── the seam ───────┘

Put your engine in the place of `ScriptedEngine`: one method that yields ready, text or tokens, and finish chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

import deepseek_recipe as recipe
from deepseek_recipe.errors import anthropic_error_body, openai_error_body

CONTEXT_LIMIT = 131_072
DSML = recipe.SpecialToken.Dsml.default_str()


class Engine(Protocol):
    """What generates. Errors before the first chunk become HTTP errors, later ones error events."""

    def generate(self, request: recipe.ConversationRequest) -> AsyncIterator[recipe.InferenceChunk]:
        """The output for one request; closed early if nobody waits for it any more."""
        ...


@dataclass(frozen=True)
class Api:
    """The names that one protocol has for everything."""

    request: type[Any]
    response: type[Any]
    id_prefix: str
    error_body: Callable[[str], str] = openai_error_body


APIS = {
    "/v1/chat/completions": Api(recipe.ChatCompletionRequest, recipe.ChatCompletionResponse, "chatcmpl-"),
    "/v1/responses": Api(recipe.ResponsesRequest, recipe.ResponsesResponse, "resp_"),
    "/v1/messages": Api(recipe.MessagesRequest, recipe.MessagesResponse, "msg_", anthropic_error_body),
}


def create_app(
    engine: Engine, tokenizer: recipe.Tokenizer | None = None, options: recipe.ConversionOptions | None = None
) -> FastAPI:
    """The application. `tokenizer` is needed for engines that send token ids, and to count tokens."""
    app = FastAPI(title="deepseek-recipe server")
    options = options or recipe.ConversionOptions()
    for path, api in APIS.items():
        app.add_api_route(path, partial(answer, api, engine, tokenizer, options), methods=["POST"])
    app.add_api_route("/v1/messages/count_tokens", partial(count_tokens, tokenizer, options), methods=["POST"])

    @app.get("/v1/models")
    def models() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]  (the decorator registers it)
        names = [{"id": name, "object": "model", "owned_by": "deepseek"} for name in options.model_versions_by_name]
        return {"object": "list", "data": names}

    return app


async def answer(
    api: Api,
    engine: Engine,
    tokenizer: recipe.Tokenizer | None,
    options: recipe.ConversionOptions,
    incoming: Request,
) -> Response:
    """Answer one HTTP request of one API."""
    try:
        body = api.request(await incoming.body())
        model = body.model
        converted = body.convert(options)
        generator = api.request.chunk_generator(converted, f"{api.id_prefix}{uuid.uuid4().hex}", model)
        processor = recipe.StreamProcessor(generator, converted.parsing_options, tokenizer)
        events = recipe.AsyncStreamProcessor(processor, engine.generate(converted))
        first = await anext(events)
    except recipe.ConversionError as error:
        return json_response(api.error_body(str(error)), error.status_code)
    except ValueError as error:
        return json_response(api.error_body(str(error)), 400)
    if converted.stream:
        return StreamingResponse(stream(api, first, events), media_type=recipe.SseWriter.content_type)
    return await complete(api, first, events, incoming)


async def count_tokens(
    tokenizer: recipe.Tokenizer | None, options: recipe.ConversionOptions, incoming: Request
) -> Response:
    """How many tokens the prompt of a Messages request has. Nothing is generated."""
    if tokenizer is None:
        return json_response(anthropic_error_body("this server has no tokenizer to count with"), 501)
    try:
        converted = recipe.MessagesRequest(await incoming.body()).convert(options)
    except recipe.ConversionError as error:
        return json_response(anthropic_error_body(str(error)), error.status_code)
    except ValueError as error:
        return json_response(anthropic_error_body(str(error)), 400)
    count = await asyncio.to_thread(recipe.count_tokens, converted, tokenizer)  # other requests need not wait for it
    return json_response(json.dumps({"input_tokens": count}), 200)


async def stream(api: Api, first: Any, events: recipe.AsyncStreamProcessor) -> AsyncIterator[bytes]:
    """The body of a streamed answer. Closed by the server when the client leaves, and the engine with it."""
    writer = recipe.SseWriter(api.response)
    async with events:
        yield writer.event(first)
        try:
            async for event in events:
                yield writer.event(event)
        except Exception as error:
            yield writer.error(f"the engine failed: {error}")
        else:
            yield writer.done()


async def complete(api: Api, first: Any, events: recipe.AsyncStreamProcessor, incoming: Request) -> Response:
    """The answer in one piece. Its identity and time are those of the events."""
    identity = first.to_dict()  # a Chat chunk has these fields; the first events of the others bring their own
    response = api.response(identity.get("id", ""), identity.get("model", ""), identity.get("created", 0), 0, 0)
    async with events:
        response.accumulate(first)
        async for event in events:
            response.accumulate(event)
            if await incoming.is_disconnected():
                return Response(status_code=499)
    return json_response(response.to_json(), 200)


def json_response(body: str, status: int) -> Response:
    return Response(body, status_code=status, media_type="application/json")


class ScriptedEngine:
    """Plays a text: what `script` says to a request, `piece_size` characters a token, `delay_s` apart."""

    def __init__(
        self, script: Callable[[recipe.ConversationRequest], str], *, piece_size: int = 4, delay_s: float = 0.0
    ) -> None:
        self._script = script
        self._piece_size = piece_size
        self._delay_s = delay_s
        self.running = 0

    async def generate(self, request: recipe.ConversationRequest) -> AsyncIterator[recipe.InferenceChunk]:
        encoding = {
            recipe.ModelVersion.DeepseekV4Pro: recipe.DeepseekV4Encoding,
            recipe.ModelVersion.DeepseekV41Flash: recipe.DeepseekV41Encoding,
        }[request.model_version]()
        prompt = encoding.render_conversation(request.conversation)
        prompt_tokens = len(prompt.prompt) // self._piece_size
        budget = request.resolve_max_tokens(prompt_tokens, CONTEXT_LIMIT)
        text = self._script(request)
        pieces = [text[i : i + self._piece_size] for i in range(0, len(text), self._piece_size)]
        self.running += 1
        try:
            yield recipe.InferenceChunk.ready(prompt_usage=recipe.PromptUsage(prompt_tokens=prompt_tokens))
            for piece in pieces[:budget]:
                yield recipe.InferenceChunk.text(piece, 1)
                await asyncio.sleep(self._delay_s)
            is_cut = len(pieces) > budget
            reason = recipe.InferenceFinishReason.Length if is_cut else recipe.InferenceFinishReason.Stop
            yield recipe.InferenceChunk.finish(reason)
        finally:
            self.running -= 1


def demo_script(request: recipe.ConversationRequest) -> str:
    """Thinks if asked to, calls the first tool once if there is one, and otherwise repeats what the user said."""
    conversation = request.conversation
    last = conversation.messages[-1]
    thought = "I should answer.</think>" if conversation.thinking_mode else ""
    if conversation.tools and last.role != "tool":
        return thought + tool_call(conversation.tools[0])
    return f"{thought}You said: {last.content}"


def tool_call(tool: recipe.ToolDefinition) -> str:
    """A call of `tool` as a model writes it, with a value for every required parameter."""
    schema = tool.parameters if isinstance(tool.parameters, dict) else {}
    lines = [f'<{DSML} calls>\n<{DSML} invoke name="{tool.name}">']
    for name in schema.get("required", ()):
        is_string = schema.get("properties", {}).get(name, {}).get("type") == "string"
        value = "example" if is_string else json.dumps(1)
        attributes = f'name="{name}" string="{json.dumps(is_string)}"'
        lines.append(f"<{DSML} parameter {attributes}>{value}</{DSML} parameter>")
    return "\n".join([*lines, f"</{DSML} invoke>\n</{DSML} calls>"])


def ask(host: str, port: int, question: str) -> None:
    """Ask a running server and print what it streams."""
    messages = [{"role": "user", "content": question}]
    body = {"model": "DeepSeek-V4.1-Flash", "stream": True, "messages": messages}
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    print(connection.getresponse().read().decode())
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the three APIs with a scripted engine.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, help="serve there until interrupted; without it, one question and the end")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds between two tokens")
    parser.add_argument("--tokenizer", help="a tokenizer.json, for /v1/messages/count_tokens")
    args = parser.parse_args()
    tokenizer = recipe.Tokenizer.from_file(args.tokenizer) if args.tokenizer else None
    app = create_app(ScriptedEngine(demo_script, delay_s=args.delay), tokenizer)
    if args.port is not None:
        uvicorn.run(app, host=args.host, port=args.port)
        return
    server = uvicorn.Server(uvicorn.Config(app, host=args.host, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    ask(host, port, "hello")
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    main()
