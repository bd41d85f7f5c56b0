"""Run one stream vector: a request body, engine chunks, and what came of every push. Format: docs of the vectors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import deepseek_recipe as recipe
from deepseek_recipe.bundled_tokenizers import load_v4_tokenizer
from tests.recipe.vectors import load_cases

APIS = {
    "chat": (recipe.ChatCompletionRequest, recipe.ChatCompletionResponse),
    "responses": (recipe.ResponsesRequest, recipe.ResponsesResponse),
    "messages": (recipe.MessagesRequest, recipe.MessagesResponse),
}
_CLOCK = re.compile(r'"(created|created_at|completed_at)":\d+')
_CALL_ID = re.compile(r"(call_\d{2,}_(?:ET_)?)[A-Za-z0-9]{20}\d{4}")


def cases(*groups: str) -> list[dict[str, Any]]:
    """The stream vectors of these groups, in order."""
    return [case for group in groups for case in load_cases(group)]


def normalized(text: str) -> str:
    """`text` without what differs from run to run."""
    return _CALL_ID.sub(r"\1<RANDOM>", _CLOCK.sub(r'"\1":0', text))


@lru_cache(maxsize=1)
def v4_tokenizer() -> recipe.Tokenizer:
    """The V4 tokenizer of the extra `tokenizer`, for cases that are made outside of a test."""
    return load_v4_tokenizer()


def run_case(given: dict[str, Any]) -> dict[str, Any]:
    """What `given` leads to, in the form of the vectors' `expected`."""
    processor, response = _processor(given)
    steps = [_step(processor, response, chunk) for chunk in given["chunks"]]
    steps.append(_attempt("finish", response, processor.finish, processor))
    return {
        "steps": steps,
        "response": normalized(response.to_json()),
        "sse_done": response.sse_done_data(),
        "failed": any("error" in step for step in steps),
    }


def engine_chunk(given: list[Any]) -> recipe.InferenceChunk:
    """The chunk that a vector writes as a list."""
    kind = given[0]
    if kind == "ready":
        usage = recipe.PromptUsage(prompt_tokens=given[1], prompt_cache_hit_tokens=given[2])
        return recipe.InferenceChunk.ready(prompt_usage=usage, system_fingerprint=given[3])
    if kind == "text":
        return recipe.InferenceChunk.text(given[1], given[2])
    if kind == "tokens":
        return recipe.InferenceChunk.tokens(*given[1:])
    return recipe.InferenceChunk.finish(recipe.InferenceFinishReason[given[1]])


def parsing_options(given: dict[str, Any]) -> recipe.ParsingOptions:
    """Given settings over defaults."""
    return recipe.ParsingOptions.from_dict(given)


def _processor(given: dict[str, Any]) -> tuple[recipe.StreamProcessor, Any]:
    request_class, response_class = APIS[given["api"]]
    request = request_class(json.dumps(given["body"]))
    options = recipe.ConversionOptions()
    echo = request.echo() if given.get("with_echo") else None
    names = request.namespace_tool_map(options) if given.get("with_namespace_tool_map") else None
    converted = request.convert(options)
    generator = request_class.chunk_generator(converted, given["response_id"], given["model"])
    if "signature" in given:
        generator = generator.with_signature(given["signature"])
    if names is not None:
        generator = generator.with_namespace_tool_map(names)
    if echo is not None:
        generator = generator.with_echo(echo)
    parsing = parsing_options(given["parsing"]) if given.get("parsing") else converted.parsing_options
    tokenizer = v4_tokenizer() if given["tokenizer"] == "v4" else None
    ready = next((chunk for chunk in given["chunks"] if chunk[0] == "ready"), [None, 0, 0])
    response = response_class(given["response_id"], given["model"], 0, ready[1], ready[2])
    return recipe.StreamProcessor(generator, parsing, tokenizer), response


def _step(processor: recipe.StreamProcessor, response: Any, given: list[Any]) -> dict[str, Any]:
    if given[0] == "close":
        processor.close()
        return {"events": []}
    chunk = engine_chunk(given)
    return _attempt("push", response, lambda: processor.push(chunk), processor)


def _attempt(
    stage: str, response: Any, act: Callable[[], list[Any]], processor: recipe.StreamProcessor
) -> dict[str, Any]:
    try:
        events = act()
    except RuntimeError as error:
        return {"error": {"stage": stage, "exception": type(error).__name__}}
    seen = [[response.sse_event_name(event), normalized(event.to_json())] for event in events]
    for event in events:
        response.accumulate(event)
    return {"events": seen, "finished": processor.finished}
