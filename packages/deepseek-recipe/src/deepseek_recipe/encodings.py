"""Which encoding renders for which model, and how long a request's prompt is."""

from __future__ import annotations

from deepseek_recipe.enums import ModelVersion
from deepseek_recipe.images.resolve import MultiModalData
from deepseek_recipe.rendering.base import PromptEncoding
from deepseek_recipe.rendering.v4 import DeepseekV4Encoding
from deepseek_recipe.rendering.v41 import DeepseekV41Encoding
from deepseek_recipe.requests.result import ConversationRequest
from deepseek_recipe.tokenizer import Tokenizer

__all__ = ["count_tokens", "encoding_for"]

_ENCODINGS: dict[ModelVersion, type[PromptEncoding]] = {
    ModelVersion.DeepseekV4Pro: DeepseekV4Encoding,
    ModelVersion.DeepseekV41Flash: DeepseekV41Encoding,
}


def encoding_for(version: ModelVersion) -> PromptEncoding:
    """A new encoding of the prompt format of `version`."""
    return _ENCODINGS[version]()


def count_tokens(request: ConversationRequest, tokenizer: Tokenizer, images: MultiModalData | None = None) -> int:
    """Tokens of the prompt of a converted request, the patches of its resolved images included."""
    encoding = encoding_for(request.model_version).with_tokenizer(tokenizer)
    adjustment = 0 if images is None else images.image_token_adjustment()
    return encoding.count_tokens(request.conversation) + adjustment
