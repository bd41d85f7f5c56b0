"""Settings of the scheduler, the cache and speculation: three frozen dataclasses that `EngineConfig` nests.

    backtrack  = in-flight steps x (drafts + 1)       how far rejected drafts can throw a request back
    ring slots = window + backtrack                   128 + 2 x (5 + 1) = 140 in the release
    keep       >= ring slots                          rows of a prompt that the decoder half computes

`keep_tokens` has one default for a checkpoint, whatever the draft length in use: with `decoder_prefill="compact"` the
answer depends on it, and an answer must not depend on how it is sped up.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import hexdigits
from typing import Annotated, Any, Final, Literal, cast

from deepinfer_core.config.checks import check_choice, check_flag, check_integer, check_number, shown
from deepinfer_core.errors import ConfigError

__all__ = [
    "BLOCK_TOKENS",
    "IN_FLIGHT_STEPS",
    "CacheConfig",
    "DecoderPrefill",
    "DraftSchedule",
    "PrefixReplay",
    "SchedulerConfig",
    "SpeculationConfig",
    "Verification",
    "default_keep_tokens",
    "validate_window_budget",
    "window_ring_slots",
]

BLOCK_TOKENS: Final = 128  # positions of one block of the compressed and index groups; also the unit of prefix hits
IN_FLIGHT_STEPS: Final = 2  # steps that may be launched and not yet committed

DecoderPrefill = Literal["full", "exact", "compact", "mask"]
PrefixReplay = Literal["off", "exact", "bounded"]
DraftSchedule = Literal["fixed", "scheduled"]
Verification = Literal["coupled", "ratio"]

_MAX_BLOCKS: Final = 2**31 - 1
_MAX_DRAFTS: Final = 32
_DECODER_PREFILL: Final[dict[str, DecoderPrefill]] = {
    "full": "full",
    "exact": "exact",
    "compact": "compact",
    "mask": "mask",
    "bounded": "compact",  # the name that prefix_replay has for the same idea
    "off": "full",  # the original's name
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How many requests and rows a step may hold, and who goes first."""

    max_num_seqs: Annotated[int, "requests that run at once"] = 256
    max_num_batched_tokens: Annotated[int, "rows of one step"] = 8192
    max_model_len: Annotated[int | None, "tokens of a request, prompt and answer; None = the checkpoint's limit"] = None
    max_prefill_chunk_tokens: Annotated[int | None, "rows of one prompt in one step; None = all that are left"] = None
    max_num_waiting: Annotated[int, "requests in the queue; one more is refused"] = 100_000
    priority_head_start: Annotated[int, "arrivals that one level of priority may overtake"] = 10_000
    overlap: Annotated[bool, "plan the next step while this one runs"] = True

    def __post_init__(self) -> None:
        _integer("max_num_seqs", self.max_num_seqs, 1, 65_536)
        _integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**22)
        _optional("max_model_len", self.max_model_len, 2, 2**26)
        _optional("max_prefill_chunk_tokens", self.max_prefill_chunk_tokens, 1, 2**22)
        _integer("max_num_waiting", self.max_num_waiting, 1, 2**24)
        _integer("priority_head_start", self.priority_head_start, 0, 2**31)
        check_flag("overlap", self.overlap, ConfigError)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs {self.max_num_seqs}: "
                "a step could not hold one row of every running request; raise the one or lower the other"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Size of the paged cache, what of a prompt is computed, and what is reused."""

    num_blocks: Annotated[int | None, "cache blocks of 128 tokens; None = what memory allows"] = None
    memory_fraction: Annotated[float, "of device memory, for weights and cache"] = 0.9
    decoder_prefill: Annotated[DecoderPrefill, "rows of a prompt that the decoder half computes"] = "compact"
    keep_tokens: Annotated[int | None, "rows that compact and mask keep; None = window + 2 x (draft block + 1)"] = None
    prefix_replay: Annotated[PrefixReplay | None, "after a prefix hit; None = exact if deterministic"] = None
    prefix_salt: Annotated[str | None, "secret of the prefix index, 32 to 128 hex digits; None = random"] = None

    def __post_init__(self) -> None:
        _optional("num_blocks", self.num_blocks, 1, _MAX_BLOCKS)
        check_number("memory_fraction", self.memory_fraction, 0.0, 1.0, ConfigError, above_low=True)
        check_choice("decoder_prefill", self.decoder_prefill, tuple(_DECODER_PREFILL), ConfigError)
        object.__setattr__(self, "decoder_prefill", _DECODER_PREFILL[self.decoder_prefill])
        _optional("keep_tokens", self.keep_tokens, 1, 2**20)
        if self.prefix_replay is not None:
            check_choice("prefix_replay", self.prefix_replay, ("off", "exact", "bounded"), ConfigError)
        if self.prefix_salt is not None:
            _hexadecimal("prefix_salt", self.prefix_salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """DSpark: how many drafts, how many of them are verified, and how."""

    num_drafts: Annotated[int, "drafted tokens a step, 0 = no speculation"] = 5
    draft_schedule: Annotated[DraftSchedule, "fixed = verify all drafts, scheduled = those that pay"] = "scheduled"
    verification: Annotated[Verification, "ratio accepts a little more, but does not repeat under load"] = "coupled"
    confidence_temperatures: Annotated[tuple[float, ...], "calibrates confidences: one, or one a draft"] = (1.0,)
    max_backtracking_tokens: Annotated[int | None, "how far a step may fall back; None = num_drafts + 1"] = None

    def __post_init__(self) -> None:
        _integer("num_drafts", self.num_drafts, 0, _MAX_DRAFTS)
        check_choice("draft_schedule", self.draft_schedule, ("fixed", "scheduled"), ConfigError)
        check_choice("verification", self.verification, ("coupled", "ratio"), ConfigError)
        _temperatures(self.confidence_temperatures, self.num_drafts)
        _optional("max_backtracking_tokens", self.max_backtracking_tokens, 1, 1024)
        if self.max_backtracking_tokens is not None and self.max_backtracking_tokens < self.num_drafts + 1:
            raise ConfigError(
                f"max_backtracking_tokens is {self.max_backtracking_tokens}; a step of {self.num_drafts} drafts can "
                f"fall back {self.num_drafts + 1} rows, so give at least that"
            )


def window_ring_slots(window: int, num_drafts: int, in_flight_steps: int = IN_FLIGHT_STEPS) -> int:
    """Slots of every window ring: `window + in_flight_steps * (num_drafts + 1)`, 140 in the release."""
    return window + in_flight_steps * (num_drafts + 1)


def default_keep_tokens(window: int, draft_block_size: int) -> int:
    """Rows that `compact` keeps by default; `draft_block_size` is the checkpoint's, not the setting in use."""
    return window_ring_slots(window, draft_block_size)


def validate_window_budget(keep_tokens: int, window: int, speculation: SpeculationConfig) -> None:
    """Raise ConfigError, showing the sum, unless the kept rows refill all ring slots that rejected drafts can need."""
    step = max(speculation.num_drafts + 1, speculation.max_backtracking_tokens or 0)
    needed = window + IN_FLIGHT_STEPS * step
    if keep_tokens < needed:
        raise ConfigError(
            f"keep_tokens is {keep_tokens}; window {window} + {IN_FLIGHT_STEPS} steps in flight x {step} rows = "
            f"{needed} are needed: raise keep_tokens to {needed} or lower num_drafts"
        )


# ---- checks of single values -------------------------------------------------------------------------------------


def _integer(name: str, value: Any, low: int, high: int) -> None:
    check_integer(name, value, low, high, ConfigError)


def _optional(name: str, value: Any, low: int, high: int) -> None:
    if value is not None:
        check_integer(name, value, low, high, ConfigError)


def _hexadecimal(name: str, value: Any) -> None:
    if isinstance(value, str) and 32 <= len(value) <= 128 and len(value) % 2 == 0 and set(value) <= set(hexdigits):
        return
    raise ConfigError(
        f"{name} must be 32 to 128 hexadecimal digits, an even number of them"
    )  # it is a secret: not shown


def _temperatures(values: Any, num_drafts: int) -> None:
    if not isinstance(values, tuple) or not values:
        raise ConfigError(
            f"confidence_temperatures is {shown(cast('object', values))}; give a tuple of positive numbers"
        )
    numbers = cast("tuple[Any, ...]", values)
    for i, number in enumerate(numbers):
        check_number(f"confidence_temperatures[{i}]", number, 0.01, 100.0, ConfigError)
    if num_drafts and len(numbers) not in (1, num_drafts):
        raise ConfigError(
            f"confidence_temperatures has {len(numbers)} values for num_drafts {num_drafts}; give one, or one a draft"
        )
