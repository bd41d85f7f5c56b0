"""`Request`: what the scheduler knows of one request, and what it says about requests after a step.

    WAITING_EXTERNAL --resume--> WAITING --slot, blocks--> RUNNING --stop, length, abort, error--> FINISHED
                                    ^------- preempted: blocks given back, recomputed later ---|

A request object is touched when it enters or leaves a slot and once a block of 128 tokens; between those moments its
numbers live in the arrays of `SlotTable`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from deepinfer_core.scheduling.plan import BoolArray, Int32Array, Int64Array, TokenLogprobs, UInt8Array, UInt32Mask

if TYPE_CHECKING:
    from deepinfer_core.config.sampling import SamplingParams

__all__ = [
    "ConstrainedRows",
    "Constraint",
    "FinishReason",
    "Finished",
    "Request",
    "RequestStatus",
    "StepOutputs",
    "Stop",
    "TokenWatcher",
]


class RequestStatus(Enum):
    """Where a request is."""

    WAITING_EXTERNAL = "waiting for blocks from outside"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended; the values are those of `CompletionOutput.finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Stop:
    """A watcher's verdict: the request ends, and `num_tokens` of the tokens shown to it belong to the answer."""

    num_tokens: int
    stop_reason: int | str | None = None


class TokenWatcher(Protocol):
    """Sees every committed token once, in order: stop strings, grammar state, callbacks. Runs at the one commit point.

    An exception fails this request alone.
    """

    def observe(self, tokens: Sequence[int]) -> Stop | None:
        """Take the next tokens; a `Stop` ends the request."""
        ...


@dataclass(frozen=True, slots=True)
class ConstrainedRows:
    """What a constraint makes of the drafts: the ones to verify, and a mask for the anchor's row and each draft's."""

    drafts: Sequence[int]
    masks: Sequence[UInt32Mask | None]  # [1 + len(drafts)], None = every token is allowed


class Constraint(Protocol):
    """Masks of the next rows, asked for when every token before them is committed: never planned ahead."""

    def rows(self, drafts: Sequence[int], room: int) -> ConstrainedRows:
        """`drafts` cut at the first illegal one; forced tokens may follow or replace them, up to `room` in all."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Positions count from the first prompt token; the end is `limit` tokens, prompt included."""

    number: int  # engine-wide arrival number
    params: SamplingParams
    seed: int
    prompt_tokens: int
    limit: int  # most tokens, prompt + output
    decoder_from: int
    urgency: int  # arrival number + priority x head start: the smallest goes first
    arrival_s: float
    root_key: bytes
    tokens: Int64Array  # [>= num_tokens] prompt, then output; grows
    num_tokens: int
    content: UInt8Array | None = None  # [prompt_tokens] Content of each prompt token
    identity: UInt8Array | None = None  # [prompt_tokens] which image a token belongs to, for the prefix index
    watcher: TokenWatcher | None = None
    constraint: Constraint | None = None
    status: RequestStatus = RequestStatus.WAITING
    slot: int = -1
    keys: list[bytes] = field(default_factory=list[bytes])  # of its full blocks, as far as they were needed
    drafts: list[int] = field(default_factory=list[int])  # the newest proposals, kept for `constraint` only
    prompt_scored: int = 0  # prompt tokens after the first whose log-probabilities were handed out
    strikes: int = 0  # failed steps it took part in
    suspect_until: int = 0  # runs alone until it has this many tokens
    hit_tokens: int | None = None  # of the prompt, at the first admission: what it finds again later is its own work
    num_preemptions: int = 0
    first_scheduled_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def all_rows_wanted(self) -> bool:
        """Whether logits of every prompt row are wanted."""
        return self.params.prompt_logprobs is not None

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens that have been moved here from the slot table."""
        return self.num_tokens - self.prompt_tokens

    def append(self, tokens: Int64Array) -> None:
        """Add committed tokens; amortised constant time a token."""
        end = self.num_tokens + len(tokens)
        if end > len(self.tokens):
            grown = np.empty(min(self.limit, max(end, 2 * len(self.tokens))), np.int64)
            grown[: self.num_tokens] = self.tokens[: self.num_tokens]
            self.tokens = grown
        self.tokens[self.num_tokens : end] = tokens
        self.num_tokens = end

    def known_tokens(self) -> Int64Array:
        """A copy of all tokens, prompt and output."""
        return self.tokens[: self.num_tokens].copy()


class Finished(NamedTuple):
    """The end of a request: usage counts committed tokens only."""

    number: int
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int = 0
    stop_reason: int | str | None = None
    error: str | None = None
    num_preemptions: int = 0
    queue_s: float = 0.0  # arrival to first row
    first_token_s: float = 0.0  # arrival to first token
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step committed: N requests got tokens, some requests ended."""

    step: int
    number: Int64Array  # [N] request numbers
    tokens: Int64Array  # [N, W] committed tokens, junk beyond num_tokens
    num_tokens: Int32Array  # [N] at least 1
    finished: tuple[Finished, ...] = ()
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict[int, Sequence[TokenLogprobs]])
    # logprobs: index n -> one entry for each of tokens[n, :num_tokens[n]]
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict[int, Sequence[TokenLogprobs]])
    # prompt_logprobs: request number -> entries of the prompt tokens that this step predicted, in order

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """(request number, tokens) of each request that got tokens."""
        numbers: list[int] = self.number.tolist()
        width = self.tokens.shape[1]
        if width == 1:
            return zip(numbers, self.tokens.tolist(), strict=True)
        kept: BoolArray = np.arange(width, dtype=np.int64) < self.num_tokens[:, None]
        tokens: list[int] = self.tokens[kept].tolist()  # one list of all, cut below: half the work of a list a row
        ends: list[int] = np.cumsum(self.num_tokens).tolist()
        return iter([(number, tokens[b:e]) for number, b, e in zip(numbers, [0, *ends], ends, strict=False)])
