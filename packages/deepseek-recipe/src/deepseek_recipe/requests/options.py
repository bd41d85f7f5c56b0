"""Settings of request conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec.structs import force_setattr, replace

from deepseek_recipe.checks import require_bool, require_instance, require_int_in, require_number_in, require_str, shown
from deepseek_recipe.enums import ModelVersion, ReasoningContentBehavior, WebSearchBehavior
from deepseek_recipe.schema.limits import DEFAULT_TIME_LIMIT_S
from deepseek_recipe.tokens import DEFAULT_SPECIAL_TOKENS, SpecialTokens

__all__ = ["DEFAULT_MODEL_VERSIONS", "ConversionOptions", "Dialect", "ErrorShape"]

Dialect = Literal["strict", "extended"]
ErrorShape = Literal["openai", "native"]

DEFAULT_MODEL_VERSIONS: Mapping[str, ModelVersion] = {
    "DeepSeek-V4-Pro": ModelVersion.DeepseekV4Pro,
    "DeepSeek-V4.1-Flash": ModelVersion.DeepseekV41Flash,
}
_MAX_TOKENS_BOUND = 393_216
_U32_MAX = 2**32 - 1
_MAX_TIME_LIMIT_S = 3_600.0


class ConversionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are converted. Immutable; the `with_` methods return changed copies.

    `dialect="extended"` accepts and honours what the official codec refuses or ignores (docs/recipe.md lists it);
    `error_shape="native"` gives Messages errors the body that Anthropic's clients expect; `schema_time_limit_s` bounds
    the time that all JSON Schemas of a request may take.
    """

    default_thinking_mode: bool = True
    reasoning_content_behavior: ReasoningContentBehavior = ReasoningContentBehavior.FillEmpty
    responses_web_search: WebSearchBehavior = WebSearchBehavior.Drop
    messages_web_search: WebSearchBehavior = WebSearchBehavior.Reject
    thinking_max_tokens_upper_bound: int = _MAX_TOKENS_BOUND
    non_thinking_max_tokens_upper_bound: int = _MAX_TOKENS_BOUND
    model_versions_by_name: Mapping[str, ModelVersion] = msgspec.field(default_factory=lambda: DEFAULT_MODEL_VERSIONS)
    special_tokens: SpecialTokens = DEFAULT_SPECIAL_TOKENS
    schema_time_limit_s: float = DEFAULT_TIME_LIMIT_S
    dialect: Dialect = "strict"
    error_shape: ErrorShape = "openai"

    def __post_init__(self) -> None:
        require_bool("default_thinking_mode", self.default_thinking_mode)
        require_instance("reasoning_content_behavior", self.reasoning_content_behavior, ReasoningContentBehavior)
        require_instance("responses_web_search", self.responses_web_search, WebSearchBehavior)
        require_instance("messages_web_search", self.messages_web_search, WebSearchBehavior)
        require_instance("special_tokens", self.special_tokens, SpecialTokens)
        for name in ("thinking_max_tokens_upper_bound", "non_thinking_max_tokens_upper_bound"):
            require_int_in(name, getattr(self, name), 0, _U32_MAX)
        require_number_in("schema_time_limit_s", self.schema_time_limit_s, 0.0, _MAX_TIME_LIMIT_S)
        require_instance("model_versions_by_name", self.model_versions_by_name, Mapping)
        for name, version in self.model_versions_by_name.items():
            require_str("model name", name)
            require_instance("model_version", version, ModelVersion)
        force_setattr(self, "model_versions_by_name", dict(self.model_versions_by_name))
        if self.dialect not in ("strict", "extended"):
            raise ValueError(f"invalid dialect {shown(self.dialect)}; expected strict or extended")
        if self.error_shape not in ("openai", "native"):
            raise ValueError(f"invalid error_shape {shown(self.error_shape)}; expected openai or native")

    def with_default_thinking_mode(self, default_thinking_mode: bool) -> ConversionOptions:
        """A copy with another default for requests that do not say whether to think."""
        return replace(self, default_thinking_mode=default_thinking_mode)

    def with_reasoning_content_behavior(
        self, reasoning_content_behavior: ReasoningContentBehavior
    ) -> ConversionOptions:
        """A copy with another treatment of missing reasoning."""
        return replace(self, reasoning_content_behavior=reasoning_content_behavior)

    def with_responses_web_search(self, responses_web_search: WebSearchBehavior) -> ConversionOptions:
        """A copy with another treatment of hosted web search in Responses."""
        return replace(self, responses_web_search=responses_web_search)

    def with_messages_web_search(self, messages_web_search: WebSearchBehavior) -> ConversionOptions:
        """A copy with another treatment of hosted web search in Messages."""
        return replace(self, messages_web_search=messages_web_search)

    def with_special_tokens(self, special_tokens: SpecialTokens) -> ConversionOptions:
        """A copy with other spellings of the special tokens."""
        return replace(self, special_tokens=special_tokens)

    def with_model_alias(self, model: str, model_version: ModelVersion) -> ConversionOptions:
        """A copy that also serves `model_version` under the name `model`."""
        return replace(self, model_versions_by_name={**self.model_versions_by_name, model: model_version})

    def with_model_versions_by_name(self, model_versions_by_name: Mapping[str, ModelVersion]) -> ConversionOptions:
        """A copy that serves these models only."""
        return replace(self, model_versions_by_name=model_versions_by_name)

    def with_thinking_max_tokens_upper_bound(self, thinking_max_tokens_upper_bound: int) -> ConversionOptions:
        """A copy with another bound on the requested tokens when thinking."""
        return replace(self, thinking_max_tokens_upper_bound=thinking_max_tokens_upper_bound)

    def with_non_thinking_max_tokens_upper_bound(self, non_thinking_max_tokens_upper_bound: int) -> ConversionOptions:
        """A copy with another bound on the requested tokens when not thinking."""
        return replace(self, non_thinking_max_tokens_upper_bound=non_thinking_max_tokens_upper_bound)
