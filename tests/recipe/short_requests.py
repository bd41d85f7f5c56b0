"""What tests of conversion share: a short request of each API, converted."""

from __future__ import annotations

from typing import Any

import deepseek_recipe as recipe

MODEL = "DeepSeek-V4.1-Flash"
HI = [{"role": "user", "content": "hi"}]
STRICT = recipe.ConversionOptions()
EXTENDED = recipe.ConversionOptions(dialect="extended")
TOOLS = [{"type": "function", "function": {"name": "f"}}]
REQUESTS = [recipe.ChatCompletionRequest, recipe.ResponsesRequest, recipe.MessagesRequest]


def chat(options: recipe.ConversionOptions = STRICT, **fields: Any) -> recipe.ConversationRequest:
    body = {"model": MODEL, "messages": HI, **fields}
    return recipe.ChatCompletionRequest(body, dialect=options.dialect).convert(options)


def messages(options: recipe.ConversionOptions = STRICT, **fields: Any) -> recipe.ConversationRequest:
    body = {"model": MODEL, "messages": HI, **fields}
    return recipe.MessagesRequest(body, dialect=options.dialect).convert(options)


def responses(options: recipe.ConversionOptions = STRICT, **fields: Any) -> recipe.ConversationRequest:
    return recipe.ResponsesRequest({"model": MODEL, "input": "hi", **fields}).convert(options)
