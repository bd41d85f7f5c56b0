"""Replay files: everything that an answer is a function of, and the answer, as JSON.

    {"format": 1, "engine_version", "fingerprint": of the weights, "settings": those that matter,
     "prompt_token_ids", "params", "seed", "answers": [{"seed", "token_ids", "finish_reason"}, ..]}

With `deterministic` the same file gives the same tokens again, on the same backend and dtype. The token
of an answer is the blake2b of the file's bytes, so a file can be checked against it. Files are data: they are
validated and never executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from deepinfer_core.config.checks import check_integer, check_integers, shown
from deepinfer_core.config.sampling import SamplingParams, StructuredOutput
from deepinfer_core.errors import ReplayError

if TYPE_CHECKING:
    from deepinfer_core.outputs.shapes import RequestOutput

__all__ = [
    "Difference",
    "Provenance",
    "ReplayRecord",
    "first_difference",
    "read_replay",
    "replay_bytes",
    "replay_token",
]

_FORMAT = 1
_MAX_FILE_BYTES = 256 << 20
_MAX_TOKENS = 1 << 26
_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Provenance:
    """What gave an answer."""

    engine_version: str
    fingerprint: str  # of the weights
    settings: Mapping[str, str | int | bool]  # those that can change tokens


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """The content of a replay file."""

    provenance: Provenance
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    answers: list[list[int]]  # token ids of each answer


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that two runs don't share; None = the answer had ended there."""

    answer: int
    index: int
    recorded: int | None
    replayed: int | None


def replay_bytes(output: RequestOutput) -> bytes:
    """The file of a finished output, the same bytes every time.

    Raises ReplayError while it runs, and for answers that were aborted or failed: what ended them is not in the file.
    """
    if output.provenance is None or output.sampling_params is None or not output.finished:
        raise ReplayError("only a finished output of an engine can be replayed")
    for one in output.outputs:
        if one.finish_reason in ("abort", "error"):
            raise ReplayError(
                f"answer {one.index} ended with {one.finish_reason!r} after {len(one.token_ids)} tokens; only answers "
                "that came to their own end can be replayed"
            )
    record = {
        "format": _FORMAT,
        "engine_version": output.provenance.engine_version,
        "fingerprint": output.provenance.fingerprint,
        "settings": dict(output.provenance.settings),
        "prompt_token_ids": output.prompt_token_ids,
        "params": params_to_json(output.sampling_params),
        "seed": output.seed,
        "answers": [
            {"seed": one.seed, "token_ids": one.token_ids, "finish_reason": one.finish_reason} for one in output.outputs
        ],
    }
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def replay_token(output: RequestOutput) -> str:
    """32 hex digits that name the content of the replay file."""
    return blake2b(replay_bytes(output), digest_size=16).hexdigest()


def read_replay(path: str | Path) -> ReplayRecord:
    """Read and validate a file. Raises ReplayError that names what is wrong with it."""
    file = Path(path)
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ReplayError(f"{file} has {file.stat().st_size} bytes; a replay file has at most {_MAX_FILE_BYTES}")
        raw = json.loads(file.read_bytes())
    except OSError as error:
        raise ReplayError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ReplayError(f"{file} is not JSON: {error}") from error
    if not isinstance(raw, dict) or "format" not in raw:
        raise ReplayError(f"{file} is not a replay file: it has no format")
    if raw["format"] != _FORMAT:
        writer = shown(cast("dict[str, Any]", raw).get("engine_version", "unknown"))
        raise ReplayError(
            f"{file} has the format {shown(raw['format'])}, written by version {writer} of the engine; this version "
            f"reads format {_FORMAT}: replay it with the one that wrote it"
        )
    try:
        return _record(cast("dict[str, Any]", raw))
    except ReplayError:
        raise
    except KeyError as error:
        raise ReplayError(f"{file} is damaged: it lacks {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ReplayError(f"{file} is damaged: {type(error).__name__} {error}") from error


def first_difference(record: ReplayRecord, output: RequestOutput) -> Difference | None:
    """Where the answers part, None if they are the same."""
    for number, (recorded, answer) in enumerate(zip(record.answers, output.outputs, strict=True)):
        replayed = answer.token_ids
        for index in range(max(len(recorded), len(replayed))):
            pair = (_at(recorded, index), _at(replayed, index))
            if pair[0] != pair[1]:
                return Difference(number, index, *pair)
    return None


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _record(raw: dict[str, Any]) -> ReplayRecord:
    settings = raw["settings"]
    if not isinstance(settings, dict):
        raise ReplayError(f"settings is {shown(settings)}; it must be an object")
    return ReplayRecord(
        Provenance(str(raw["engine_version"]), str(raw["fingerprint"]), cast("dict[str, Any]", settings)),
        list(check_integers("prompt_token_ids", raw["prompt_token_ids"], 0, _MAX_TOKEN_ID, _MAX_TOKENS, ReplayError)),
        params_from_json(raw["params"]),
        check_integer("seed", raw["seed"], 0, 2**64 - 1, ReplayError),
        [
            list(check_integers("token_ids", one["token_ids"], 0, _MAX_TOKEN_ID, _MAX_TOKENS, ReplayError))
            for one in raw["answers"]
        ],
    )


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Fields that differ from their defaults; `stop` and ids as lists."""
    changed: dict[str, Any] = {}
    for spec in fields(SamplingParams):
        value = getattr(params, spec.name)
        if spec.name == "structured" and value is not None:
            value = {one.name: getattr(value, one.name) for one in fields(StructuredOutput)}
            value = {name: one for name, one in value.items() if one is not None and one is not False}
        if value != (() if spec.default is None and value == () else spec.default):
            changed[spec.name] = value
    return changed


def params_from_json(raw: Any) -> SamplingParams:
    values = dict(raw)
    if "structured" in values:
        values["structured"] = StructuredOutput(**values["structured"])
    return SamplingParams(**values)
