"""What a converted request is: a conversation, what the engine needs, and how to read the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from deepseek_recipe.checks import clipped, require_instance, require_int_in, require_str, shown
from deepseek_recipe.conversation import Conversation
from deepseek_recipe.enums import ModelVersion
from deepseek_recipe.errors import AnswerError, ConversionError, openai_error_body
from deepseek_recipe.json_text import loads
from deepseek_recipe.requests.echo import ReplySettings
from deepseek_recipe.schema.limits import DEFAULT_TIME_LIMIT_S, TimeLimit
from deepseek_recipe.streaming.options import ParsingOptions

if TYPE_CHECKING:
    from deepseek_recipe.schema.grammar import Grammar
    from deepseek_recipe.tokenizer import Tokenizer

__all__ = ["ConversationRequest", "InferenceOptions", "OutputConstraint"]

_U32_MAX = 2**32 - 1
_DEFAULT_TOKENS, _DEFAULT_TOKENS_THINKING, _DEFAULT_TOKENS_MAX_EFFORT = 8_192, 65_536, 131_072


class OutputConstraint(msgspec.Struct, frozen=True):
    """What the output must look like, for an engine that can enforce it.

    `schema` is, by `kind`: json: a compact JSON Schema, or "" for any JSON object; regex: the expression; tool_call and
    tool_call_required: a compact JSON array of the tools. With `after_thinking` the constraint begins behind the end of
    the reasoning. `grammar()` compiles it; `check` and `check_call` look at finished output.
    """

    kind: Literal["json", "regex", "tool_call", "tool_call_required"]
    schema: str
    after_thinking: bool = False
    model_version: ModelVersion = ModelVersion.DeepseekV41Flash
    parallel_tool_calls: bool = True

    def grammar(self, tokenizer: Tokenizer | None = None) -> Grammar:
        """The constraint as a grammar description; with a tokenizer, DSML markers are its token ids.

        `SchemaError` (a ValueError) names what cannot be enforced.
        """
        from deepseek_recipe.schema.grammar import compile_constraint

        return compile_constraint(self, tokenizer)

    def check(self, text: str, *, time_limit_s: float = DEFAULT_TIME_LIMIT_S) -> None:
        """Refuses an answer of kind json or regex that does not fit, for engines that cannot enforce a grammar.

        Raises: AnswerError names the place and the rule; SchemaError for what cannot be checked, and when it takes
        longer than `time_limit_s`; TypeError for a constraint on calls (`check_call`).
        """
        from deepseek_recipe.schema.answers import check_json_answer, check_regex_answer

        require_str("text", text)
        if self.kind == "json":
            schema = loads(self.schema) if self.schema else {"type": "object"}
            check_json_answer(text, schema, TimeLimit(time_limit_s))
        elif self.kind == "regex":
            check_regex_answer(text, self.schema, TimeLimit(time_limit_s))
        else:
            raise TypeError("this constraint is on calls: use check_call for each")

    def check_call(self, name: str, arguments: str, *, time_limit_s: float = DEFAULT_TIME_LIMIT_S) -> None:
        """Refuses a call of a tool that was not declared, or with arguments that do not fit. Raises as `check`."""
        from deepseek_recipe.schema.answers import check_json_answer

        require_str("name", name)
        require_str("arguments", arguments)
        if self.kind not in ("tool_call", "tool_call_required"):
            raise TypeError("this constraint is on the text of the answer: use check")
        parameters = {entry["function"]["name"]: entry["function"]["parameters"] for entry in loads(self.schema)}
        if name not in parameters:
            raise AnswerError(f"no tool is named {shown(name)}; the tools are {clipped(', '.join(parameters))}")
        check_json_answer(arguments, {"type": "object", **parameters[name]}, TimeLimit(time_limit_s))


class InferenceOptions(msgspec.Struct, frozen=True):
    """What the engine is asked for. The fields behind `output_constraint` are set by the extended dialect only."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    seed: int | None = None
    output_constraint: OutputConstraint | None = None
    n: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    parallel_tool_calls: bool | None = None


class ConversationRequest:
    """A request as an engine sees it. Built directly it has no inference options and default parsing options."""

    def __init__(self, conversation: Conversation, model_version: ModelVersion) -> None:
        require_instance("conversation", conversation, Conversation)
        require_instance("model_version", model_version, ModelVersion)
        self._settle(conversation, model_version, InferenceOptions(), ParsingOptions(), False, False, ReplySettings())

    @classmethod
    def converted(
        cls,
        conversation: Conversation,
        model_version: ModelVersion,
        *,
        inference_options: InferenceOptions,
        parsing_options: ParsingOptions,
        stream: bool,
        include_usage: bool = False,
        reply_settings: ReplySettings | None = None,
        error_body: Callable[[str], str] = openai_error_body,
    ) -> ConversationRequest:
        """A request with everything that a converter knows; `error_body` shapes the errors of `resolve_max_tokens`."""
        request = cls.__new__(cls)
        settings = reply_settings or ReplySettings()
        request._settle(
            conversation, model_version, inference_options, parsing_options, stream, include_usage, settings
        )
        request._error_body = error_body
        return request

    def _settle(
        self,
        conversation: Conversation,
        model_version: ModelVersion,
        inference_options: InferenceOptions,
        parsing_options: ParsingOptions,
        stream: bool,
        include_usage: bool,
        reply_settings: ReplySettings,
    ) -> None:
        self._conversation = conversation
        self._model_version = model_version
        self._inference_options = inference_options
        self._parsing_options = parsing_options
        self._stream = stream
        self._include_usage = include_usage
        self._reply_settings = reply_settings
        self._error_body = openai_error_body

    @property
    def conversation(self) -> Conversation:
        """What the prompt shows."""
        return self._conversation

    @property
    def inference_options(self) -> InferenceOptions:
        """What the engine is asked for."""
        return self._inference_options

    @property
    def parsing_options(self) -> ParsingOptions:
        """How to read the output."""
        return self._parsing_options

    @property
    def model_version(self) -> ModelVersion:
        """Which encoding renders the prompt."""
        return self._model_version

    @property
    def stream(self) -> bool:
        """Whether the client wants events."""
        return self._stream

    @property
    def include_usage(self) -> bool:
        """Whether a Chat stream carries the usage key in every chunk."""
        return self._include_usage

    @property
    def reply_settings(self) -> ReplySettings:
        """What the events of a Responses reply need of the request."""
        return self._reply_settings

    def resolve_max_tokens(self, prompt_tokens: int, context_limit: int) -> int:
        """How many tokens may be generated behind a prompt of `prompt_tokens` ids (images included).

        A requested number must fit; otherwise the default of the mode is lowered to what fits, and at least 1.
        Raises `ConversionError` (400) when the prompt, or the prompt and the requested tokens, exceed `context_limit`.
        """
        require_int_in("prompt_tokens", prompt_tokens, 0, _U32_MAX)
        require_int_in("context_limit", context_limit, 0, _U32_MAX)
        requested = self._inference_options.max_tokens
        total = prompt_tokens + (requested or 0)
        if total > context_limit:
            parts = f"{prompt_tokens} in the messages" + (f", {requested} in the completion" if requested else "")
            message = (
                f"This model's maximum context length is {context_limit} tokens, but {total} were requested ({parts}). "
                "Shorten the messages or ask for fewer tokens."
            )
            raise ConversionError(message, body=self._error_body(message))
        if requested is not None:
            return max(requested, 1)
        return max(min(self._default_max_tokens(), context_limit - prompt_tokens), 1)

    def _default_max_tokens(self) -> int:
        if not self._conversation.thinking_mode:
            return _DEFAULT_TOKENS
        is_max = self._conversation.reasoning_effort == "max"
        return _DEFAULT_TOKENS_MAX_EFFORT if is_max else _DEFAULT_TOKENS_THINKING

    def to_json(self) -> dict[str, Any]:
        """Everything as a JSON value, enums by their names; the form of the test vectors."""
        from deepseek_recipe.conversation_json import conversation_to_json

        inference = {name: getattr(self._inference_options, name) for name in _STRICT_INFERENCE_FIELDS}
        extras = msgspec.structs.asdict(self._inference_options)
        inference.update({k: v for k, v in extras.items() if k not in inference and v is not None})
        constraint = self._inference_options.output_constraint
        inference["output_constraint"] = (
            None if constraint is None else {"kind": constraint.kind, "schema": constraint.schema}
        )
        parsing = self._parsing_options
        stage = parsing.thinking_initial_stage
        return {
            "conversation": conversation_to_json(self._conversation),
            "inference": inference,
            "parsing": {
                "parse_tool_calls": parsing.parse_tool_calls,
                "starts_in_tool_calls": parsing.starts_in_tool_calls,
                "parse_json_output": parsing.parse_json_output,
                "thinking_initial_stage": None if stage is None else stage.name,
                "stop_sequences": list(parsing.stop_sequences),
            },
            "stream": self._stream,
            "model_version": self._model_version.name,
        }


_STRICT_INFERENCE_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "logprobs",
    "top_logprobs",
    "seed",
    "output_constraint",
)
