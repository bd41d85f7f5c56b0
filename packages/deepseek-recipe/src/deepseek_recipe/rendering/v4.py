r"""The prompt of DeepSeek V4 Pro.

    <bos> preamble system-texts tools-block format-block  turns  <Assistant> <think> | </think>

System messages are gathered at the front. Of the rest, consecutive user messages become one, results follow the order
of the ids of the calls, and then

    user, tool       <User> text [\n\n text ...]    a tool result right after a user message opens a new <User>
    latest_reminder  <latest_reminder> text
    assistant        <Assistant> thinking text calls <eos>
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from deepseek_recipe import protocol_data
from deepseek_recipe.conversation import (
    AssistantMessage,
    Conversation,
    LatestReminderMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from deepseek_recipe.json_text import spaced_v4
from deepseek_recipe.rendering.base import PromptEncoding
from deepseek_recipe.rendering.prompt import PromptBuilder

__all__ = ["DeepseekV4Encoding"]

_Users = list[UserMessage]
_Turn = _Users | ToolMessage | AssistantMessage | LatestReminderMessage
"""One turn; consecutive user messages are one turn."""


class DeepseekV4Encoding(PromptEncoding):
    """Renders and encodes conversations for DeepSeek V4 Pro."""

    dsml_tags = protocol_data.V4_DSML_TAGS
    json_object_block = protocol_data.V4_JSON_OBJECT_BLOCK
    spaced_json = staticmethod(spaced_v4)
    preambles: ClassVar[dict[str | None, str]] = {
        "low": protocol_data.V4_PREAMBLE_LOW,
        "high": protocol_data.V4_PREAMBLE_HIGH,
        "xhigh": protocol_data.V4_PREAMBLE_HIGH,
        "max": protocol_data.V4_PREAMBLE_MAX,
        None: protocol_data.V4_PREAMBLE_HIGH,
    }

    def _write(self, conversation: Conversation, out: PromptBuilder) -> None:
        messages = conversation.messages
        out.special(self._bos)
        if conversation.thinking_mode:
            out.text(self.preambles[conversation.reasoning_effort])
        self._write_system_texts(messages, out)
        if conversation.tools_active:
            out.extend(self._tools_before.segments, self._tools_before.is_special)
            lines = [self._tool_line(tool) + "\n" for tool in conversation.tools if not tool.defer_loading]
            out.text("".join(lines) + protocol_data.TOOLS_BLOCK_AFTER.removeprefix("\n"))
        self._write_format_block(conversation, out)
        turns = results_in_id_order(gathered_turns(messages))
        last = turns[-1] if turns else None
        continued = last if isinstance(last, AssistantMessage) and last.prefix else None
        self._write_turns(conversation, turns, continued, out)
        if continued is None:
            out.special(self._assistant)
            out.special(self._think if conversation.thinking_mode else self._think_end)
        if conversation.tools and conversation.tool_choice == "required":
            self._write_required_suffix(out)

    def _write_system_texts(self, messages: Sequence[Message], out: PromptBuilder) -> None:
        _write_joined((m for m in messages if isinstance(m, SystemMessage) and m.content), out)

    def _write_turns(
        self, conversation: Conversation, turns: Iterable[_Turn], continued: Message | None, out: PromptBuilder
    ) -> None:
        previous: _Turn | None = None
        for turn in turns:
            if isinstance(turn, AssistantMessage):
                self._write_assistant(conversation, turn, turn is continued, out)
            elif isinstance(turn, LatestReminderMessage):
                out.special(self._reminder)
                out.text(turn.content)
            else:
                joins_tool = isinstance(previous, ToolMessage)
                joins_users = isinstance(previous, list) and isinstance(turn, list)
                if joins_tool or joins_users:
                    out.text("\n\n")
                else:
                    out.special(self._user)
                self._write_user(turn, out)
            previous = turn

    def _write_user(self, turn: _Users | ToolMessage, out: PromptBuilder) -> None:
        if isinstance(turn, ToolMessage):
            out.text(protocol_data.TOOL_RESULT_OPEN)
            out.content(turn)
            out.text(protocol_data.TOOL_RESULT_CLOSE)
            return
        _write_joined(turn, out)

    def _write_assistant(
        self, conversation: Conversation, message: AssistantMessage, is_continued: bool, out: PromptBuilder
    ) -> None:
        out.special(self._assistant)
        reasoning = message.reasoning_content
        if message.prefix and not message.content:
            if reasoning is not None:
                out.special(self._think)
                self._write_spoken(reasoning, out)
            if not conversation.thinking_mode:
                out.special(self._think_end)
        else:
            if reasoning is not None and (conversation.tools_active or message.prefix):
                out.special(self._think)
                self._write_spoken(reasoning, out)
            out.special(self._think_end)
        self._write_spoken(message.content, out)
        if message.tool_calls is not None:
            by_id = sorted(message.tool_calls, key=lambda call: call.id)
            self._write_calls(by_id, out, empty_arguments="")
        if not is_continued:
            out.special(self._eos)


def _write_joined(messages: Iterable[SystemMessage | UserMessage], out: PromptBuilder) -> None:
    """Writes the contents that are not empty, a blank line between them; the images of all of them count."""
    is_first = True
    for message in messages:
        if message.content:
            if not is_first:
                out.text("\n\n")
            is_first = False
        out.content(message)


def gathered_turns(messages: Sequence[Message]) -> list[_Turn]:
    """The turns without system messages, consecutive user messages as one turn."""
    turns: list[_Turn] = []
    for message in messages:
        if isinstance(message, UserMessage):
            if turns and isinstance(turns[-1], list):
                turns[-1].append(message)
            else:
                turns.append([message])
        elif isinstance(message, (ToolMessage, AssistantMessage, LatestReminderMessage)):
            turns.append(message)
    return turns


def results_in_id_order(turns: list[_Turn]) -> list[_Turn]:
    """The turns with tool results sorted by call id.

    For every place of the unsorted list that held an assistant turn with N calls and has N turns behind it, those N
    turns are stably sorted in place: tool results first, by id with a missing id before all, then the others.
    """
    ordered = list(turns)
    for index, turn in enumerate(turns):
        count = len(turn.tool_calls or ()) if isinstance(turn, AssistantMessage) else 0
        if count and index + count < len(turns):
            ordered[index + 1 : index + 1 + count] = sorted(ordered[index + 1 : index + 1 + count], key=_result_key)
    return ordered


def _result_key(turn: _Turn) -> tuple[bool, bool, str]:
    if not isinstance(turn, ToolMessage):
        return (True, False, "")
    return (False, turn.tool_call_id is not None, turn.tool_call_id or "")
