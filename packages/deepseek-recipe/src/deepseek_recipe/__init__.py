"""Protocol codec of DeepSeek-V4 and V4.1: requests to prompts, model output to replies and event streams.

body ─▶ XRequest(body).convert(options) ─▶ conversation ─▶ DeepseekV41Encoding().encode(...) ─▶ ids ─▶ engine
engine ─▶ StreamProcessor(XRequest.chunk_generator(...), parsing_options, tokenizer).push(chunk) ─▶ events
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
# The official wheel shares the import name; this tells which of the two is installed.
__provider__ = "deepinfer"

# ---- the input side --------------------------------------------------------------------------------------------------
from deepseek_recipe.conversation import (
    AssistantMessage,
    Conversation,
    LatestReminderMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from deepseek_recipe.encodings import count_tokens, encoding_for
from deepseek_recipe.enums import (
    InferenceFinishReason,
    ModelVersion,
    ReasoningContentBehavior,
    ThinkingInitialStage,
    WebSearchBehavior,
)
from deepseek_recipe.errors import AnswerError, CalcResizeError, ConversionError, ImageError, MalformedToolCallError
from deepseek_recipe.images.preprocess import OpenCvImagePreprocessor, PillowImagePreprocessor, PreprocessOptions
from deepseek_recipe.images.resolve import ImageInfo, ImageQuota, ImageResolver, MultiModalData
from deepseek_recipe.images.sources import BytesImageSource, DataUrlImageSource, ImageSource, UrlImageSource
from deepseek_recipe.protocol_data import IMAGE_SPECIAL_TOKEN_ID
from deepseek_recipe.rendering.prompt import RenderedPrompt
from deepseek_recipe.rendering.v4 import DeepseekV4Encoding
from deepseek_recipe.rendering.v41 import DeepseekV41Encoding
from deepseek_recipe.requests.chat import ChatCompletionRequest
from deepseek_recipe.requests.echo import ResponsesEcho
from deepseek_recipe.requests.messages import MessagesRequest
from deepseek_recipe.requests.options import ConversionOptions
from deepseek_recipe.requests.responses import ResponsesRequest
from deepseek_recipe.requests.result import ConversationRequest, InferenceOptions, OutputConstraint

# ---- the output side -------------------------------------------------------------------------------------------------
from deepseek_recipe.streaming.chat import (
    ChatCompletionChunk,
    ChatCompletionChunkGenerator,
    ChatCompletionResponse,
)
from deepseek_recipe.streaming.chunks import InferenceChunk, PromptUsage
from deepseek_recipe.streaming.messages import MessagesChunkGenerator, MessagesResponse, MessagesStreamEvent
from deepseek_recipe.streaming.options import ParsingOptions
from deepseek_recipe.streaming.processor import StreamProcessor
from deepseek_recipe.streaming.responses import (
    ResponsesChunkGenerator,
    ResponsesResponse,
    ResponsesStreamEvent,
)
from deepseek_recipe.streaming.sse import SseWriter
from deepseek_recipe.tokenizer import Tokenizer
from deepseek_recipe.tokens import SpecialToken, SpecialTokens

if TYPE_CHECKING:
    from deepseek_recipe.images.fetch import HttpImageFetcher, ReqwestImageFetcher
    from deepseek_recipe.streaming.async_processor import AsyncStreamProcessor

__all__ = [
    "IMAGE_SPECIAL_TOKEN_ID",
    "AnswerError",
    "AssistantMessage",
    "AsyncStreamProcessor",
    "BytesImageSource",
    "CalcResizeError",
    "ChatCompletionChunk",
    "ChatCompletionChunkGenerator",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "Conversation",
    "ConversationRequest",
    "ConversionError",
    "ConversionOptions",
    "DataUrlImageSource",
    "DeepseekV4Encoding",
    "DeepseekV41Encoding",
    "HttpImageFetcher",
    "ImageError",
    "ImageInfo",
    "ImageQuota",
    "ImageResolver",
    "ImageSource",
    "InferenceChunk",
    "InferenceFinishReason",
    "InferenceOptions",
    "LatestReminderMessage",
    "MalformedToolCallError",
    "Message",
    "MessagesChunkGenerator",
    "MessagesRequest",
    "MessagesResponse",
    "MessagesStreamEvent",
    "ModelVersion",
    "MultiModalData",
    "OpenCvImagePreprocessor",
    "OutputConstraint",
    "ParsingOptions",
    "PillowImagePreprocessor",
    "PreprocessOptions",
    "PromptUsage",
    "ReasoningContentBehavior",
    "RenderedPrompt",
    "ReqwestImageFetcher",
    "ResponsesChunkGenerator",
    "ResponsesEcho",
    "ResponsesRequest",
    "ResponsesResponse",
    "ResponsesStreamEvent",
    "SpecialToken",
    "SpecialTokens",
    "SseWriter",
    "StreamProcessor",
    "SystemMessage",
    "ThinkingInitialStage",
    "Tokenizer",
    "ToolCall",
    "ToolDefinition",
    "ToolMessage",
    "UrlImageSource",
    "UserMessage",
    "WebSearchBehavior",
    "__provider__",
    "__version__",
    "count_tokens",
    "encoding_for",
]


def __getattr__(name: str) -> Any:
    """What loads an HTTP stack or asyncio, which not every program needs, is imported when it is asked for."""
    if name in ("HttpImageFetcher", "ReqwestImageFetcher"):
        from deepseek_recipe.images import fetch

        return getattr(fetch, name)
    if name == "AsyncStreamProcessor":
        from deepseek_recipe.streaming.async_processor import AsyncStreamProcessor

        return AsyncStreamProcessor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
