"""What a request returns, and how it comes together."""

from __future__ import annotations

from deepinfer_core.outputs.answer import Answer
from deepinfer_core.outputs.chunks import Chunk, ChunkText
from deepinfer_core.outputs.replay import Provenance, first_difference, read_replay
from deepinfer_core.outputs.shapes import (
    AnswerMetrics,
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    logprob_table,
)

__all__ = [
    "Answer",
    "AnswerMetrics",
    "Chunk",
    "ChunkText",
    "CompletionOutput",
    "FinishReason",
    "Logprob",
    "Provenance",
    "RequestOutput",
    "first_difference",
    "logprob_table",
    "read_replay",
]
