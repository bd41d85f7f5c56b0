"""`Chunk`: what a running request says, piece by piece; the seam between the engine and a server.

    ready    the request runs: prompt tokens, those found in the cache, fingerprint of the weights
    text     new tokens of one answer, and the text that they complete (possibly none yet)
    finish   one answer is over: reason, error; usage counts committed tokens only

A request with n answers gives `ready` once and `finish` n times; `index` says which answer a piece belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.outputs.shapes import FinishReason, Logprob
from deepinfer_core.text import TextStream, Tokenizer

__all__ = ["Chunk", "ChunkText"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece; fields that a kind does not have are at their defaults."""

    kind: Literal["ready", "text", "finish"]
    request_id: str
    index: int = 0  # which of n answers
    # ready
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fingerprint: str = ""
    # text
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[int, Logprob], ...] | None = None  # one entry a token, where they were asked for
    # finish
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    output_tokens: int = 0
    seed: int = 0


class ChunkText:
    """The text of one answer as it can be shown: whole characters, nothing that may yet become a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._stream = TextStream(
            tokenizer,
            params.stop_strings,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
        )
        hidden = set(params.stop_token_ids or ()) | (set[int]() if params.ignore_eos else {tokenizer.eos_token_id})
        self._hidden = set[int]() if params.include_stop_str_in_output else hidden
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete."""
        for token in token_ids:
            self._num_tokens += 1
            if token not in self._hidden and self._stream.stopped_by is None:
                self._stream.push(token, may_stop=self._num_tokens > self._min_tokens)
        return self._stream.take_new(finished=self._stream.stopped_by is not None)

    def finish(self) -> str:
        """What was held back and is text after all."""
        self._stream.finish(may_stop=False)
        return self._stream.take_new(finished=True)
