"""Token counts of a response, in the words of the three APIs.

prompt = hit + miss          total = prompt + completion          reasoning ≤ completion, if it is known
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Usage", "merged_chat_usage"]


@dataclass(frozen=True)
class Usage:
    """Counts of one response. `reasoning_tokens` is None when the stream has no tokenizer or does not think."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None

    def chat(self) -> dict[str, Any]:
        """The `usage` object of Chat Completions."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.hit_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        usage["prompt_cache_hit_tokens"] = self.hit_tokens
        usage["prompt_cache_miss_tokens"] = max(self.prompt_tokens - self.hit_tokens, 0)
        return usage

    def messages(self) -> dict[str, Any]:
        """The `usage` object of Messages, which counts cache hits apart from the input."""
        return {
            "input_tokens": max(self.prompt_tokens - self.hit_tokens, 0),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.hit_tokens,
            "output_tokens": self.completion_tokens,
            "service_tier": "standard",
        }

    def responses(self) -> dict[str, Any]:
        """The `usage` object of Responses."""
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.hit_tokens},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens or 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def merged_chat_usage(usages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One `usage` object of Chat Completions for several answers to one prompt."""
    if len(usages) == 1:
        return usages[0]
    completion = sum(usage["completion_tokens"] for usage in usages)
    merged = {**usages[0], "completion_tokens": completion, "total_tokens": usages[0]["prompt_tokens"] + completion}
    reasoning = [
        usage["completion_tokens_details"]["reasoning_tokens"]
        for usage in usages
        if "completion_tokens_details" in usage
    ]
    if reasoning:
        merged["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
    return merged
