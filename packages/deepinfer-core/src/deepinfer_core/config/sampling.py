"""`SamplingParams`: how one request is sampled; `StructuredOutput`: the form its answer must have.

Names and defaults are vLLM's; those of the original DeepInfer (`seq_seed`, `top_logprobs`, `so_args`) are accepted
beside them. What each number does to the logits, and in which order, is written in
`deepinfer_core.sampling.processors`.

    SamplingParams(temperature=0.6, top_p=0.95, max_tokens=256, seed=7)
    SamplingParams(structured=StructuredOutput(json={"type": "object"}), logprobs=3)

Both are frozen and checked when they are made: a value out of range is a `RequestError` that names the value and the
limit. What depends on the model (token ids, the context length) is checked by `SamplingParams.check_vocabulary` and by
the engine.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from types import MappingProxyType
from typing import Any, Literal, cast

from deepinfer_core.config.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_integers,
    check_number,
    shown,
)
from deepinfer_core.errors import RequestError

__all__ = ["GREEDY_BELOW", "LogprobsMode", "SamplingParams", "StructuredOutput"]

LogprobsMode = Literal["raw", "processed"]

# Temperatures below this are greedy, as in vLLM: dividing by them would leave only the largest logit, or overflow.
GREEDY_BELOW = 1e-5

_MAX_TOKEN_ID = 2**31 - 1
_MAX_N = 1_024
_MAX_TOKENS = 2**24
_MAX_LOGPROBS = 1_024
_MAX_STOP_STRINGS = 64
_MAX_STOP_CHARS = 1_024
_MAX_STOP_TOKEN_IDS = 1_024
_MAX_LOGIT_BIAS = 1_024
_MAX_TRIGGER_TOKENS = 64
_MAX_GRAMMAR_CHARS = 1 << 20
_MAX_CHOICES = 4_096
_MAX_SCHEMA_DEPTH = 100

_SO_ARGS_KEYS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")
_SO_ARGS_TYPES = MappingProxyType({
    "json": "json",
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "lark": "grammar",
    "choice": "choice",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of an answer: exactly one of `json`, `json_object`, `regex`, `grammar`, `choice`.

    json: a JSON Schema as a mapping, a boolean schema or JSON text; kept as compact JSON text.
    json_object: any JSON object.
    regex: a regular expression that the whole answer matches.
    grammar: EBNF, GBNF or Lark.
    choice: the answer is one of these strings.
    after: the grammar starts after this sequence of token ids (the end of thinking, say); text before it is free.
    until: a token id that ends the constrained part, free text follows; None = the constraint holds to the end.

    Raises RequestError. Whether a schema can be compiled and enforced is decided before any work, by `structured/`.
    """

    json: Mapping[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    after: Sequence[int] | None = None
    until: int | None = None

    def __post_init__(self) -> None:
        check_flag("json_object", self.json_object, RequestError)
        given = [name for name in ("json", "regex", "grammar", "choice") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise RequestError(
                f"structured output has {' and '.join(given) if given else 'no constraint'}; give exactly one of json, "
                "json_object, regex, grammar, choice"
            )
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(f"structured.{name}", getattr(self, name), _MAX_GRAMMAR_CHARS)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(
                self, "choice", _strings("structured.choice", self.choice, _MAX_CHOICES, _MAX_GRAMMAR_CHARS)
            )
            if not self.choice:
                raise RequestError("structured.choice is empty; give at least one string")
        if self.after is not None:
            after = check_integers("structured.after", self.after, 0, _MAX_TOKEN_ID, _MAX_TRIGGER_TOKENS, RequestError)
            object.__setattr__(self, "after", after or None)
        if self.until is not None:
            object.__setattr__(
                self, "until", check_integer("structured.until", self.until, 0, _MAX_TOKEN_ID, RequestError)
            )

    @classmethod
    def from_so_args(cls, so_args: Mapping[str, Any]) -> StructuredOutput:
        """From the original's `{"schema_type", "schema", "trigger_token_ids"?, "bound_token_id"?}`."""
        if not isinstance(so_args, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- comes from the user
            raise RequestError(
                f"so_args is {shown(so_args)}; it must be a mapping with the keys schema_type and schema"
            )
        unknown = [key for key in so_args if key not in _SO_ARGS_KEYS]
        if unknown:
            raise RequestError(f"so_args has the unknown key {shown(unknown[0])}; known are {', '.join(_SO_ARGS_KEYS)}")
        kind = check_choice("so_args.schema_type", so_args.get("schema_type"), tuple(_SO_ARGS_TYPES), RequestError)
        # A schema beside json_object is one to follow.
        name = "json" if kind == "json_object" and so_args.get("schema") else _SO_ARGS_TYPES[kind]
        if name != "json_object" and so_args.get("schema") is None:
            raise RequestError(f"so_args has the schema_type {kind!r} but no schema; give it under the key 'schema'")
        form: dict[str, Any] = {name: True if name == "json_object" else so_args["schema"]}
        return cls(**form, after=so_args.get("trigger_token_ids"), until=so_args.get("bound_token_id"))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn, when it ends, and what is reported. Raises RequestError for a bad value.

    n: answers a prompt, 1..1,024; answer i > 0 draws with its own seed, derived from `seed` and i.
    temperature: 0 (or below 1e-5) takes the most likely token; at most 100.
    top_p in (0, 1], top_k (0 or -1 = off), min_p in [0, 1]: which tokens may be drawn.
    repetition_penalty in (0, 100] on prompt and output; presence_penalty, frequency_penalty in [-2, 2] on the output.
    logit_bias: token id -> number in [-100, 100] added to its logit, at most 1,024 ids.
    seed: any signed or unsigned 64-bit integer, taken modulo 2**64; None = drawn by the engine; always reported.
    max_tokens: at least 1; None = as far as the context reaches. min_tokens: no end token before so many.
    stop: up to 64 strings that end the answer; the one that did is cut off unless `include_stop_str_in_output`.
    stop_token_ids: token ids that end the answer, beside the end-of-sentence token unless `ignore_eos`.
    logprobs: None = none; k = log-probability of the drawn token and of the k most likely (0 = of the drawn one only).
    logprobs_mode: "raw" = of the model's logits, "processed" = of those drawn from; None = as the engine's setting.
    prompt_logprobs: the same for the prompt (True = 1); it then runs through all layers and takes no prefix hit.
    structured: the form that the answer must have.
    detokenize: False leaves `text` empty. skip_special_tokens: special tokens are left out of `text`.

    Of the original: `seq_seed` = seed, `top_logprobs` = logprobs, `so_args` = structured; two that disagree: an error.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None
    prompt_logprobs: int | bool | None = None
    structured: StructuredOutput | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    seq_seed: InitVar[int | None] = None
    top_logprobs: InitVar[int | None] = None
    so_args: InitVar[Mapping[str, Any] | None] = None

    def __post_init__(self, seq_seed: int | None, top_logprobs: int | None, so_args: Mapping[str, Any] | None) -> None:
        self._check_distribution()
        self._check_limits()
        self._check_logprobs(top_logprobs)
        self._set("seed", _merged("seed", _seed("seed", self.seed), "seq_seed", _seed("seq_seed", seq_seed)))
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):  # pyright: ignore[reportUnnecessaryIsInstance] -- comes from the user
            raise RequestError(f"structured is {shown(self.structured)}; it must be a StructuredOutput")
        other = None if so_args is None else StructuredOutput.from_so_args(so_args)
        self._set("structured", _merged("structured", self.structured, "so_args", other))
        if self.structured is not None and self.min_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} beside structured output; the grammar alone decides when an answer "
                "may end: leave min_tokens out"
            )

    # ---- what the rest of the engine asks -------------------------------------------------------------------------

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, with no randomness."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return cast("tuple[str, ...]", self.stop or ())

    @property
    def num_prompt_logprobs(self) -> int | None:
        """`prompt_logprobs` as a number; None = not wanted."""
        return cast("int | None", self.prompt_logprobs)

    def check_vocabulary(self, num_tokens: int) -> None:
        """Raise RequestError for a token id that is not below `num_tokens`, the size of the tokenizer."""
        ids = {"stop_token_ids": self.stop_token_ids or (), "logit_bias": self.logit_bias or ()}
        if self.structured is not None:
            until = () if self.structured.until is None else (self.structured.until,)
            ids |= {"structured.after": self.structured.after or (), "structured.until": until}
        for name, values in ids.items():
            for value in values:
                if value >= num_tokens:
                    raise RequestError(
                        f"{name} has the token id {value}; ids of this model go from 0 to {num_tokens - 1}"
                    )

    # ---- checks ---------------------------------------------------------------------------------------------------

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_distribution(self) -> None:
        self._set("n", check_integer("n", self.n, 1, _MAX_N, RequestError))
        self._set("temperature", check_number("temperature", self.temperature, 0.0, 100.0, RequestError))
        self._set("top_p", check_number("top_p", self.top_p, 0.0, 1.0, RequestError, above_low=True))
        self._set("top_k", max(0, check_integer("top_k", self.top_k, -1, _MAX_TOKEN_ID, RequestError)))
        self._set("min_p", check_number("min_p", self.min_p, 0.0, 1.0, RequestError))
        repetition = check_number(
            "repetition_penalty", self.repetition_penalty, 0.0, 100.0, RequestError, above_low=True
        )
        self._set("repetition_penalty", repetition)
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, check_number(name, getattr(self, name), -2.0, 2.0, RequestError))
        self._set("logit_bias", _logit_bias(self.logit_bias))

    def _check_limits(self) -> None:
        if self.max_tokens is not None:
            self._set("max_tokens", check_integer("max_tokens", self.max_tokens, 1, _MAX_TOKENS, RequestError))
        most = _MAX_TOKENS if self.max_tokens is None else self.max_tokens
        self._set("min_tokens", check_integer("min_tokens", self.min_tokens, 0, most, RequestError))
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self._set("stop", () if stop is None else _strings("stop", stop, _MAX_STOP_STRINGS, _MAX_STOP_CHARS))
        given = () if self.stop_token_ids is None else self.stop_token_ids
        ids = check_integers("stop_token_ids", given, 0, _MAX_TOKEN_ID, _MAX_STOP_TOKEN_IDS, RequestError)
        self._set("stop_token_ids", tuple(dict.fromkeys(ids)))
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            check_flag(name, getattr(self, name), RequestError)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need the text; drop stop or leave detokenize=True")

    def _check_logprobs(self, top_logprobs: int | None) -> None:
        if self.logprobs_mode is not None:
            check_choice("logprobs_mode", self.logprobs_mode, ("raw", "processed"), RequestError)
        ours, theirs = _count("logprobs", self.logprobs), _count("top_logprobs", top_logprobs)
        self._set("logprobs", _merged("logprobs", ours, "top_logprobs", theirs))
        prompt = self.prompt_logprobs
        if isinstance(prompt, bool):
            prompt = 1 if prompt else None
        self._set("prompt_logprobs", _count("prompt_logprobs", prompt))


def _count(name: str, value: int | None) -> int | None:
    return None if value is None else check_integer(name, value, 0, _MAX_LOGPROBS, RequestError)


def _seed(name: str, value: int | None) -> int | None:
    return None if value is None else check_integer(name, value, -(2**63), 2**64 - 1, RequestError) % 2**64


def _merged(name: str, value: Any, alias: str, other: Any) -> Any:
    if value is not None and other is not None and value != other:
        raise RequestError(
            f"{name} is {shown(value)} and {alias} is {shown(other)}; they mean the same, give one of them"
        )
    return other if value is None else value


def _logit_bias(bias: Mapping[int, float] | None) -> Mapping[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- comes from the user
        raise RequestError(f"logit_bias is {shown(bias)}; it must map token ids to numbers")
    if len(bias) > _MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(bias)} entries; at most {_MAX_LOGIT_BIAS} are allowed")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        # JSON has no integer keys: "17" means the id 17, as in the OpenAI API.
        is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token = check_integer("logit_bias key", int(key) if is_text else key, 0, _MAX_TOKEN_ID, RequestError)
        checked[token] = check_number(f"logit_bias[{token}]", value, -100.0, 100.0, RequestError)
    return checked or None


def _check_text(name: str, value: Any, max_chars: int) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} is {shown(value)}; it must be a string that is not empty")
    if len(value) > max_chars:
        raise RequestError(f"{name} has {len(value)} characters; at most {max_chars} are allowed")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} has a lone surrogate at character {error.start}; no token can spell it, take it out"
        ) from error


def _strings(name: str, values: Any, max_count: int, max_chars: int) -> tuple[str, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise RequestError(f"{name} is {shown(values)}; it must be a list of strings")
    texts = tuple(cast("Sequence[str]", values))
    if len(texts) > max_count:
        raise RequestError(f"{name} has {len(texts)} strings; at most {max_count} are allowed")
    for i, text in enumerate(texts):
        _check_text(f"{name}[{i}]", text, max_chars)
    return texts


def _schema_text(schema: Any) -> str:
    """A JSON Schema as compact JSON text. Key order is kept: it is the order in which properties are written."""
    if isinstance(schema, str):
        _check_text("structured.json", schema, _MAX_GRAMMAR_CHARS)
        try:
            schema = json_module.loads(schema)
        except RecursionError as error:
            raise _too_deep() from error
        except ValueError as error:
            raise RequestError(f"structured.json is not valid JSON ({error}); give a JSON Schema") from error
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"structured.json is {shown(schema)}; a JSON Schema is an object or a boolean")
    _check_depth(schema)
    try:
        text = json_module.dumps(_plain(schema), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"structured.json cannot be written as JSON ({error}); give a JSON Schema") from error
    _check_text("structured.json", text, _MAX_GRAMMAR_CHARS)
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    return value


def _children(value: Any) -> list[Any]:
    items: Any = cast("Mapping[Any, Any]", value).values() if isinstance(value, Mapping) else value
    return [item for item in cast("Iterable[Any]", items) if isinstance(item, (Mapping, list, tuple))]


def _check_depth(schema: Any) -> None:
    level: list[Any] = _children([schema])
    for _ in range(_MAX_SCHEMA_DEPTH):
        level = [item for value in level for item in _children(value)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RequestError:
    return RequestError(f"structured.json nests deeper than {_MAX_SCHEMA_DEPTH} levels; flatten it or use $ref")
