"""Workloads: when requests come and how long they are, from a JSONL file or made up.

    {"arrival_s": 0.25, "prompt": "The sea", "output_tokens": 40}
    {"arrival_s": 0.30, "document": 7, "prompt_tokens": 900, "output_tokens": 80, "params": {"temperature": 0.6}}

A line has "prompt", "prompt_token_ids", or "prompt_tokens": then the prompt is the beginning of a made-up document, and
lines with the same "document" share their beginnings, as the turns of a conversation do. "output_tokens" is exact: the
end token is ignored. Without it the answer ends where the model ends it, or after `max_tokens` of "params".

    chat     conversations of a few turns with pauses between them; each turn sends all earlier ones again
    agent    one long shared beginning (system prompt, tools), many quick turns that add tool results
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from deepinfer_core.cli.results import write_text
from deepinfer_core.config.checks import check_integer, check_integers, check_number, shown
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import RequestError

__all__ = ["MADE_UP", "Arrival", "made_up", "read_workload", "write_workload"]

MADE_UP = ("chat", "agent")
_KEYS = frozenset({"arrival_s", "prompt", "prompt_token_ids", "prompt_tokens", "document", "output_tokens", "params"})
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_tokens")
_MAX_LINES = 1_000_000
_MAX_TOKENS = 2**24
_FIRST_TEXT_ID = 200  # below lie special tokens and single bytes


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    arrival_s: float
    prompt: str | tuple[int, ...] | None = None  # None: `prompt_tokens` of `document`
    prompt_tokens: int = 0
    document: int = 0
    output_tokens: int | None = None
    params: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))

    def prompt_for(self, num_token_ids: int) -> str | list[int]:
        """The prompt for a tokenizer with so many ids."""
        if self.prompt is not None:
            return self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        rng = random.Random(self.document)
        first = min(_FIRST_TEXT_ID, num_token_ids - 1)
        return [rng.randrange(first, num_token_ids) for _ in range(self.prompt_tokens)]

    def sampling_params(self, seed: int) -> SamplingParams:
        """Its parameters; `seed` where the line has none."""
        values: dict[str, Any] = {"seed": seed}
        if self.output_tokens is not None:
            values |= {"max_tokens": self.output_tokens, "ignore_eos": True}
        return SamplingParams(**values | dict(self.params))


def read_workload(path: Path) -> list[Arrival]:
    """The requests of a file, by arrival. Raises RequestError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start})") from error
    if len(lines) > _MAX_LINES:
        raise RequestError(f"{path} has {len(lines)} lines; a workload has at most {_MAX_LINES}")
    found: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_arrival(line))
            except RequestError as error:
                error.add_note(f"in line {number} of {path}")
                raise
    if not found:
        raise RequestError(f"{path} has no request")
    return sorted(found, key=lambda one: one.arrival_s)


def write_workload(path: Path, workload: Iterable[Arrival]) -> None:
    """Write what `read_workload` reads."""
    lines: list[str] = []
    for one in workload:
        line: dict[str, Any] = {"arrival_s": one.arrival_s}
        if one.prompt is None:
            line |= {"document": one.document, "prompt_tokens": one.prompt_tokens}
        else:
            line["prompt" if isinstance(one.prompt, str) else "prompt_token_ids"] = one.prompt
        if one.output_tokens is not None:
            line["output_tokens"] = one.output_tokens
        lines.append(json.dumps(line | ({"params": dict(one.params)} if one.params else {})) + "\n")
    write_text(path, "".join(lines))


def made_up(kind: str, num_requests: int, requests_per_s: float, most_tokens: int, seed: int = 0) -> list[Arrival]:
    """A workload of `MADE_UP`; conversations begin at random. No request exceeds `most_tokens`, answer included."""
    rng = random.Random(seed)
    start_tokens, turn_tokens, answer_tokens, num_turns, pause_s = (
        (30, (10, 120), (20, 150), 4, 2.0) if kind == "chat" else (1000, (40, 300), (10, 60), 10, 0.2)
    )
    found: list[Arrival] = []
    start_s, conversation = 0.0, 0
    while len(found) < num_requests:
        start_s += rng.expovariate(requests_per_s / num_turns)
        # Agents of one team share system prompt and tools; here even their turns, as those of a retry do.
        document = conversation if kind == "chat" else conversation // 4
        prompt_tokens, arrival_s = start_tokens, start_s
        for _ in range(num_turns):
            output_tokens = rng.randint(*answer_tokens)
            prompt_tokens += rng.randint(*turn_tokens)
            if prompt_tokens + output_tokens > most_tokens or len(found) == num_requests:
                break
            found.append(Arrival(arrival_s, None, prompt_tokens, document, output_tokens))
            prompt_tokens += output_tokens
            arrival_s += rng.expovariate(1 / pause_s)
        conversation += 1
    return sorted(found, key=lambda one: one.arrival_s)


def _arrival(line: str) -> Arrival:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not valid JSON ({error})") from error
    if not isinstance(value, dict) or not _KEYS.issuperset(cast("dict[str, Any]", value)):
        raise RequestError(f"the line is {shown(value)}; give an object with keys among {', '.join(sorted(_KEYS))}")
    raw = cast("dict[str, Any]", value)
    if sum(key in raw for key in _PROMPT_KEYS) != 1:
        raise RequestError(f"the line has the keys {', '.join(raw)}; give one of {', '.join(_PROMPT_KEYS)}")
    output = raw.get("output_tokens")
    return Arrival(
        check_number("arrival_s", raw.get("arrival_s", 0.0), 0.0, 1e9, RequestError),
        _prompt(raw),
        check_integer("prompt_tokens", raw.get("prompt_tokens", 1), 1, _MAX_TOKENS, RequestError),
        check_integer("document", raw.get("document", 0), 0, 2**63 - 1, RequestError),
        None if output is None else check_integer("output_tokens", output, 1, _MAX_TOKENS, RequestError),
        _params(raw.get("params", {})),
    )


def _prompt(raw: Mapping[str, Any]) -> str | tuple[int, ...] | None:
    if "prompt" in raw:
        if not isinstance(raw["prompt"], str) or not raw["prompt"]:
            raise RequestError(f"prompt is {shown(raw['prompt'])}; give a text that is not empty")
        return raw["prompt"]
    if "prompt_token_ids" in raw:
        ids = check_integers("prompt_token_ids", raw["prompt_token_ids"], 0, 2**31 - 1, _MAX_TOKENS, RequestError)
        return tuple(ids)
    return None


def _params(raw: Any) -> Mapping[str, Any]:
    known = {spec.name for spec in dataclasses.fields(SamplingParams)} - {"structured"}
    if not isinstance(raw, dict) or not known.issuperset(cast("dict[str, Any]", raw)):
        raise RequestError(f"params is {shown(raw)}; give an object with keys among {', '.join(sorted(known))}")
    params = cast("dict[str, Any]", raw)
    SamplingParams(**params)  # refuses what is out of range before anything is loaded
    return MappingProxyType(params)
