r"""The prompt of DeepSeek V4.1 Flash.

<bos> [<System> preamble system-text tools-block format-block updated-tools]  turns  <Assistant> <think> | </think>

user, tool       <User> text [\n\n text ...]       neighbours of both kinds share one <User>
system           <System> text updated-tools       where it stands
latest_reminder  <latest_reminder> text            only the first of several in a row
assistant        <Assistant> thinking text calls <eos>
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, cast

from deepseek_recipe import protocol_data
from deepseek_recipe.conversation import (
    AssistantMessage,
    Conversation,
    Message,
    SystemMessage,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from deepseek_recipe.json_text import spaced
from deepseek_recipe.rendering.base import PromptEncoding
from deepseek_recipe.rendering.prompt import PromptBuilder

__all__ = ["DeepseekV41Encoding"]


class DeepseekV41Encoding(PromptEncoding):
    """Renders and encodes conversations for DeepSeek V4.1 Flash."""

    dsml_tags = protocol_data.V41_DSML_TAGS
    json_object_block = protocol_data.V41_JSON_OBJECT_BLOCK
    spaced_json = staticmethod(spaced)
    preambles: ClassVar[dict[str | None, str]] = {
        "low": protocol_data.V41_PREAMBLE_LOW,
        "high": protocol_data.V41_PREAMBLE_HIGH,
        "xhigh": protocol_data.V41_PREAMBLE_HIGH,
        "max": protocol_data.V41_PREAMBLE_MAX,
        None: protocol_data.V41_PREAMBLE_HIGH,
    }

    def _write(self, conversation: Conversation, out: PromptBuilder) -> None:
        out.special(self._bos)
        messages = results_in_call_order(conversation.messages)
        first_is_system = bool(messages) and isinstance(messages[0], SystemMessage)
        has_format = conversation.response_format in ("json_object", "json_schema")
        thinks = conversation.thinking_mode
        if first_is_system or conversation.tools_active or has_format or (thinks and messages):
            self._write_lead(conversation, cast(SystemMessage, messages[0]) if first_is_system else None, out)
        nothing_before = not first_is_system and not has_format
        self._write_turns(conversation, messages[1:] if first_is_system else messages, nothing_before, out)
        if not (messages and messages[-1].prefix):
            out.special(self._assistant)
            out.special(self._think if thinks else self._think_end)
        if conversation.tools and conversation.tool_choice == "required":
            self._write_required_suffix(out)

    def _write_lead(self, conversation: Conversation, system: SystemMessage | None, out: PromptBuilder) -> None:
        out.special(self._system)
        if conversation.thinking_mode:
            out.text(self.preambles[conversation.reasoning_effort])
        if system is not None:
            out.content(system)
        if conversation.tools_active:
            out.extend(self._tools_before.segments, self._tools_before.is_special)
            out.text("\n".join(self._tool_line(tool) for tool in conversation.tools if not tool.defer_loading))
            out.text(protocol_data.TOOLS_BLOCK_AFTER)
        self._write_format_block(conversation, out)
        if system is not None:
            self._write_updated_tools(system.tools, out)

    def _write_updated_tools(self, tools: Iterable[ToolDefinition] | None, out: PromptBuilder) -> None:
        if tools:
            out.text(protocol_data.UPDATED_TOOLS_PREFIX + "\n".join(map(self._tool_line, tools)))

    def _write_turns(
        self, conversation: Conversation, messages: Sequence[Message], nothing_before: bool, out: PromptBuilder
    ) -> None:
        previous: str | None = None
        for index, message in enumerate(messages):
            role = message.role
            if isinstance(message, (UserMessage, ToolMessage)):
                if previous in ("user", "tool"):
                    out.text("\n\n")
                else:
                    out.special(self._user)
                self._write_user(message, out)
            elif isinstance(message, AssistantMessage):
                self._write_assistant(conversation, message, nothing_before and index == 0, out)
            elif isinstance(message, SystemMessage):
                out.special(self._system)
                out.content(message)
                self._write_updated_tools(message.tools, out)
            elif previous != "latest_reminder":
                out.special(self._reminder)
                out.text(message.content)
            previous = role

    def _write_user(self, message: UserMessage | ToolMessage, out: PromptBuilder) -> None:
        if isinstance(message, UserMessage):
            out.content(message)
            return
        out.text(protocol_data.TOOL_RESULT_OPEN)
        out.content(message)
        out.text(protocol_data.TOOL_RESULT_CLOSE)

    def _write_assistant(
        self, conversation: Conversation, message: AssistantMessage, opens_prompt: bool, out: PromptBuilder
    ) -> None:
        out.special(self._assistant)
        is_open = message.prefix and not message.content and not message.tool_calls
        if self._shows_reasoning(conversation, message, opens_prompt):
            out.special(self._think)
            self._write_spoken(message.reasoning_content or "", out)
            if not is_open:
                out.special(self._think_end)
        else:
            out.special(self._think_end)
        self._write_spoken(message.content, out)
        if message.tool_calls:
            self._write_calls(message.tool_calls, out, empty_arguments="\n")
        if not message.prefix:
            out.special(self._eos)

    def _shows_reasoning(self, conversation: Conversation, message: AssistantMessage, opens_prompt: bool) -> bool:
        """Reasoning is shown only when thinking, to a tool loop or in a continued answer.

        A continued answer that opens the prompt is the exception: nothing before it says that the model thinks.
        """
        if not conversation.thinking_mode:
            return False
        return conversation.tools_active or (message.prefix and not opens_prompt)


def results_in_call_order(messages: Sequence[Message]) -> list[Message]:
    """The messages with tool results in the order of the calls that they answer.

    Within each run of user and tool messages, tool messages with an id are sorted, in the places that they occupy, by
    the position of the id in the last assistant message with calls; an unknown id counts as the first.
    """
    ordered = list(messages)
    position_of_call: dict[str, int] = {}
    places: list[int] = []

    def sort_run() -> None:
        if len(places) > 1:
            run = sorted((ordered[p] for p in places), key=lambda m: position_of_call.get(m.tool_call_id or "", 0))
            for place, message in zip(places, run, strict=True):
                ordered[place] = message
        places.clear()

    for index, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            if message.tool_call_id is not None:
                places.append(index)
        elif not isinstance(message, UserMessage):
            sort_run()
            if message.tool_calls:
                position_of_call = {}
                for position, call in enumerate(message.tool_calls):
                    position_of_call.setdefault(call.id, position)
    sort_run()
    return ordered
