"""Chat on top of generation: messages in, a message out, through the protocol codec `deepseek_recipe`.

    body --ChatCompletionRequest.convert--> conversation --encode--> token ids --engine--> chunks
    chunks --StreamProcessor--> Chat Completions events --accumulate--> response {message, reasoning, tool calls, usage}

Needs the package deepseek-recipe of this project (`deepinfer-core[chat]`), imported when the first chat begins. What
the request demands of the answer's form (JSON, a regular expression, tool calls) is enforced by a grammar, not hoped
for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from deepinfer_core.config.checks import shown
from deepinfer_core.config.sampling import SamplingParams, StructuredOutput
from deepinfer_core.errors import ConfigError, RequestError
from deepinfer_core.outputs import Chunk, RequestOutput

__all__ = ["ChatCodec", "ChatOutput", "ChatPrompt"]

MODEL_NAME = "DeepSeek-V4.1-Flash"
# The codec ignores fields that it does not know, as the protocol wants; here they are most likely misspelt.
_FIELDS = frozenset(
    [
        "model",
        "messages",
        "thinking",
        "reasoning_effort",
        "temperature",
        "top_p",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "n",
        "logprobs",
        "top_logprobs",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "top_k",
        "min_p",
        "logit_bias",
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
        "stream_options",
        "user",
    ]
)


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """An answer of the assistant; with n > 1 the first of them.

    response: the whole Chat Completions response. output: what the engine gave; an answer that a stop sequence of the
    request ended has a few tokens more than the message, and the finish_reason "abort".
    """

    response: dict[str, Any]
    output: RequestOutput

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message: content, reasoning_content, tool_calls; can be appended to the conversation."""
        return self.response["choices"][0]["message"]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The message of each of n answers."""
        return [choice["message"] for choice in self.response["choices"]]

    @property
    def content(self) -> str:
        """The text of the answer."""
        return self.message.get("content") or ""

    @property
    def reasoning(self) -> str:
        """What was thought before it; empty without thinking."""
        return self.message.get("reasoning_content") or ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Calls as Chat Completions has them: id, function name, arguments as JSON text."""
        return self.message.get("tool_calls") or []

    @property
    def finish_reason(self) -> str:
        """stop, length, tool_calls .."""
        return self.response["choices"][0]["finish_reason"]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A converted request: what the engine gets, and the codec's state for its answer."""

    token_ids: list[int]
    params: SamplingParams
    has_stops: bool  # stop sequences, which the codec looks for in the message
    processors: tuple[Any, ...]  # a deepseek_recipe.StreamProcessor for each of n choices
    response: Any  # deepseek_recipe.ChatCompletionResponse


class ChatCodec:
    """Encodes conversations for one model and decodes its answers.

    folder: of the checkpoint, for its tokenizer.json. Raises ConfigError where the codec is missing or another one.
    """

    def __init__(self, folder: Path, eos_token_id: int, max_model_len: int) -> None:
        self._recipe = _load_recipe()
        self._tokenizer = self._recipe.Tokenizer.from_file(folder / "tokenizer.json")
        self._eos_token_id, self._max_model_len = eos_token_id, max_model_len
        self._num_requests = 0

    def prepare(self, body: Mapping[str, Any], params: SamplingParams | None = None) -> ChatPrompt:
        """body: a Chat Completions request (dialect "extended"). params: what the body leaves open; the body wins.

        Raises RequestError with the codec's reason.
        """
        recipe = self._recipe
        options = recipe.ConversionOptions(dialect="extended")
        given = SamplingParams(max_tokens=None) if params is None else params
        if not isinstance(given, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance] -- comes from the user
            raise RequestError(f"sampling_params is {shown(given)}; it must be a SamplingParams")
        unknown = sorted(set(body) - _FIELDS)
        if unknown:
            raise RequestError(
                f"the chat request has the unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}"
            )
        # The codec cuts the message at stop strings, so it must know those of `params` too.
        defaults = {"model": MODEL_NAME} | ({"stop": list(given.stop_strings)} if given.stop_strings else {})
        try:
            request = recipe.ChatCompletionRequest(defaults | dict(body))
            converted = request.convert(options)
            encoding = recipe.encoding_for(converted.model_version).with_tokenizer(self._tokenizer)
            token_ids = encoding.encode(converted.conversation)
            num_images = sum(len(message.image_sources) for message in converted.conversation.messages)
            grammar = _grammar_of(converted.inference_options.output_constraint, self._tokenizer)
        except (ValueError, RuntimeError, recipe.ConversionError) as error:
            raise RequestError(f"the chat request cannot be converted: {error}") from error
        if num_images:
            raise RequestError(f"the conversation has images ({num_images}); this version reads text only")
        number, self._num_requests = self._num_requests, self._num_requests + 1
        identity = f"chatcmpl-{number}"
        sampling = self._params(converted, len(token_ids), given, grammar)
        if "logit_bias" in body:  # the codec has no such field
            sampling = replace(sampling, logit_bias=body["logit_bias"])
        seed = number if sampling.seed is None else sampling.seed

        def processor(choice: int) -> Any:
            generator = recipe.ChatCompletionRequest.chunk_generator(
                converted, identity, MODEL_NAME, choice_index=choice
            )
            generator = generator.with_call_ids(_call_ids(token_ids, seed, choice))
            return recipe.StreamProcessor(generator, converted.parsing_options, self._tokenizer)

        return ChatPrompt(
            token_ids,
            sampling,
            bool(converted.parsing_options.stop_sequences),
            tuple(processor(choice) for choice in range(sampling.n)),
            recipe.ChatCompletionResponse(identity, MODEL_NAME, 0, 0, 0),
        )

    def events(self, prompt: ChatPrompt, chunks: Iterable[Chunk]) -> Generator[Any]:
        """Chat Completions chunks, as the engine's chunks come."""
        for chunk in _cut(chunks) if prompt.has_stops else chunks:
            concerned = prompt.processors if chunk.kind == "ready" else (prompt.processors[chunk.index],)
            for processor in concerned:
                if not processor.finished:
                    yield from processor.push(self.to_inference_chunk(chunk))
            if all(processor.finished for processor in prompt.processors):
                return  # stop sequences ended the answers before the engine did

    def collect(self, prompt: ChatPrompt, chunks: Iterable[Chunk], output: RequestOutput) -> ChatOutput:
        """The whole response; `output` is complete when `chunks` has ended."""
        for event in self.events(prompt, chunks):
            prompt.response.accumulate(event)
        return ChatOutput(json.loads(prompt.response.to_json()), output)

    def to_inference_chunk(self, chunk: Chunk) -> Any:
        """A chunk of the engine as `deepseek_recipe.InferenceChunk`, the form that every processor of it takes."""
        recipe = self._recipe
        if chunk.kind == "ready":
            usage = recipe.PromptUsage(prompt_tokens=chunk.prompt_tokens, prompt_cache_hit_tokens=chunk.cached_tokens)
            return recipe.InferenceChunk.ready(prompt_usage=usage, system_fingerprint=chunk.fingerprint)
        if chunk.kind == "text":
            ended = bool(chunk.token_ids) and chunk.token_ids[-1] == self._eos_token_id
            tokens = chunk.token_ids[:-1] if ended else chunk.token_ids  # the end token is no part of the answer
            return recipe.InferenceChunk.tokens(tokens, _logprobs(chunk, len(tokens)))
        if chunk.finish_reason == "error":
            raise RequestError(chunk.error or "the request failed")
        reasons = recipe.InferenceFinishReason
        return recipe.InferenceChunk.finish(reasons.Length if chunk.finish_reason == "length" else reasons.Stop)

    def _params(
        self, converted: Any, prompt_tokens: int, params: SamplingParams, grammar: StructuredOutput | None
    ) -> SamplingParams:
        options = converted.inference_options
        changes: dict[str, Any] = {
            name: value
            for name in (
                "temperature",
                "top_p",
                "seed",
                "n",
                "top_k",
                "min_p",
                "repetition_penalty",
                "frequency_penalty",
                "presence_penalty",
            )
            if (value := getattr(options, name)) is not None
        }
        if options.logprobs:
            changes["logprobs"] = options.top_logprobs or 0
        if params.max_tokens is None or options.max_tokens is not None:
            try:
                changes["max_tokens"] = converted.resolve_max_tokens(prompt_tokens, self._max_model_len)
            except self._recipe.ConversionError as error:
                raise RequestError(f"the chat request cannot run: {error}") from error
        given = params.structured
        if grammar is not None and given is not None:
            raise RequestError(
                "structured is given beside tools or a response_format, which make a grammar, too; drop one"
            )
        if grammar is not None:
            changes["structured"] = grammar
        elif given is not None and given.after is None and _starts_in_reasoning(converted):
            end = self._tokenizer.special_token_id(self._recipe.SpecialToken.ThinkingEnd.default_str())
            changes["structured"] = replace(given, after=[end])  # what is thought before the answer is free
        return replace(params, skip_special_tokens=False, **changes)


def _cut(chunks: Iterable[Chunk]) -> Generator[Chunk]:
    """A chunk a token: usage ends with the token that completes a stop sequence, however many came in its step."""
    for chunk in chunks:
        for i, token in enumerate(chunk.token_ids):
            logprobs = None if chunk.logprobs is None else chunk.logprobs[i : i + 1]
            yield replace(chunk, token_ids=(token,), logprobs=logprobs)
        if not chunk.token_ids:
            yield chunk


def _load_recipe() -> ModuleType:
    try:
        recipe = import_module("deepseek_recipe")
    except ImportError as error:
        raise ConfigError(
            "chat needs the package deepseek-recipe of this project; install deepinfer-core[chat]"
        ) from error
    provider = getattr(recipe, "__provider__", "the official one")
    if provider != "deepinfer":
        raise ConfigError(
            f"the installed deepseek_recipe is {provider}, not this project's; uninstall it and install "
            "deepinfer-core[chat]"
        )
    return recipe


def _starts_in_reasoning(converted: Any) -> bool:
    stage = converted.parsing_options.thinking_initial_stage
    return stage is not None and stage.starts_in_reasoning()


def _grammar_of(constraint: Any, tokenizer: Any) -> StructuredOutput | None:
    """The codec's output constraint in the engine's terms."""
    if constraint is None:
        return None
    grammar = constraint.grammar(tokenizer)
    after: Sequence[int] | None = None
    if grammar.after is not None:
        after = [tokenizer.special_token_id(grammar.after.default_str())]
    field = {"json_schema": "json", "regex": "regex", "lark": "grammar"}[grammar.kind]
    return StructuredOutput(**{field: grammar.text}, after=after)


def _call_ids(token_ids: list[int], seed: int, choice: int) -> Callable[[int], str]:
    """Ids of tool calls: the same conversation, seed and choice give the same ones, a conversation that grew others."""
    own = [seed % 2**63, *token_ids, *([-choice] if choice else [])]
    root = blake2b(np.array(own, np.int64).tobytes(), digest_size=16).digest()
    return lambda index: blake2b(index.to_bytes(8, "little"), key=root, digest_size=12).hexdigest()


def _logprobs(chunk: Chunk, count: int) -> list[Any] | None:
    if chunk.logprobs is None:
        return None
    entries: list[Any] = []
    for token, table in list(zip(chunk.token_ids, chunk.logprobs, strict=True))[:count]:
        entries.append((table[token].logprob, [(other, entry.logprob) for other, entry in table.items()]))
    return entries
