"""Responses requests.

instructions                      the first system message
message                           user, assistant, system (developer is system)
reasoning, assistant messages,    one assistant message, as long as they come in this order
  calls of any kind
outputs of the calls              tool messages in the order of the calls, directly behind them
tools found by a search           a system message that makes them known, behind the outputs
anything else                     skipped
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from deepseek_recipe.checks import require_instance
from deepseek_recipe.conversation import Conversation, Message, SystemMessage, UserMessage
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.requests import wire_responses as wire
from deepseek_recipe.requests.common import (
    Thinking,
    ToolChoice,
    check_format_with_tools,
    check_json_word,
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
from deepseek_recipe.requests.echo import ResponsesEcho, echo_of, reply_settings
from deepseek_recipe.requests.extended import extended_inference
from deepseek_recipe.requests.options import ConversionOptions, Dialect
from deepseek_recipe.requests.protocol_request import ProtocolRequest
from deepseek_recipe.requests.responses_items import ItemConverter
from deepseek_recipe.requests.responses_tools import ToolReader
from deepseek_recipe.requests.result import ConversationRequest, InferenceOptions, OutputConstraint
from deepseek_recipe.schema.limits import TimeLimit
from deepseek_recipe.streaming.options import ParsingOptions

if TYPE_CHECKING:
    from deepseek_recipe.streaming.responses import ResponsesChunkGenerator

__all__ = ["ResponsesRequest"]

_MAX_TOP_LOGPROBS = 20


class ParsedBody(msgspec.Struct):
    """A body whose items and tools are read too; None stands for those of unknown type."""

    fields: wire.ResponsesBody
    items: list[wire.Item | None]
    tools: list[wire.Tool | None]


class ResponsesRequest(ProtocolRequest[wire.ResponsesBody]):
    """A Responses body.

    Raises ValueError for bad JSON or a bad shape.
    """

    def __init__(self, body: bytes | str | dict[str, Any], *, dialect: Dialect = "strict") -> None:
        super().__init__(body, wire.ResponsesBody, wire.ResponsesBody, dialect)
        fields = self._peek()
        given = fields.input if isinstance(fields.input, list) else ()
        self._parsed = ParsedBody(
            fields,
            [wire.parse_item(item, f"input[{index}]") for index, item in enumerate(given)],
            [wire.parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools or ())],
        )
        for index, item in enumerate(self._parsed.items):
            if isinstance(item, wire.ToolSearchOutputItem):
                item.tools = [wire.parse_tool(t, f"input[{index}].tools[{i}]") for i, t in enumerate(item.tools)]

    @property
    def model(self) -> str:
        """The model's name as requested."""
        return self._peek().model

    def namespace_tool_map(self, options: ConversionOptions) -> dict[str, tuple[str, str]]:
        """Full name → (namespace, local name) of the declared tools inside namespaces. Call it before `convert`."""
        reader = ToolReader(model_version(self._peek().model, options), options, self._parsed.tools)
        named = (wire.FunctionTool, wire.NamespaceTool)
        reader.specs([tool if isinstance(tool, named) else None for tool in self._parsed.tools], "tools")
        return reader.locals_by_name

    def echo(self) -> ResponsesEcho:
        """What a response repeats of its request. Call it before `convert`."""
        self._peek()
        return echo_of(self._parsed.fields, self._parsed.tools)

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Conversation, engine options and how to read the output; ConversionError says what cannot be done."""
        return self._consume(options, lambda _, options, extended: _convert(self._parsed, options, extended))

    @staticmethod
    def chunk_generator(request: ConversationRequest, id: str, model: str) -> ResponsesChunkGenerator:  # noqa: A002
        """The generator of the events that answer a converted request."""
        from deepseek_recipe.streaming.responses import ResponsesChunkGenerator

        require_instance("request", request, ConversationRequest)
        settings = request.reply_settings
        generator = ResponsesChunkGenerator(
            id,
            model,
            request.conversation.thinking_mode,
            custom_tools=settings.custom_tools,
            searches_tools=settings.searches_tools,
        )
        return generator.with_namespace_tool_map(settings.namespaces).with_echo(settings.echo)


def _convert(parsed: ParsedBody, options: ConversionOptions, extended: bool) -> ConversationRequest:
    body = parsed.fields
    version = model_version(body.model, options)
    if body.top_logprobs is not None and body.top_logprobs > _MAX_TOP_LOGPROBS:
        raise ConversionError(f"top_logprobs: {body.top_logprobs} is outside the range [0, {_MAX_TOP_LOGPROBS}]")
    thinking = resolve_thinking(None, body.reasoning.effort if body.reasoning else None, options)
    reader = ToolReader(version, options, parsed.tools)
    specs = reader.specs(parsed.tools, "tools")
    namespaces = dict(reader.locals_by_name)
    items = ItemConverter(reader, options)
    messages = _messages(parsed, items)
    specs.extend(items.found_specs)
    declares_tools = bool(specs)
    mode, specs = resolve_choice(_choice(body.tool_choice), specs, thinking, extended=extended)
    limit = TimeLimit(options.schema_time_limit_s)
    tools = define_tools(specs, limit)
    check_format_with_tools(tools, body.text is not None and not isinstance(body.text.format, wire.TextFormat))
    items.settle_found(messages, {tool.name: tool for tool in tools})
    format_settings, constraint = _text_format(body.text, messages, thinking, limit)
    required = mode == "required"
    if tools:
        parallel = not (extended and body.parallel_tool_calls is False)
        constraint = tools_constraint(tools, required=required, thinking=thinking, version=version, parallel=parallel)
    inference: dict[str, Any] = {
        "max_tokens": resolve_max_tokens(body.max_output_tokens, "max_output_tokens", thinking, options, clamp=False),
        "temperature": resolve_temperature(body.temperature, thinking),
        "top_p": resolve_top_p(body.top_p, thinking, version, tools_active=bool(tools)),
        "logprobs": body.top_logprobs is not None,
        "top_logprobs": body.top_logprobs,
        "output_constraint": constraint,
        **(extended_inference(body) if extended else {}),
    }
    starts_in_calls = required and not thinking.is_on
    conversation = Conversation(
        settle_reasoning(
            messages, thinking, options.reasoning_content_behavior, "reasoning item", declares_tools=declares_tools
        ),
        thinking_mode=thinking.is_on,
        tools=tools,
        tool_choice="auto" if required and not starts_in_calls else mode,  # pyright: ignore[reportArgumentType]
        reasoning_effort=thinking.effort,
        **format_settings,
    )
    parsing = ParsingOptions(
        parse_tool_calls=bool(tools),
        starts_in_tool_calls=starts_in_calls,
        parse_json_output=conversation.response_format == "json_object",
        thinking_initial_stage=thinking.initial_stage,
        special_tokens=options.special_tokens,
    )
    return ConversationRequest.converted(
        conversation,
        version,
        inference_options=InferenceOptions(**inference),
        parsing_options=parsing,
        stream=bool(body.stream),
        reply_settings=reply_settings(body, parsed.tools, namespaces),
    )


def _messages(parsed: ParsedBody, items: ItemConverter) -> list[Message]:
    body = parsed.fields
    messages: list[Message] = [SystemMessage(body.instructions)] if body.instructions else []
    if body.input is None:
        if not messages:
            raise ConversionError("input: either input or instructions must be given")
    elif isinstance(body.input, str):
        messages.append(UserMessage(body.input))
    elif not body.input:
        raise ConversionError("input: the list must not be empty")
    else:
        items.convert(parsed.items, messages)
    return messages


def _choice(choice: Any) -> ToolChoice:
    if isinstance(choice, (wire.FunctionChoice, wire.CustomChoice)):
        return ToolChoice("required", choice.name, "tool_choice.name")
    return ToolChoice(choice if isinstance(choice, str) else "auto")


def _text_format(
    text: wire.Text | None, messages: list[Message], thinking: Thinking, limit: TimeLimit
) -> tuple[dict[str, Any], OutputConstraint | None]:
    given = text.format if text is not None else None
    if isinstance(given, wire.JsonObjectFormat):
        check_json_word(message.content for message in messages)
        return {"response_format": "json_object"}, OutputConstraint("json", "", thinking.is_on)
    if isinstance(given, wire.JsonSchemaFormat):
        shown, constraining = response_schemas(given.schema, given.strict, "text.format.schema", limit)
        return {"response_schema": shown}, OutputConstraint("json", constraining, thinking.is_on)
    return {}, None
