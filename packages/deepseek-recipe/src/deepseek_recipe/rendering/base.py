"""What the V4 and the V4.1 encoding share: options, fixed blocks, tool calls, tool lines."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from deepseek_recipe import protocol_data
from deepseek_recipe.checks import require_instance, require_str
from deepseek_recipe.conversation import Conversation, ToolCall, ToolDefinition
from deepseek_recipe.json_text import JsonTextError, is_object, loads
from deepseek_recipe.rendering.prompt import PromptBuilder, RenderedPrompt
from deepseek_recipe.tokenizer import Tokenizer
from deepseek_recipe.tokens import DEFAULT_SPECIAL_TOKENS, SpecialToken, SpecialTokens

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PromptEncoding"]

_Argument = tuple[str, str, str]  # name, "true" | "false" for a string, shown value
_MAX_REMEMBERED_TOOL_SIZE = 8_192  # characters of name and description, bytes of parameters
_MAX_REMEMBERED_CALL_CHARS = 1_024

_GROUNDING = (
    SpecialToken.Ref,
    SpecialToken.RefEnd,
    SpecialToken.Box,
    SpecialToken.BoxEnd,
    SpecialToken.Point,
    SpecialToken.PointEnd,
    SpecialToken.Polygon,
    SpecialToken.PolygonEnd,
)


class PromptEncoding(ABC):
    """Base of the two encodings: renders conversations, and encodes them when a tokenizer is attached."""

    dsml_tags: ClassVar[protocol_data.DsmlTags]
    json_object_block: ClassVar[str]
    preambles: ClassVar[dict[str | None, str]]
    spaced_json: ClassVar[Callable[[Any], str]]

    def __init__(self) -> None:
        self._tokenizer: Tokenizer | None = None
        self._use_spellings(DEFAULT_SPECIAL_TOKENS)

    def with_tokenizer(self, tokenizer: Tokenizer) -> Self:
        """A copy that encodes with `tokenizer`."""
        copy = type(self)()
        copy._tokenizer = require_instance("tokenizer", tokenizer, Tokenizer)
        copy._use_spellings(self._special_tokens)
        return copy

    def with_special_tokens(self, special_tokens: SpecialTokens) -> Self:
        """A copy that writes the spellings of `special_tokens`."""
        require_instance("special_tokens", special_tokens, SpecialTokens)
        copy = type(self)()
        copy._tokenizer = self._tokenizer
        copy._use_spellings(special_tokens)
        return copy

    def render_conversation(self, conversation: Conversation) -> RenderedPrompt:
        """The prompt of `conversation`: text, the ranges of its special tokens, its images in order."""
        require_instance("conversation", conversation, Conversation)
        out = PromptBuilder()
        self._write(conversation, out)
        return out.finish()

    def encode(self, conversation: Conversation) -> list[int]:
        """The token ids of the rendered prompt.

        `RuntimeError` without a tokenizer, or when a special token of the prompt is not in its added vocabulary.
        """
        return self._attached().encode_rendered(self.render_conversation(conversation))

    def render_fim(self, prefix: str, suffix: str) -> RenderedPrompt:
        """The prompt of a completion that fills the hole between two texts; spellings inside them stay text.

        <bos> <fim_begin> prefix <fim_hole> suffix <fim_end>
        """
        require_str("prefix", prefix)
        require_str("suffix", suffix)
        out = PromptBuilder()
        out.special(self._bos)
        out.special(protocol_data.FIM_BEGIN)
        out.text(prefix)
        out.special(protocol_data.FIM_HOLE)
        out.text(suffix)
        out.special(protocol_data.FIM_END)
        return out.finish()

    def encode_fim(self, prefix: str, suffix: str) -> list[int]:
        """The token ids of `render_fim`; errors as in `encode`."""
        return self._attached().encode_rendered(self.render_fim(prefix, suffix))

    def count_tokens(self, conversation: Conversation) -> int:
        """How many ids `encode` gives; an image counts as its one placeholder (see `image_token_adjustment`)."""
        return len(self.encode(conversation))

    def _attached(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RuntimeError("no tokenizer is attached to the encoding: use with_tokenizer(Tokenizer.from_file(...))")
        return self._tokenizer

    # ---- for the subclasses ------------------------------------------------------------------------------------------

    @abstractmethod
    def _write(self, conversation: Conversation, out: PromptBuilder) -> None:
        """Writes the whole prompt."""

    def _use_spellings(self, special_tokens: SpecialTokens) -> None:
        spell = special_tokens.token
        self._special_tokens = special_tokens
        self._bos, self._eos = spell(SpecialToken.Bos), spell(SpecialToken.Eos)
        self._think, self._think_end = spell(SpecialToken.ThinkingStart), spell(SpecialToken.ThinkingEnd)
        self._system, self._user = spell(SpecialToken.System), spell(SpecialToken.User)
        self._assistant, self._reminder = spell(SpecialToken.Assistant), spell(SpecialToken.LatestReminder)
        self._dsml = spell(SpecialToken.Dsml)
        spellings = sorted({spell(token) for token in _GROUNDING} - {""}, key=len)
        self._grounding = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        self._tools_before = self._template(protocol_data.TOOLS_BLOCK_BEFORE)

    def _template(self, text: str) -> RenderedPrompt:
        """A protocol string, rendered."""
        spellings = {"{dsml}": self._dsml, "{think}": self._think, "{think_end}": self._think_end}
        for name, tag in self.dsml_tags._asdict().items():
            text = text.replace("{" + name + "}", tag)
        out = PromptBuilder()
        for piece in re.split(r"(\{dsml\}|\{think\}|\{think_end\})", text):
            if piece in spellings:
                out.special(spellings[piece])
            else:
                out.text(piece)
        return out.finish()

    def _write_spoken(self, text: str, out: PromptBuilder) -> None:
        """Writes what the model said: grounding spellings in it are the tokens that it emitted."""
        out.specials_in(text, self._grounding)

    def _tool_line(self, tool: ToolDefinition) -> str:
        parameters, description = msgspec.json.encode(tool.parameters), tool.description or ""
        is_short = len(tool.name) + len(description) + len(parameters) <= _MAX_REMEMBERED_TOOL_SIZE
        line_of = _remembered_tool_line if is_short else _tool_line
        return line_of(type(self).spaced_json, tool.name, description, parameters)

    def _write_format_block(self, conversation: Conversation, out: PromptBuilder) -> bool:
        """Writes how to answer, and whether there was anything to write."""
        if conversation.response_format == "json_object":
            out.text(self.json_object_block)
        elif conversation.response_format == "json_schema":
            out.text(protocol_data.JSON_SCHEMA_PREFIX + type(self).spaced_json(conversation.response_schema))
        else:
            return False
        return True

    def _write_required_suffix(self, out: PromptBuilder) -> None:
        """Opens the block of calls that a required tool choice promises."""
        out.text("\n\n<")
        out.special(self._dsml)
        out.text(f"{self.dsml_tags.block}>\n")

    def _write_calls(self, calls: Iterable[ToolCall], out: PromptBuilder, *, empty_arguments: str) -> None:
        r"""Writes the block of calls of an assistant turn; everything between two DSML tokens is one text.

        \n\n<|DSML|tool_calls>
        <|DSML|invoke name="f">
        <|DSML|parameter name="a" string="true">text</|DSML|parameter>
        </|DSML|invoke>
        </|DSML|tool_calls>
        """
        block = self.dsml_tags.block
        texts = ["\n\n<", f"{block}>\n"]
        for call in calls:
            is_short = len(call.name) + len(call.arguments) <= _MAX_REMEMBERED_CALL_CHARS
            texts_of = _remembered_call_texts if is_short else _call_texts
            first, *others = texts_of(
                self.dsml_tags, type(self).spaced_json, empty_arguments, call.name, call.arguments
            )
            texts[-1] += first
            texts += others
        texts[-1] += "</"
        texts.append(f"{block}>")
        out.joined(texts, self._dsml)


def _tool_line(to_text: Callable[[Any], str], name: str, description: str, parameters: bytes) -> str:
    return to_text({"name": name, "description": description, "parameters": msgspec.json.decode(parameters)})


def _call_texts(
    tags: protocol_data.DsmlTags, to_text: Callable[[Any], str], empty_arguments: str, name: str, arguments: str
) -> Sequence[str]:
    """The texts of one call, which DSML tokens join."""
    shown = _shown_arguments(to_text, arguments)
    texts = ["<", f'{tags.invoke} name="{name}">\n']
    for argument, is_string, value in shown:
        texts[-1] += "<"
        texts += (
            f'{tags.parameter} name="{argument}" string="{is_string}">{value}</',
            f"{tags.parameter}>\n",
        )
    texts[-1] += "</" if shown else f"{empty_arguments}</"
    texts.append(f"{tags.invoke}>\n")
    return texts


# Agents resend every tool and every call with every request.
_remembered_tool_line = lru_cache(maxsize=1_024)(_tool_line)
_remembered_call_texts = lru_cache(maxsize=1_024)(_call_texts)


def _shown_arguments(to_text: Callable[[Any], str], text: str) -> Sequence[_Argument]:
    """Each argument of a call; text that is no object is one string."""
    try:
        arguments = loads(text)
    except JsonTextError:
        arguments = None
    if not is_object(arguments):
        return (("arguments", "true", text),)
    return [(k, "true", v) if isinstance(v, str) else (k, "false", to_text(v)) for k, v in arguments.items()]
