"""Rules that the three APIs share: thinking, sampling, stop sequences, tools, tool choice, reasoning, constraints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from deepseek_recipe.checks import clipped, shown
from deepseek_recipe.conversation import AssistantMessage, Effort, Message, ToolDefinition, UserMessage
from deepseek_recipe.enums import ModelVersion, ReasoningContentBehavior, ThinkingInitialStage
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_text import TrustedJson, compact, is_object
from deepseek_recipe.requests.options import ConversionOptions
from deepseek_recipe.requests.result import OutputConstraint
from deepseek_recipe.requests.wire import as_f32
from deepseek_recipe.schema.check import check_schema
from deepseek_recipe.schema.limits import SchemaError, TimeLimit
from deepseek_recipe.schema.strict import strict_parameters, strict_schema

__all__ = [
    "Thinking",
    "ToolChoice",
    "ToolSpec",
    "check_format_with_tools",
    "check_json_word",
    "checked_stop",
    "define_tools",
    "model_version",
    "resolve_choice",
    "resolve_max_tokens",
    "resolve_temperature",
    "resolve_thinking",
    "resolve_top_p",
    "response_schemas",
    "settle_reasoning",
    "tools_constraint",
]

_EFFORTS: dict[str, Effort] = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "xhigh",
    "ultra": "max",
    "max": "max",
}
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_MAX_TOOL_NAME_CHARS = 128
_MAX_STOPS = 16
_MAX_STOP_CHARS = 2**16  # of all together: the table that finds them takes some 50 bytes a character
_EMPTY_TURN_ID = re.compile(r"call_[0-9]{2}_ET_")
_MIN_THINKING_TOP_P = as_f32(0.95)


# ---- model, thinking, sampling ---------------------------------------------------------------------------------------


def model_version(model: str, options: ConversionOptions) -> ModelVersion:
    """The version behind a model name."""
    version = options.model_versions_by_name.get(model)
    if version is None:
        names = ", ".join(sorted(options.model_versions_by_name))
        raise ConversionError(f"model: {shown(model)} is not served here; the models are {names}")
    return version


class Thinking(NamedTuple):
    """Whether the model thinks, and how hard."""

    is_on: bool
    effort: Effort | None

    @property
    def initial_stage(self) -> ThinkingInitialStage | None:
        """Where the output of a fresh assistant turn begins."""
        return ThinkingInitialStage.ReasoningStart if self.is_on else None


def resolve_thinking(switch: str | None, effort: str | None, options: ConversionOptions) -> Thinking:
    """An explicit switch wins over the effort, the effort over the default; no effort means high."""
    if switch is not None:
        is_on = switch != "disabled"
    elif effort is not None:
        is_on = effort != "none"
    else:
        is_on = options.default_thinking_mode
    return Thinking(is_on, _EFFORTS.get(effort or "", "high") if is_on else None)


def resolve_temperature(value: float | None, thinking: Thinking) -> float:
    """Thinking samples at 1.0 whatever was asked for; the request must be in range all the same."""
    temperature = 1.0 if value is None else as_f32(value)
    if not 0.0 <= temperature <= 2.0:
        raise ConversionError(f"temperature: {value} is outside the range [0, 2]")
    return 1.0 if thinking.is_on else temperature


def resolve_top_p(value: float | None, thinking: Thinking, version: ModelVersion, *, tools_active: bool) -> float:
    """The nucleus that the model version was tuned for, in its mode.

    |                        | V4 Pro           | V4.1 Flash           |
    | thinking, tools active | 0.95             | max(requested, 0.95) |
    | thinking, no tools     | 1.0              | max(requested, 0.95) |
    | not thinking           | requested or 1.0 | 1.0                  |
    """
    top_p = 1.0 if value is None else as_f32(value)
    if not 0.0 < top_p <= 1.0:
        raise ConversionError(f"top_p: {value} is outside the range (0, 1]")
    is_pro = version is ModelVersion.DeepseekV4Pro
    if not thinking.is_on:
        return top_p if is_pro else 1.0
    if is_pro:
        return _MIN_THINKING_TOP_P if tools_active else 1.0
    return max(top_p, _MIN_THINKING_TOP_P)


def resolve_max_tokens(
    value: int | None, field: str, thinking: Thinking, options: ConversionOptions, *, clamp: bool
) -> int | None:
    """The requested number of tokens, which must be in [1, bound of the mode]; `clamp` lowers a larger one instead."""
    if value is None:
        return None
    bound = options.thinking_max_tokens_upper_bound if thinking.is_on else options.non_thinking_max_tokens_upper_bound
    if value < 1 or (value > bound and not clamp):
        raise ConversionError(f"{field}: {value} is outside the range [1, {bound}]")
    return min(value, bound)


def checked_stop(stop: Sequence[str], field: str) -> list[str]:
    """At most 16 stop sequences, none of them empty, of 65,536 characters together."""
    if len(stop) > _MAX_STOPS:
        raise ConversionError(f"{field}: {len(stop)} stop sequences are more than the limit of {_MAX_STOPS}")
    if (num_chars := sum(map(len, stop))) > _MAX_STOP_CHARS:
        raise ConversionError(f"{field}: {num_chars} characters are more than the limit of {_MAX_STOP_CHARS}")
    for index, text in enumerate(stop):
        if not text:
            raise ConversionError(f"{field}[{index}]: a stop sequence must not be empty")
    return list(stop)


# ---- tools -----------------------------------------------------------------------------------------------------------


class ToolSpec(msgspec.Struct):
    """A tool as a request declares it. `path` is where its name stands; `parameters` None means none were given."""

    name: str
    description: str | None
    parameters: Any
    path: str
    strict: bool | None = None
    defer_loading: bool = False
    is_namespaced: bool = False


def check_tool_name(name: str, path: str) -> None:
    """Refuses a name that the prompt format does not carry safely."""
    if not name:
        raise ConversionError(f"{path}: a name must not be empty")
    if len(name) > _MAX_TOOL_NAME_CHARS:
        raise ConversionError(f"{path}: a name of {len(name)} characters is over the limit of {_MAX_TOOL_NAME_CHARS}")
    if not _TOOL_NAME.fullmatch(name):
        raise ConversionError(f"{path}: {shown(name)} may hold only letters, digits, underscores and hyphens")


def define_tools(specs: Iterable[ToolSpec], limit: TimeLimit) -> list[ToolDefinition]:
    """The tools with checked, and where strict rewritten, parameters."""
    tools = [_defined(spec, limit) for spec in specs]
    strict = [bool(tool.strict) for tool in tools]
    if any(strict) and not all(strict):
        names = clipped(", ".join(tool.name for tool in tools if not tool.strict))
        raise ConversionError(f"tools: strict and other tools cannot be mixed in one request; not strict: {names}")
    return tools


def check_unique(names: Iterable[str]) -> None:
    """Refuses two tools of one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConversionError(f"tools: two tools are named {shown(name)}; names must be unique")
        seen.add(name)


def _defined(spec: ToolSpec, limit: TimeLimit) -> ToolDefinition:
    try:
        parameters = _checked_parameters(spec, limit)
    except SchemaError as error:
        raise ConversionError(f"{spec.path}: invalid parameters of the tool {shown(spec.name)}: {error}") from None
    return ToolDefinition(spec.name, spec.description, TrustedJson(parameters), spec.strict, spec.defer_loading)


def _checked_parameters(spec: ToolSpec, limit: TimeLimit) -> Any:
    if spec.strict:
        return strict_parameters(spec.parameters, limit)
    if spec.parameters is None:
        return {}
    parameters = spec.parameters
    check_schema(parameters, limit)
    if not is_object(parameters) or parameters.get("type") != "object":
        given = parameters.get("type") if is_object(parameters) else parameters
        raise SchemaError(f'the type must be "object", not {clipped(compact(given))}')
    return parameters


class ToolChoice(NamedTuple):
    """A request's choice: auto, none, required, or one tool by name."""

    mode: str
    name: str | None = None
    path: str = "tool_choice"


def resolve_choice(
    choice: ToolChoice, specs: list[ToolSpec], thinking: Thinking, *, extended: bool
) -> tuple[str, list[ToolSpec]]:
    """The conversation's choice (auto, none or required) and the tools that it leaves."""
    if choice.mode == "none":
        return "none", []
    check_unique(spec.name for spec in specs)
    if not specs or choice.mode == "auto":
        return "auto", specs
    if choice.name is not None:
        specs = [spec for spec in specs if spec.name == choice.name]
        if not specs:
            raise ConversionError(f"{choice.path}: no tool is named {shown(choice.name)}")
    if thinking.is_on and not extended:
        raise ConversionError(f"{choice.path}: a tool can be required only when thinking is off")
    return "required", specs


def tools_constraint(
    tools: Sequence[ToolDefinition], *, required: bool, thinking: Thinking, version: ModelVersion, parallel: bool
) -> OutputConstraint:
    """The constraint that the output calls the tools as they are declared."""
    listed: list[dict[str, Any]] = []
    for tool in tools:
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        entry: dict[str, Any] = {"type": "function", "function": function}
        if tool.defer_loading:
            entry["defer_loading"] = True
        listed.append(entry)
    kind = "tool_call_required" if required else "tool_call"
    return OutputConstraint(kind, compact(listed), thinking.is_on, version, parallel)


# ---- history and format ----------------------------------------------------------------------------------------------


def settle_reasoning(
    messages: list[Message], thinking: Thinking, behavior: ReasoningContentBehavior, field: str, *, declares_tools: bool
) -> list[Message]:
    """History with the reasoning that the mode wants: none without thinking, an empty one where it is missing.

    With `Reject` an assistant turn behind the last user message must bring its reasoning (`field` is its name in the
    API) if it has calls or the request declares tools, unless a call id says that there was none (`call_00_ET_...`).
    """
    if thinking.is_on and behavior is ReasoningContentBehavior.Reject:
        _check_reasoning(messages, field, declares_tools=declares_tools)
    wanted = "" if thinking.is_on else None
    return [_with_reasoning(m, wanted) if isinstance(m, AssistantMessage) else m for m in messages]


def _with_reasoning(message: AssistantMessage, wanted: str | None) -> AssistantMessage:
    if (message.reasoning_content is None) == (wanted is None):
        return message
    return AssistantMessage(message.content, wanted, message.tool_calls, message.prefix)


def _check_reasoning(messages: Sequence[Message], field: str, *, declares_tools: bool) -> None:
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if isinstance(message, UserMessage):
            return
        if not isinstance(message, AssistantMessage) or message.reasoning_content is not None:
            continue
        calls = message.tool_calls or ()
        if (calls or declares_tools) and not any(_EMPTY_TURN_ID.match(call.id) for call in calls):
            raise ConversionError(f"messages[{index}]: the {field} of this turn must be sent back when thinking")


def check_json_word(conversation_texts: Iterable[str]) -> None:
    """JSON mode without the word in the prompt makes models write blanks for ever."""
    if not any("json" in text.lower() for text in conversation_texts):
        raise ConversionError("the messages must contain the word 'json' in some form to use json_object")


def check_format_with_tools(tools: Sequence[ToolDefinition], has_format: bool) -> None:
    """Strict tools already say what the output looks like."""
    if has_format and any(tool.strict for tool in tools):
        raise ConversionError("response_format: cannot be combined with strict tools")


def response_schemas(schema: Any, strict: bool | None, path: str, limit: TimeLimit) -> tuple[Any, str]:
    """The schema that the conversation shows and the compact one that constrains the output."""
    try:
        if strict:
            return schema, compact(strict_schema(schema, limit))
        check_schema(schema, limit)
    except SchemaError as error:
        raise ConversionError(f"{path}: invalid JSON Schema: {error}") from None
    return schema, compact(schema)
