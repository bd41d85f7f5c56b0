"""What a front end and the ranks say to each other: fixed shapes, msgpack, checked when they are read.

    front end ── Start, Submit, Abort, Wake, Ask, Close ──► rank        every command but Start has the next epoch
              ◄── Ready, Stepped, Counters, Failed ────────

Every command goes to every rank, if only as `Wake`: an epoch that all ranks have seen is what lets them pause together
(`parallel.lockstep`). Numbers of requests are the front end's. Sampling parameters travel as a replay file has them and
are checked anew where they arrive.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from deepinfer_core.errors import ParallelError
from deepinfer_core.scheduling.plan import Int64Array, TokenLogprobs
from deepinfer_core.scheduling.request import Finished

__all__ = [
    "Abort",
    "Ask",
    "Close",
    "Command",
    "Counters",
    "Failed",
    "Ready",
    "Report",
    "Start",
    "Stepped",
    "Submit",
    "Wake",
    "decode_command",
    "decode_report",
    "encode",
    "pack_tokens",
    "unpack_tokens",
]

type _Number = Annotated[int, msgspec.Meta(ge=0)]
type _Priority = Annotated[int, msgspec.Meta(ge=-1_000, le=1_000)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    pass


# ---- commands --------------------------------------------------------------------------------------------------------


class Start(_Message, frozen=True):
    """The settings of the engine, by flat name."""

    settings: dict[str, Any]


class Submit(_Message, frozen=True):
    """One sequence for this rank."""

    epoch: _Number
    number: _Number
    prompt: bytes  # of `pack_tokens`
    params: dict[str, Any]
    seed: _Number  # below 2^64, which the scheduler checks
    priority: _Priority
    tenant_salt: str


class Abort(_Message, frozen=True):
    """End the request, wherever it is; unknown ones are none of this rank's business."""

    epoch: _Number
    number: _Number


class Wake(_Message, frozen=True):
    """Something was said to another rank."""

    epoch: _Number


class Ask(_Message, frozen=True):
    """Answer with `Counters`."""

    epoch: _Number


class Close(_Message, frozen=True):
    """Abort everything, and end when all ranks are idle."""

    epoch: _Number


type Command = Start | Submit | Abort | Wake | Ask | Close

# ---- reports ---------------------------------------------------------------------------------------------------------


class Ready(_Message, frozen=True):
    """The engine of a rank is loaded."""

    folder: str
    fingerprint: str
    max_model_len: _Number
    num_blocks: _Number
    settings: dict[str, str | int | bool]  # of its Provenance
    summary: str
    loaded_bytes: dict[str, int]  # by part of the checkpoint


class Stepped(_Message, frozen=True):
    """What a step committed, in the order of `StepOutputs`."""

    numbers: list[int]
    counts: list[int]  # tokens of each
    tokens: bytes  # of all, one after the other
    logprobs: dict[int, list[TokenLogprobs]]  # index -> one entry a token
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # number -> entries
    finished: list[Finished]
    hits: dict[int, int]  # number -> prompt tokens found in the cache, with the first tokens
    drafter_has_collapsed: bool


class Counters(_Message, frozen=True):
    """Statistics since the start."""

    values: dict[str, Any]


class Failed(_Message, frozen=True):
    """This rank ends. `blamed`: ranks it believes to be the cause."""

    error: str
    blamed: list[int]


type Report = Ready | Stepped | Counters | Failed

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Start | Submit | Abort | Wake | Ask | Close)
_reports = msgspec.msgpack.Decoder(Ready | Stepped | Counters | Failed)


def encode(message: Command | Report) -> bytes:
    """As bytes."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Raises ParallelError for what is no command."""
    try:
        return _commands.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ParallelError(f"the front end sent {len(data)} bytes that are no command: {error}") from error


def decode_report(data: bytes) -> Report:
    """Raises ParallelError for what is no report."""
    try:
        return _reports.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ParallelError(f"a rank sent {len(data)} bytes that are no report: {error}") from error


def pack_tokens(tokens: Int64Array) -> bytes:
    """Token ids, 4 bytes each, little endian."""
    return tokens.astype("<u4").tobytes()


def unpack_tokens(data: bytes) -> Int64Array:
    """Raises ParallelError for half a token."""
    if len(data) % 4:
        raise ParallelError(f"{len(data)} bytes are no whole number of tokens")
    return np.frombuffer(data, "<u4").astype(np.int64)
