"""What an engine sends: `ready` once, then `text` or `tokens` as they come, then `finish`.

InferenceChunk.ready(prompt_usage=PromptUsage(prompt_tokens=10, prompt_cache_hit_tokens=4))
InferenceChunk.text("Hel", token_count=1)      or      InferenceChunk.tokens([23166])
InferenceChunk.finish(InferenceFinishReason.Stop)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, cast

from deepseek_recipe.checks import require_instance, require_str, shown
from deepseek_recipe.enums import InferenceFinishReason

__all__ = ["ChunkKind", "InferenceChunk", "PromptUsage", "TokenLogprobs"]

ChunkKind = Literal["ready", "text", "tokens", "finish"]
# Of one token: its log probability, and (id, log probability) of the likeliest tokens at its place.
TokenLogprobs = tuple[float, Sequence[tuple[int, float]]]

_MAX_TOKEN_ID = 2**32 - 1
_MAX_COUNT = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class PromptUsage:
    """Token counts of the prompt: all of them, and those found in the prefix cache.

    Raises: OverflowError for a count outside [0, 2**64), TypeError for one that is no integer.
    """

    prompt_tokens: int = 0
    prompt_cache_hit_tokens: int = 0

    def __post_init__(self) -> None:
        for name, count in self.to_dict().items():
            object.__setattr__(self, name, checked_int(name, count, _MAX_COUNT))

    def to_dict(self) -> dict[str, int]:
        """The two counts by name."""
        return {"prompt_tokens": self.prompt_tokens, "prompt_cache_hit_tokens": self.prompt_cache_hit_tokens}


class InferenceChunk:
    """One update from the engine. Built with `ready`, `text`, `tokens` or `finish`; immutable.

    A property that does not belong to the kind of chunk is None.
    """

    kind: ChunkKind
    content: str | None = None
    token_count: int | None = None
    token_ids: list[int] | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: InferenceFinishReason | None = None
    prompt_usage: PromptUsage | None = None
    system_fingerprint: str | None = None

    def __init__(self) -> None:
        raise TypeError("build an InferenceChunk with ready, text, tokens or finish")

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> InferenceChunk:
        chunk = object.__new__(cls)
        chunk.__dict__.update(fields)
        return chunk

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an InferenceChunk cannot be changed; build a new one instead of setting {shown(name)}")

    @staticmethod
    def ready(*, prompt_usage: PromptUsage | None = None, system_fingerprint: str | None = None) -> InferenceChunk:
        """The engine has accepted the prompt. Without `prompt_usage` its counts are 0."""
        if prompt_usage is not None:
            require_instance("prompt_usage", prompt_usage, PromptUsage)
        if system_fingerprint is not None:
            require_str("system_fingerprint", system_fingerprint)
        usage = PromptUsage() if prompt_usage is None else prompt_usage
        return InferenceChunk._of({"kind": "ready", "prompt_usage": usage, "system_fingerprint": system_fingerprint})

    @staticmethod
    def text(content: str, token_count: int = 0) -> InferenceChunk:
        """Decoded text and the number of tokens that it stands for.

        Raises: UnicodeEncodeError for lone surrogates, OverflowError for a count outside [0, 2**64).
        """
        require_str("content", content)  # lone surrogates too: JSON in UTF-8 cannot carry them
        count = checked_int("token_count", token_count, _MAX_COUNT)
        return InferenceChunk._of({"kind": "text", "content": content, "token_count": count})

    @staticmethod
    def tokens(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> InferenceChunk:
        """Token ids of one engine step, with one pair of log probabilities an id or none at all.

        Raises: OverflowError for an id outside [0, 2**32), TypeError for anything but integers.
        """
        ids = [checked_int("token id", token_id, _MAX_TOKEN_ID) for token_id in _sequence("token_ids", token_ids)]
        if logprobs is None:
            return InferenceChunk._of({"kind": "tokens", "token_ids": ids})
        entries = [_checked_logprobs(entry) for entry in _sequence("logprobs", logprobs)]
        return InferenceChunk._of({"kind": "tokens", "token_ids": ids, "logprobs": entries})

    @staticmethod
    def finish(finish_reason: InferenceFinishReason) -> InferenceChunk:
        """The engine has stopped, and why."""
        require_instance("finish_reason", finish_reason, InferenceFinishReason)
        return InferenceChunk._of({"kind": "finish", "finish_reason": finish_reason})

    def to_dict(self) -> dict[str, Any]:
        """The chunk as JSON-compatible values; `from_dict` reads them back."""
        if self.kind == "ready":
            usage = self.prompt_usage
            counts = None if usage is None else usage.to_dict()
            return {"kind": "ready", "prompt_usage": counts, "system_fingerprint": self.system_fingerprint}
        if self.kind == "text":
            return {"kind": "text", "content": self.content, "token_count": self.token_count}
        if self.kind == "tokens":
            logprobs = self.logprobs and [[p, [list(pair) for pair in top]] for p, top in self.logprobs]
            return {"kind": "tokens", "token_ids": list(self.token_ids or ()), "logprobs": logprobs}
        return {"kind": "finish", "finish_reason": self.finish_reason and self.finish_reason.name}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> InferenceChunk:
        """The chunk that `to_dict` wrote.

        Raises: ValueError for an unknown kind or finish reason, otherwise as the constructor of that kind.
        """
        settings = dict(values)
        kind = settings.pop("kind", None)
        if kind == "ready":
            if isinstance(settings.get("prompt_usage"), Mapping):
                settings["prompt_usage"] = PromptUsage(**settings["prompt_usage"])
            return InferenceChunk.ready(**settings)
        if kind == "text":
            return InferenceChunk.text(**settings)
        if kind == "tokens":
            return InferenceChunk.tokens(**settings)
        if kind == "finish":
            name, names = str(settings.get("finish_reason")), InferenceFinishReason.__members__
            if name not in names:
                raise ValueError(f"finish_reason must be one of {', '.join(names)}, not {shown(name)}")
            return InferenceChunk.finish(names[name])
        raise ValueError(f"kind must be one of ready, text, tokens, finish, not {shown(kind)}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InferenceChunk) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(repr(self.to_dict()))

    def __repr__(self) -> str:
        fields = [f"{name}={value!r}" for name, value in self.to_dict().items() if name != "kind"]
        return f"InferenceChunk.{self.kind}({', '.join(fields)})"


def checked_int(name: str, value: object, limit: int) -> int:
    """`value` as an int in [0, limit].

    Raises: TypeError if it is no integer, OverflowError if it is out of range.
    """
    number = index(cast("int", value))
    if not 0 <= number <= limit:
        raise OverflowError(f"{name} must be between 0 and {limit}, not {number}")
    return number


def _sequence(name: str, value: object) -> Sequence[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a sequence, not {type(value).__name__}")
    return cast("Sequence[Any]", value)


def _checked_logprobs(entry: object) -> TokenLogprobs:
    if not isinstance(entry, (tuple, list)):
        raise TypeError(f"an entry of logprobs must be (logprob, [(token id, logprob), ...]), not {shown(entry)}")
    logprob, top = cast("Sequence[Any]", entry)
    pairs = [
        (checked_int("token id", token_id, _MAX_TOKEN_ID), _number(value)) for token_id, value in _sequence("top", top)
    ]
    return _number(logprob), pairs


def _number(value: object) -> float:
    if isinstance(value, (str, bytes)):  # which float() would read
        raise TypeError(f"a log probability must be a number, not {shown(value)}")
    return float(cast("float", value))
