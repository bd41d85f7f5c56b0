"""How model output is parsed: `ParsingOptions`.

The last two settings go beyond the official bindings and leave their behaviour alone by default.

| setting | value | effect |
| --- | --- | --- |
| malformed_calls | "keep" | write what the model wrote, as the official parser does |
| | "repair" | arguments are always a JSON object; names keep spaces; later blocks and text after a block survive |
| | "reject" | `MalformedToolCallError` at the first deviation from the format |
| leaked_markup | "keep" | with tool parsing off, DSML markup is ordinary content |
| | "suppress" | with tool parsing off, DSML blocks are taken out of the content |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from deepseek_recipe.checks import require_bool, require_instance, require_list, require_str, shown
from deepseek_recipe.enums import ThinkingInitialStage
from deepseek_recipe.tokens import DEFAULT_SPECIAL_TOKENS, SpecialToken, SpecialTokens

__all__ = ["LeakedMarkup", "MalformedCalls", "ParsingOptions"]

MalformedCalls = Literal["keep", "repair", "reject"]
LeakedMarkup = Literal["keep", "suppress"]


class ParsingOptions:
    """Settings of a `StreamProcessor`, which reads them once when it is built.

    `thinking_initial_stage` None means that thinking is off; `starts_in_tool_calls` (the prompt ended inside a block of
    calls) takes precedence over it. Empty stop sequences are ignored. Every setting can be assigned.

    Raises: TypeError for a value of a wrong type, ValueError for an unknown word.
    """

    __slots__ = (
        "_leaked_markup",
        "_malformed_calls",
        "_parse_json_output",
        "_parse_tool_calls",
        "_special_tokens",
        "_starts_in_tool_calls",
        "_stop_sequences",
        "_thinking_initial_stage",
    )

    def __init__(
        self,
        *,
        parse_tool_calls: bool = True,
        starts_in_tool_calls: bool = False,
        parse_json_output: bool = False,
        thinking_initial_stage: ThinkingInitialStage | None = None,
        stop_sequences: Sequence[str] | None = None,
        special_tokens: SpecialTokens | None = None,
        malformed_calls: MalformedCalls = "keep",
        leaked_markup: LeakedMarkup = "keep",
    ) -> None:
        self.parse_tool_calls = parse_tool_calls
        self.starts_in_tool_calls = starts_in_tool_calls
        self.parse_json_output = parse_json_output
        self.thinking_initial_stage = thinking_initial_stage
        self.stop_sequences = [] if stop_sequences is None else stop_sequences
        self.special_tokens = DEFAULT_SPECIAL_TOKENS if special_tokens is None else special_tokens
        self.malformed_calls = malformed_calls
        self.leaked_markup = leaked_markup

    @property
    def parse_tool_calls(self) -> bool:
        """Whether DSML markup becomes tool calls."""
        return self._parse_tool_calls

    @parse_tool_calls.setter
    def parse_tool_calls(self, value: bool) -> None:
        require_bool("parse_tool_calls", value)
        self._parse_tool_calls = value

    @property
    def starts_in_tool_calls(self) -> bool:
        """Whether the prompt already opened the block of calls, as for a required tool choice."""
        return self._starts_in_tool_calls

    @starts_in_tool_calls.setter
    def starts_in_tool_calls(self, value: bool) -> None:
        require_bool("starts_in_tool_calls", value)
        self._starts_in_tool_calls = value

    @property
    def parse_json_output(self) -> bool:
        """Whether the content is JSON, fenced or bare, and text around it is replaced by spaces."""
        return self._parse_json_output

    @parse_json_output.setter
    def parse_json_output(self, value: bool) -> None:
        require_bool("parse_json_output", value)
        self._parse_json_output = value

    @property
    def thinking_initial_stage(self) -> ThinkingInitialStage | None:
        """Where output begins when thinking is on. Set, it also makes usage report reasoning tokens."""
        return self._thinking_initial_stage

    @thinking_initial_stage.setter
    def thinking_initial_stage(self, value: ThinkingInitialStage | None) -> None:
        self._thinking_initial_stage = (
            None if value is None else require_instance("thinking_initial_stage", value, ThinkingInitialStage)
        )

    @property
    def stop_sequences(self) -> list[str]:
        """Texts that end the content, in order of precedence when two end at the same character. A copy."""
        return list(self._stop_sequences)

    @stop_sequences.setter
    def stop_sequences(self, value: Sequence[str]) -> None:
        stops = tuple(require_list("stop_sequences", value, str))
        for i, stop in enumerate(stops):
            require_str(f"stop_sequences[{i}]", stop)
        self._stop_sequences = stops

    @property
    def special_tokens(self) -> SpecialTokens:
        """The spellings of the end of thinking and of the DSML marker."""
        return self._special_tokens

    @special_tokens.setter
    def special_tokens(self, value: SpecialTokens) -> None:
        self._special_tokens = require_instance("special_tokens", value, SpecialTokens)

    @property
    def malformed_calls(self) -> MalformedCalls:
        """What to do with calls that deviate from the format."""
        return self._malformed_calls

    @malformed_calls.setter
    def malformed_calls(self, value: MalformedCalls) -> None:
        _one_of("malformed_calls", value, get_args(MalformedCalls))
        self._malformed_calls: MalformedCalls = value

    @property
    def leaked_markup(self) -> LeakedMarkup:
        """What to do with DSML markup while tool parsing is off."""
        return self._leaked_markup

    @leaked_markup.setter
    def leaked_markup(self, value: LeakedMarkup) -> None:
        _one_of("leaked_markup", value, get_args(LeakedMarkup))
        self._leaked_markup: LeakedMarkup = value

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-compatible values; `from_dict` reads them back."""
        stage = self._thinking_initial_stage
        return {
            "parse_tool_calls": self._parse_tool_calls,
            "starts_in_tool_calls": self._starts_in_tool_calls,
            "parse_json_output": self._parse_json_output,
            "thinking_initial_stage": None if stage is None else stage.name,
            "stop_sequences": list(self._stop_sequences),
            "special_tokens": {token.value: self._special_tokens.token(token) for token in SpecialToken},
            "malformed_calls": self._malformed_calls,
            "leaked_markup": self._leaked_markup,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ParsingOptions:
        """The options that `to_dict` wrote; absent keys take their defaults.

        Raises: TypeError for an unknown key or a wrong type, ValueError for an unknown word.
        """
        settings = dict(values)
        stage = settings.get("thinking_initial_stage")
        if stage is not None:
            names = tuple(member.name for member in ThinkingInitialStage)
            settings["thinking_initial_stage"] = ThinkingInitialStage[_one_of("thinking_initial_stage", stage, names)]
        if isinstance(settings.get("special_tokens"), Mapping):
            settings["special_tokens"] = SpecialTokens(**settings["special_tokens"])
        return cls(**settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParsingOptions) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # the settings can be assigned

    def __repr__(self) -> str:
        default = ParsingOptions()
        changed = [name for name in default.to_dict() if getattr(self, name) != getattr(default, name)]
        return f"ParsingOptions({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}")
    return value
