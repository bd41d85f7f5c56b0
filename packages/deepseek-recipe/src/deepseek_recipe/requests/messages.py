"""Messages requests.

system            the first system message; a billing header in its first block is dropped
user blocks       tool results first, covering the calls of the message before; then every text or image block is a
                  user message of its own
assistant blocks  texts, reasoning and calls of one assistant message
system blocks     a system message, with the tools that `tool_addition` makes known
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepseek_recipe.checks import require_instance, shown
from deepseek_recipe.conversation import Conversation, Message, SystemMessage, ToolDefinition
from deepseek_recipe.enums import ModelVersion, WebSearchBehavior
from deepseek_recipe.errors import ConversionError, anthropic_error_body, openai_error_body
from deepseek_recipe.requests import wire_messages as wire
from deepseek_recipe.requests.common import (
    ToolChoice,
    ToolSpec,
    check_tool_name,
    checked_stop,
    define_tools,
    model_version,
    resolve_choice,
    resolve_max_tokens,
    resolve_temperature,
    resolve_thinking,
    resolve_top_p,
    settle_reasoning,
    tools_constraint,
)
from deepseek_recipe.requests.extended import extended_inference
from deepseek_recipe.requests.messages_blocks import BlockConverter
from deepseek_recipe.requests.options import ConversionOptions, Dialect
from deepseek_recipe.requests.protocol_request import ProtocolRequest, with_native_error
from deepseek_recipe.requests.result import ConversationRequest, InferenceOptions
from deepseek_recipe.schema.limits import TimeLimit
from deepseek_recipe.streaming.options import ParsingOptions

if TYPE_CHECKING:
    from deepseek_recipe.streaming.messages import MessagesChunkGenerator

__all__ = ["MessagesRequest"]

_BILLING_HEADER = "x-anthropic-billing-header"
_WEB_SEARCH_PREFIX = "web_search"


class MessagesRequest(ProtocolRequest[wire.MessagesBody]):
    """A Messages body.

    Raises ValueError for bad JSON or a bad shape. `dialect="extended"` also parses `redacted_thinking` blocks.
    """

    def __init__(self, body: bytes | str | dict[str, Any], *, dialect: Dialect = "strict") -> None:
        super().__init__(body, wire.MessagesBody, wire.ExtendedMessagesBody, dialect)
        tools = self._peek().tools or ()
        self._tools = [wire.parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]

    @property
    def model(self) -> str:
        """The model's name as requested."""
        return self._peek().model

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Conversation, engine options and how to read the output; ConversionError says what cannot be done."""

        def work(body: wire.MessagesBody, options: ConversionOptions, extended: bool) -> ConversationRequest:
            return with_native_error(options, lambda: _convert(body, self._tools, options, extended))

        return self._consume(options, work)

    @staticmethod
    def chunk_generator(request: ConversationRequest, id: str, model: str) -> MessagesChunkGenerator:  # noqa: A002
        """The generator of the events that answer a converted request."""
        from deepseek_recipe.streaming.messages import MessagesChunkGenerator

        require_instance("request", request, ConversationRequest)
        return MessagesChunkGenerator(id, model, request.conversation.thinking_mode)


def _convert(
    body: wire.MessagesBody, tools: list[wire.Tool | wire.HostedTool], options: ConversionOptions, extended: bool
) -> ConversationRequest:
    version = model_version(body.model, options)
    if not body.messages:
        raise ConversionError("messages: at least one message is needed")
    switch = body.thinking.type if body.thinking else None
    thinking = resolve_thinking(switch, body.output_config.effort if body.output_config else None, options)
    stop = checked_stop(body.stop_sequences or (), "stop_sequences")
    specs = _tool_specs(tools, version, options)
    known_names = {spec.name for spec in specs}
    choice = _choice(body, extended)
    declared = {tool.name: tool for tool in _defined(specs, options)} if choice.mode != "none" else {}
    mode, specs = resolve_choice(choice, specs, thinking, extended=extended)
    active = [declared[spec.name] for spec in specs]
    messages = _system(body.system)
    blocks = BlockConverter(version, options, known_names, {tool.name: tool for tool in active})
    blocks.convert(body.messages, messages)
    required = mode == "required"
    constraint = None
    if active:
        parallel = not (extended and getattr(body.tool_choice, "disable_parallel_tool_use", None) is True)
        constraint = tools_constraint(active, required=required, thinking=thinking, version=version, parallel=parallel)
    inference: dict[str, Any] = {
        "max_tokens": resolve_max_tokens(body.max_tokens, "max_tokens", thinking, options, clamp=True),
        "temperature": resolve_temperature(body.temperature, thinking),
        "top_p": resolve_top_p(body.top_p, thinking, version, tools_active=bool(active)),
        "output_constraint": constraint,
        **(extended_inference(body) if extended else {}),
    }
    starts_in_calls = required and not thinking.is_on
    conversation = Conversation(
        settle_reasoning(
            messages, thinking, options.reasoning_content_behavior, "thinking block", declares_tools=bool(known_names)
        ),
        thinking_mode=thinking.is_on,
        tools=active,
        tool_choice="auto" if required and not starts_in_calls else mode,  # pyright: ignore[reportArgumentType]
        reasoning_effort=thinking.effort,
    )
    parsing = ParsingOptions(
        parse_tool_calls=bool(active),
        starts_in_tool_calls=starts_in_calls,
        thinking_initial_stage=thinking.initial_stage,
        stop_sequences=stop,
        special_tokens=options.special_tokens,
    )
    return ConversationRequest.converted(
        conversation,
        version,
        inference_options=InferenceOptions(**inference),
        parsing_options=parsing,
        stream=bool(body.stream),
        error_body=anthropic_error_body if options.error_shape == "native" else openai_error_body,
    )


def _system(system: str | list[wire.SystemBlock] | None) -> list[Message]:
    if system is None:
        return []
    if isinstance(system, str):
        return [SystemMessage(system)]
    texts = [block.text for block in system]
    if texts and texts[0].lower().startswith(_BILLING_HEADER):
        del texts[0]
    return [SystemMessage("\n\n".join(texts))]


def _tool_specs(
    tools: list[wire.Tool | wire.HostedTool], version: ModelVersion, options: ConversionOptions
) -> list[ToolSpec]:
    knows_deferral = version is not ModelVersion.DeepseekV4Pro
    specs: list[ToolSpec] = []
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if isinstance(tool, wire.HostedTool):
            drops = options.messages_web_search is WebSearchBehavior.Drop
            if not (drops and tool.type.startswith(_WEB_SEARCH_PREFIX)):
                raise ConversionError(f"{path}: hosted tools such as {shown(tool.type)} are not supported")
            continue
        check_tool_name(tool.name, f"{path}.name")
        place, deferred = f"{path}.input_schema", knows_deferral and bool(tool.defer_loading)
        specs.append(ToolSpec(tool.name, tool.description, tool.input_schema, place, None, deferred))
    if specs and all(spec.defer_loading for spec in specs):
        raise ConversionError("tools: at least one tool must not be deferred")
    return specs


def _defined(specs: list[ToolSpec], options: ConversionOptions) -> list[ToolDefinition]:
    for spec in specs:
        if spec.parameters is None:
            raise ConversionError(f"{spec.path}: a tool needs an input_schema")
    return define_tools(specs, TimeLimit(options.schema_time_limit_s))


def _choice(body: wire.MessagesBody, extended: bool) -> ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, wire.NamedChoice):
        return ToolChoice("required", choice.name, "tool_choice.name")
    if isinstance(choice, wire.NoneChoice):
        return ToolChoice("none")
    is_any = isinstance(choice, wire.AnyChoice)
    return ToolChoice("required" if is_any and extended else "auto")
