"""Chat Completions requests.

system | developer*   instructions          content: text, or parts joined by a blank line
user                  what the user says    images become a placeholder and an image source
assistant             content, reasoning_content, tool_calls; on the last message `prefix` asks to be continued
tool                  one result for every call of the assistant message before it
latest_reminder       a reminder                                                         (* extended dialect)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepseek_recipe import protocol_data
from deepseek_recipe.checks import clipped, require_instance, shown
from deepseek_recipe.conversation import (
    AssistantMessage,
    Conversation,
    LatestReminderMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from deepseek_recipe.enums import ModelVersion, ThinkingInitialStage
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.images.sources import ImageSource
from deepseek_recipe.requests import wire_chat as wire
from deepseek_recipe.requests.common import (
    Thinking,
    ToolChoice,
    ToolSpec,
    check_format_with_tools,
    check_json_word,
    check_tool_name,
    checked_stop,
    define_tools,
    model_version,
    resolve_choice,
    resolve_max_tokens,
    resolve_temperature,
    resolve_thinking,
    resolve_top_p,
    response_schemas,
    settle_reasoning,
    tools_constraint,
)
from deepseek_recipe.requests.content import ContentBuilder
from deepseek_recipe.requests.extended import extended_inference, merged_max_tokens
from deepseek_recipe.requests.images import data_url_source, image_source
from deepseek_recipe.requests.options import ConversionOptions, Dialect
from deepseek_recipe.requests.protocol_request import ProtocolRequest
from deepseek_recipe.requests.result import ConversationRequest, InferenceOptions, OutputConstraint
from deepseek_recipe.requests.wire import TextPart, as_f32
from deepseek_recipe.schema.limits import TimeLimit
from deepseek_recipe.streaming.options import ParsingOptions
from deepseek_recipe.tokens import SpecialToken

if TYPE_CHECKING:
    from deepseek_recipe.streaming.chat import ChatCompletionChunkGenerator

__all__ = ["ChatCompletionRequest"]

_MAX_TOP_LOGPROBS = 20
_MAX_SEED = 2**63 - 1


class ChatCompletionRequest(ProtocolRequest[wire.ChatBody]):
    """A Chat Completions body.

    Raises ValueError for bad JSON or a bad shape. `dialect="extended"` also parses developer messages and signed seeds.
    """

    def __init__(self, body: bytes | str | dict[str, Any], *, dialect: Dialect = "strict") -> None:
        super().__init__(body, wire.ChatBody, wire.ExtendedChatBody, dialect)

    @property
    def model(self) -> str:
        """The model's name as requested."""
        return self._peek().model

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Conversation, engine options and how to read the output; ConversionError says what cannot be done."""
        return self._consume(options, _convert)

    @staticmethod
    def chunk_generator(
        request: ConversationRequest,
        id: str,  # noqa: A002
        model: str,
        *,
        choice_index: int = 0,
    ) -> ChatCompletionChunkGenerator:
        """The generator of the events that answer a converted request; with `n` > 1, of one of its choices."""
        from deepseek_recipe.streaming.chat import ChatCompletionChunkGenerator

        require_instance("request", request, ConversationRequest)
        stage = request.parsing_options.thinking_initial_stage
        return ChatCompletionChunkGenerator(
            id,
            model,
            request.conversation.thinking_mode,
            reports_null_usage=request.include_usage or not request.stream,
            starts_in_reasoning=stage is not None and stage.starts_in_reasoning(),
            choice_index=choice_index,
        )


def _convert(body: wire.ChatBody, options: ConversionOptions, extended: bool) -> ConversationRequest:
    version = model_version(body.model, options)
    _check_settings(body, extended)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    stop = checked_stop(stop, "stop")
    thinking = resolve_thinking(body.thinking.type if body.thinking else None, body.reasoning_effort, options)
    specs = _tool_specs(body.tools or ())
    messages = _Messages(version, options).convert(body)
    _check_prefix(body)
    choice, specs = resolve_choice(_choice(body.tool_choice), specs, thinking, extended=extended)
    limit = TimeLimit(options.schema_time_limit_s)
    tools = define_tools(specs, limit)
    check_format_with_tools(tools, body.response_format is not None)
    format_settings, constraint = _response_format(body.response_format, messages, thinking, limit)
    tools_active = bool(tools)
    required = choice == "required"
    parallel = not (extended and body.parallel_tool_calls is False)
    if tools_active:
        constraint = tools_constraint(tools, required=required, thinking=thinking, version=version, parallel=parallel)
    field, max_tokens = merged_max_tokens(body) if extended else ("max_tokens", body.max_tokens)
    inference: dict[str, Any] = {
        "max_tokens": resolve_max_tokens(max_tokens, field, thinking, options, clamp=False),
        "temperature": resolve_temperature(body.temperature, thinking),
        "top_p": resolve_top_p(body.top_p, thinking, version, tools_active=tools_active),
        "logprobs": bool(body.logprobs),
        "top_logprobs": body.top_logprobs,
        "seed": body.seed,
        "output_constraint": constraint,
        **(extended_inference(body) if extended else {}),
    }
    starts_in_calls = required and not thinking.is_on
    conversation = Conversation(
        settle_reasoning(
            messages, thinking, options.reasoning_content_behavior, "reasoning_content", declares_tools=bool(body.tools)
        ),
        thinking_mode=thinking.is_on,
        tools=tools,
        tool_choice="auto" if required and not starts_in_calls else choice,  # pyright: ignore[reportArgumentType]
        reasoning_effort=thinking.effort,
        **format_settings,
    )
    parsing = ParsingOptions(
        parse_tool_calls=tools_active,
        starts_in_tool_calls=starts_in_calls,
        parse_json_output=isinstance(body.response_format, wire.JsonObjectFormat),
        thinking_initial_stage=_initial_stage(messages, thinking),
        stop_sequences=stop,
        special_tokens=options.special_tokens,
    )
    return ConversationRequest.converted(
        conversation,
        version,
        inference_options=InferenceOptions(**inference),
        parsing_options=parsing,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _check_settings(body: wire.ChatBody, extended: bool) -> None:
    if not body.messages:
        raise ConversionError("messages: at least one message is needed")
    if body.stream_options is not None and not body.stream:
        raise ConversionError("stream_options: only allowed together with stream: true")
    if body.n is not None and body.n != 1 and not extended:
        raise ConversionError(f"n: {body.n} is not supported; only 1 is")
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(body, name)
        if value is not None and not -2.0 <= as_f32(value) <= 2.0:
            raise ConversionError(f"{name}: {value} is outside the range [-2, 2]")
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise ConversionError("top_logprobs: needs logprobs: true")
        if body.top_logprobs > _MAX_TOP_LOGPROBS:
            raise ConversionError(f"top_logprobs: {body.top_logprobs} is outside the range [0, {_MAX_TOP_LOGPROBS}]")
    if body.seed is not None and body.seed > _MAX_SEED and not extended:
        raise ConversionError(f"seed: {body.seed} is outside the range [0, {_MAX_SEED}]")


def _check_prefix(body: wire.ChatBody) -> None:
    for index, turn in enumerate(body.messages):
        if not isinstance(turn, wire.AssistantTurn) or not turn.prefix:
            continue
        if index != len(body.messages) - 1:
            raise ConversionError(f"messages[{index}].prefix: only the last message can be continued")
        if body.tools or any(isinstance(t, wire.AssistantTurn) and t.tool_calls for t in body.messages):
            raise ConversionError(f"messages[{index}].prefix: cannot be combined with tools or tool calls")
        if isinstance(body.response_format, wire.JsonObjectFormat):
            raise ConversionError(f"messages[{index}].prefix: cannot be combined with the response format json_object")


def _initial_stage(messages: Sequence[Message], thinking: Thinking) -> ThinkingInitialStage | None:
    if not thinking.is_on or not messages or not messages[-1].prefix:
        return thinking.initial_stage
    last = messages[-1]
    if last.content:
        return ThinkingInitialStage.ContentContinuation
    return ThinkingInitialStage.ReasoningContinuation if last.reasoning_content else ThinkingInitialStage.ReasoningStart


def _tool_specs(tools: Sequence[wire.Tool]) -> list[ToolSpec]:
    specs: list[ToolSpec] = []
    for index, tool in enumerate(tools):
        function = tool.function
        path = f"tools[{index}].function.name"
        check_tool_name(function.name, path)
        specs.append(ToolSpec(function.name, function.description, function.parameters, path, function.strict))
    return specs


def _choice(choice: str | wire.NamedChoice | None) -> ToolChoice:
    if isinstance(choice, wire.NamedChoice):
        return ToolChoice("required", choice.function.name, "tool_choice.function.name")
    return ToolChoice(choice or "auto")


def _response_format(
    given: wire.TextFormat | wire.JsonObjectFormat | wire.JsonSchemaFormat | wire.RegexFormat | None,
    messages: Sequence[Message],
    thinking: Thinking,
    limit: TimeLimit,
) -> tuple[dict[str, Any], OutputConstraint | None]:
    """The conversation's format settings and the constraint of the output."""
    if isinstance(given, wire.JsonObjectFormat):
        check_json_word(message.content for message in messages)
        return {"response_format": "json_object"}, OutputConstraint("json", "", thinking.is_on)
    if isinstance(given, wire.JsonSchemaFormat):
        schema = given.json_schema
        path = "response_format.json_schema.schema"
        shown, constraining = response_schemas(schema.schema, schema.strict, path, limit)
        return {"response_schema": shown}, OutputConstraint("json", constraining, thinking.is_on)
    if isinstance(given, wire.RegexFormat):
        return {"response_regex": given.regex}, OutputConstraint("regex", given.regex, thinking.is_on)
    return {}, None


class _Messages:
    """Converts the messages of a body."""

    def __init__(self, version: ModelVersion, options: ConversionOptions) -> None:
        self._shows_images = version is not ModelVersion.DeepseekV4Pro
        self._image = options.special_tokens.token(SpecialToken.Image)

    def convert(self, body: wire.ChatBody) -> list[Message]:
        """The messages of the conversation; results must follow their calls."""
        out: list[Message] = []
        open_ids: set[str] = set()
        for index, turn in enumerate(body.messages):
            path = f".messages[{index}]"  # this leading dot is the official spelling of an image source's path
            if isinstance(turn, wire.ToolTurn):
                if turn.tool_call_id not in open_ids:
                    raise ConversionError(
                        f"{path[1:]}.tool_call_id: {shown(turn.tool_call_id)} answers no open call before it"
                    )
                open_ids.remove(turn.tool_call_id)
            elif open_ids:
                raise ConversionError(
                    f"{path[1:]}: results are missing for the calls {clipped(', '.join(sorted(open_ids)))}"
                )
            message = self._message(turn, path)
            if message.content or not isinstance(message, SystemMessage):  # empty instructions are none
                out.append(message)
            if message.tool_calls:
                open_ids = {call.id for call in message.tool_calls}
                if len(open_ids) != len(message.tool_calls):
                    raise ConversionError(f"{path[1:]}.tool_calls: two calls share an id")
        if open_ids:
            raise ConversionError(f"messages: results are missing for the calls {_listed(open_ids)}")
        return out

    def _message(self, turn: Any, path: str) -> Message:
        if isinstance(turn, wire.AssistantTurn):
            return self._assistant(turn, path)
        if isinstance(turn, wire.ReminderTurn):
            return LatestReminderMessage(turn.content)
        text, sources, placeholders = self._content(turn.content, path)
        if isinstance(turn, wire.UserTurn):
            return UserMessage(text, sources, **placeholders)
        if isinstance(turn, wire.ToolTurn):
            return ToolMessage(text, turn.tool_call_id, sources, **placeholders)
        return SystemMessage(text, sources, None, **placeholders)

    def _assistant(self, turn: wire.AssistantTurn, path: str) -> AssistantMessage:
        if turn.content is None and turn.tool_calls is None:
            raise ConversionError(f"{path}: an assistant message needs content or tool_calls")
        if turn.tool_calls is not None and not turn.tool_calls:
            raise ConversionError(f"{path}.tool_calls: must not be an empty list; leave it out")
        text, sources, _ = self._content(turn.content, path)
        if sources:
            raise ConversionError(f"{path}: images in assistant messages are not supported")
        calls = [ToolCall(c.id, c.function.name, c.function.arguments) for c in turn.tool_calls or ()] or None
        return AssistantMessage(text, turn.reasoning_content, calls, bool(turn.prefix))

    def _content(self, content: str | list[Any] | None, path: str) -> tuple[str, list[ImageSource], dict[str, Any]]:
        """Text, images, and the arguments that say where the placeholders of the images are."""
        if isinstance(content, str):
            return content, [], {}
        out = ContentBuilder(self._image)
        for index, part in enumerate(content or ()):
            if isinstance(part, TextPart):
                out.add_text(part.text)
            elif not self._shows_images:
                out.add_text(protocol_data.IMAGE_UNSUPPORTED_PLACEHOLDER)
            elif isinstance(part, wire.ImageUrlPart):
                out.add_image(image_source(part.image_url.url, part.image_url.detail, path))
            else:
                out.add_image(_file_source(part, path, f"{path}.content[{index}]"))
        return out.text, out.sources, out.placeholders


def _listed(ids: set[str]) -> str:
    return clipped(", ".join(sorted(ids)))


def _file_source(part: wire.FilePart, path: str, part_path: str) -> ImageSource:
    if part.file_id is not None:
        hint = "files are not stored here; send the image as a base64 data URL in file_data"
        raise ConversionError(f"{part_path}.file_id: {hint}")
    if part.file_data is None:
        raise ConversionError(f"{part_path}: a file needs file_data, a base64 data URL of an image")
    return data_url_source(part.file_data, None, path)
