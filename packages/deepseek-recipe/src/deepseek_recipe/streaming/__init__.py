"""The output side: what an engine generates becomes the events, or the complete response, of one of three APIs.

engine chunks ─▶ StreamProcessor ─▶ events ─▶ server-sent events, or `accumulate` of a response
"""

from __future__ import annotations

from deepseek_recipe.streaming.chat import ChatCompletionChunk, ChatCompletionChunkGenerator, ChatCompletionResponse
from deepseek_recipe.streaming.chunks import InferenceChunk, PromptUsage
from deepseek_recipe.streaming.messages import MessagesChunkGenerator, MessagesResponse, MessagesStreamEvent
from deepseek_recipe.streaming.options import ParsingOptions
from deepseek_recipe.streaming.processor import StreamProcessor
from deepseek_recipe.streaming.responses import ResponsesChunkGenerator, ResponsesResponse, ResponsesStreamEvent

__all__ = [
    "ChatCompletionChunk",
    "ChatCompletionChunkGenerator",
    "ChatCompletionResponse",
    "InferenceChunk",
    "MessagesChunkGenerator",
    "MessagesResponse",
    "MessagesStreamEvent",
    "ParsingOptions",
    "PromptUsage",
    "ResponsesChunkGenerator",
    "ResponsesResponse",
    "ResponsesStreamEvent",
    "StreamProcessor",
]
