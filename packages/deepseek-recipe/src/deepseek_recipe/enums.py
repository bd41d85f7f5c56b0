"""The closed sets of choices of the public interface. `str()` and `repr()` of a member give `Class.Member`."""

from __future__ import annotations

from enum import Enum

__all__ = [
    "InferenceFinishReason",
    "ModelVersion",
    "ReasoningContentBehavior",
    "ThinkingInitialStage",
    "WebSearchBehavior",
]


class NamedEnum(Enum):
    """An enum whose members print as `Class.Member` on every supported Python."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    __repr__ = __str__


class ModelVersion(NamedEnum):
    """Which prompt format a model was trained on."""

    DeepseekV4Pro = "deepseek-v4-pro"
    DeepseekV41Flash = "deepseek-v4.1-flash"


class WebSearchBehavior(NamedEnum):
    """What to do with hosted web search, which no engine behind this codec runs: leave it out, or refuse."""

    Drop = "drop"
    Reject = "reject"


class ReasoningContentBehavior(NamedEnum):
    """What to do with an assistant turn of a tool loop that came back without its reasoning."""

    FillEmpty = "fill-empty"
    Reject = "reject"


class InferenceFinishReason(NamedEnum):
    """Why the engine stopped."""

    Stop = "stop"
    Length = "length"
    ContentFilter = "content-filter"


class ThinkingInitialStage(NamedEnum):
    """Where the first generated token stands when thinking is on."""

    ReasoningStart = "reasoning-start"
    ReasoningContinuation = "reasoning-continuation"
    ContentContinuation = "content-continuation"

    def starts_in_reasoning(self) -> bool:
        """Whether the first token belongs to the reasoning."""
        return self is not ThinkingInitialStage.ContentContinuation
