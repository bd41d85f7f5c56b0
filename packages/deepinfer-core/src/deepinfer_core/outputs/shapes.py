"""What a request returns: `RequestOutput` with one `CompletionOutput` an answer, in the shapes of vLLM.

output.prompt, output.prompt_token_ids
output.prompt_logprobs           [None, {id: Logprob, ..}, ..]     one entry a prompt token, the first has no logprob
output.outputs[i].text, .token_ids, .finish_reason, .stop_reason, .cumulative_logprob, .seed
output.outputs[i].logprobs       [{id: Logprob, ..}, ..]           the drawn token and the most likely ones
output.outputs[i].metrics        queue, prefill, first token, inter-token, hits, acceptance
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.outputs.replay import Provenance, replay_bytes, replay_token
from deepinfer_core.scheduling.plan import TokenLogprobs
from deepinfer_core.text import Tokenizer

__all__ = ["AnswerMetrics", "CompletionOutput", "FinishReason", "Logprob", "RequestOutput", "logprob_table"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability, its rank (1 = most likely), and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class AnswerMetrics:
    """What one answer took; seconds from its arrival unless said otherwise."""

    queue_s: float  # until its first row ran
    prefill_s: float  # from there to its first token
    first_token_s: float
    total_s: float
    inter_token_s: float | None  # mean time between two tokens; None for fewer than two
    hit_tokens: int  # prompt tokens whose cache was reused
    num_preemptions: int
    num_blocks: int  # of the cache, when it ended
    steps_by_tokens: tuple[int, ...]  # steps that brought 1, 2, .. tokens: 1 + accepted drafts


@dataclass(slots=True)
class CompletionOutput:
    """One answer."""

    index: int  # which of n
    text: str
    token_ids: list[int]  # the end token included
    cumulative_logprob: float | None  # of the tokens drawn; None where no logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None  # None while it runs
    stop_reason: (
        int | str | None
    )  # the stop token id or stop string; None for the end-of-sentence token and other reasons
    seed: int  # 0 <= seed < 2**64; with it the answer can be drawn again
    error: str | None = None  # why it failed, with finish_reason "error"
    metrics: AnswerMetrics | None = field(default=None, compare=False)  # when it has finished; never the same twice

    @property
    def finished(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput] = field(default_factory=list[CompletionOutput])
    seed: int = 0  # of answer 0; others are derived from it
    num_cached_tokens: int = 0  # prompt tokens whose cache was reused
    notes: tuple[str, ...] = ()  # what the request's parameters made the engine do otherwise than usual
    sampling_params: SamplingParams | None = None
    provenance: Provenance | None = None

    @property
    def finished(self) -> bool:
        """Whether all answers are finished."""
        return all(output.finished for output in self.outputs)

    @property
    def replay_token(self) -> str:
        """32 hex digits that name this answer and all that it is a function of (outputs/replay.py)."""
        return replay_token(self)

    def save_replay(self, path: str | Path) -> str:
        """Write what `deepinfer replay` needs to draw the answer again; returns the replay token."""
        Path(path).write_bytes(replay_bytes(self))
        return self.replay_token


def logprob_table(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """{token id: Logprob}, the token itself first, then the most likely ones in descending order."""
    table = {entry.token_id: Logprob(entry.logprob, entry.rank, _text(tokenizer, entry.token_id))}
    for rank, (token_id, logprob) in enumerate(entry.top, 1):
        if token_id != entry.token_id:
            table[token_id] = Logprob(logprob, rank, _text(tokenizer, token_id))
    return table


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)
