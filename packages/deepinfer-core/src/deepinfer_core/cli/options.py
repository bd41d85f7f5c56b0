"""Flags made from the dataclasses: every setting of `EngineConfig`, every number of `SamplingParams`.

max_num_seqs: int = 256     ->  --max-num-seqs N          overlap: bool = True      ->  --overlap [0|1]
seed (of the engine)        ->  --engine-seed             since --seed is the request's
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from typing import Any

from deepinfer_core.config.engine import all_settings, parse_text, union_members
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import RequestError

__all__ = ["add_sampling_flags", "add_setting_flags", "sampling_from", "settings_from"]

_RENAMED = {"seed": "engine_seed"}
_UNSET = object()

# Parameters of SamplingParams that a flag cannot say, or that the command decides.
_NO_FLAG = ("structured", "detokenize", "logprobs_mode")


_MEANINGS = {
    "n": "answers to the prompt",
    "temperature": "0 takes the most likely token",
    "top_p": "draw from the most likely tokens that together have this probability",
    "top_k": "draw from so many most likely tokens, 0 = from all",
    "min_p": "draw from tokens at least this times as likely as the most likely one",
    "repetition_penalty": "above 1, tokens of prompt and answer become less likely",
    "presence_penalty": "taken from the logits of tokens that the answer has",
    "frequency_penalty": "the same for each time that it has them",
    "logit_bias": 'added to logits, as JSON: {"token id": number}',
    "seed": "of the draws; without one the engine's seed and the request's number decide",
    "max_tokens": "most tokens of an answer",
    "min_tokens": "no end before so many",
    "stop": "ends the answer and is cut off; may be given several times",
    "stop_token_ids": "ends the answer; may be given several times",
    "ignore_eos": "go on behind the end token",
    "include_stop_str_in_output": "keep the stop text",
    "logprobs": "report the log-probability of each token and of so many most likely ones",
    "prompt_logprobs": "the same for the prompt",
    "skip_special_tokens": "leave special tokens out of the text",
}


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each setting; a flag that is not given leaves the environment or the default in force."""
    _end_usage(parser, "[settings]")
    group = parser.add_argument_group("settings of the engine, with their defaults")
    for setting in all_settings().values():
        group.add_argument(
            _flag(_RENAMED.get(setting.name, setting.name)),
            dest=f"setting_{setting.name}",
            default=_UNSET,
            **_value(setting.annotation),
            help=setting.meaning + _shown(setting.default),
        )


def settings_from(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, typed. Raises ConfigError for a text that is no value of the setting's type."""
    given = {name: getattr(args, f"setting_{name}") for name in all_settings()}
    return {
        name: parse_text(_flag(_RENAMED.get(name, name)), all_settings()[name].annotation, text)
        for name, text in given.items()
        if text is not _UNSET
    }


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each sampling parameter that a command line can say."""
    _end_usage(parser, "[sampling]")
    group = parser.add_argument_group("sampling, with defaults")
    hints = typing.get_type_hints(SamplingParams)
    for spec in dataclasses.fields(SamplingParams):
        if spec.name in _NO_FLAG:
            continue
        value: dict[str, Any] = _value(hints[spec.name])
        if spec.name in ("stop", "stop_token_ids"):
            value = {"action": "append", "metavar": "TEXT" if spec.name == "stop" else "ID"}
        group.add_argument(
            _flag(spec.name), dest=f"sampling_{spec.name}", default=_UNSET if "action" not in value else None, **value,
            help=_MEANINGS[spec.name] + _shown(spec.default),
        )  # fmt: skip


def sampling_from(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, typed, as arguments of SamplingParams."""
    hints = typing.get_type_hints(SamplingParams)
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(SamplingParams):
        given: Any = getattr(args, f"sampling_{spec.name}", _UNSET)
        if given is _UNSET or given is None:
            continue
        if spec.name == "logit_bias":
            values[spec.name] = _json_object("--logit-bias", given)
        elif spec.name == "stop":
            values[spec.name] = given
        elif spec.name == "stop_token_ids":
            values[spec.name] = [parse_text("--stop-token-ids", int, text) for text in given]
        else:
            values[spec.name] = parse_text(_flag(spec.name), _scalar(hints[spec.name]), given)
    return values


def _end_usage(parser: argparse.ArgumentParser, group: str) -> None:
    """Name a group of flags in the usage line: sixty flags would hide the few that matter."""
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} {group}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _value(annotation: Any) -> dict[str, Any]:
    options = union_members(annotation)
    if bool in options and int not in options:
        return {"nargs": "?", "const": "1", "metavar": "0|1"}
    kind = next(option for option in options if option is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        # No argparse choices: the setting itself knows its aliases and refuses the rest with the same error everywhere.
        return {"metavar": "|".join(typing.get_args(kind))}
    return {"metavar": {int: "N", float: "X", str: "TEXT"}.get(kind, "VALUE")}


def _scalar(annotation: Any) -> Any:
    """`int | bool | None` (prompt_logprobs) is a number on the command line."""
    options = union_members(annotation)
    return int | None if bool in options and int in options else annotation


def _shown(default: Any) -> str:
    """A default behind the meaning; what None does is part of the meaning."""
    if default is None:
        return ""
    text = ",".join(f"{item:g}" for item in default) if isinstance(default, tuple) else str(default)
    return f" ({text})"


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not valid JSON ({error}); give an object such as '{{\"17\": -5}}'") from error
    if not isinstance(value, dict):
        raise RequestError(f"{name} is a JSON {type(value).__name__}; give an object such as '{{\"17\": -5}}'")
    return value
