"""The stages of a model's output, and the markers that lead from one to the next.

    Reasoning ──</think>──▶ Content ──<｜DSML｜──▶ Calls ──invoke name="──▶ Name ──"──▶ Args ─┐
        └────────────<｜DSML｜───────────────────────▲ ▲                                      │
                                                       │ └──────────────</｜DSML｜─────────────┤
                                                       └─ </｜DSML｜ calls> ▶ Done             │
    Args ──parameter name=──▶ Key ──space──▶ Type ──true">──▶ String ──</｜DSML｜──▶ Args      │
                                               └──false">──▶ Value ──</｜DSML｜──▶ Args ◀──────┘

With JSON output, Content is Prose ──fence or bracket──▶ Json ──closing fence──▶ AfterJson. Both spellings of the tags
(V4 and V4.1) are accepted, and nothing leads out of Done. `<｜DSML｜` stands for "<" and the DSML special token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

from deepseek_recipe.enums import ThinkingInitialStage
from deepseek_recipe.streaming.markers import Marker, MarkerSet
from deepseek_recipe.streaming.options import ParsingOptions
from deepseek_recipe.tokens import SpecialToken

__all__ = ["Effect", "PartKind", "Rule", "Stage", "StageName", "reads_calls", "stages_for", "start_stage"]


class PartKind(Enum):
    """What a stretch of output is."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  # the text is the name of the function
    ARGUMENTS = "arguments"
    # Known inside the parser only:
    DROPPED = "dropped"
    SPACE = "space"  # content that JSON mode replaces by one space
    NAME = "name"  # collected until the call starts
    STRING = "string"  # arguments, to be escaped for a JSON string

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs Python code


class StageName(Enum):
    """One stage of the picture above. The `_FIRST` stages know that no parameter has been seen yet."""

    REASONING = "reasoning"
    CONTENT = "content"
    PROSE = "prose"
    JSON = "json"
    AFTER_JSON = "after json"
    CALLS = "calls"
    NAME = "name"
    ARGS_FIRST = "first argument"
    ARGS = "arguments"
    KEY = "key"
    TYPE = "type"
    STRING = "string"
    VALUE = "value"
    DONE = "done"


class Effect(Enum):
    """What a marker does besides changing the stage."""

    DROP = "drop"
    EMIT = "emit"  # write the text of the rule in place of the marker
    START_CALL = "start call"
    STOP = "stop"


@dataclass(frozen=True)
class Rule:
    """A marker, where it leads and what it writes."""

    marker: Marker
    target: StageName
    effect: Effect = Effect.DROP
    text: str = ""
    kind: PartKind = PartKind.DROPPED
    trim: bool = False  # the newlines that follow are dropped


class Stage:
    """A stage with its compiled markers. Text between markers is of kind `text_kind`."""

    __slots__ = ("is_trimming_stop", "markers", "name", "rules", "text_kind")

    def __init__(self, name: StageName, text_kind: PartKind, rules: Sequence[Rule]) -> None:
        self.name = name
        self.text_kind = text_kind
        self.rules = tuple(rules)
        self.markers = MarkerSet([rule.marker for rule in rules])
        # While leading newlines are dropped one by one, only a stop sequence of one newline can still match.
        self.is_trimming_stop = next(
            (rule for rule in rules if rule.effect is Effect.STOP and rule.marker.literal == "\n"), None
        )


def stages_for(options: ParsingOptions) -> Mapping[StageName, Stage]:
    """The stages that `options` asks for. Equal options share one compiled set."""
    spellings = options.special_tokens
    return _build(
        tuple(stop for stop in options.stop_sequences if stop),
        _opening_tags(options),
        options.parse_json_output,
        spellings.token(SpecialToken.ThinkingEnd),
        spellings.token(SpecialToken.Dsml),
    )


def start_stage(options: ParsingOptions) -> tuple[StageName, bool]:
    """Where parsing begins, and whether leading newlines are dropped there."""
    if options.starts_in_tool_calls:
        return StageName.CALLS, False
    content = StageName.PROSE if options.parse_json_output else StageName.CONTENT
    thinking = options.thinking_initial_stage
    if thinking is None:
        return content, True
    if thinking is ThinkingInitialStage.ContentContinuation:
        return content, False
    return StageName.REASONING, thinking is ThinkingInitialStage.ReasoningStart


_FENCE: Final = "```"


def reads_calls(options: ParsingOptions) -> bool:
    """Whether a `CallReader` takes the place of the stages from Calls on."""
    if options.parse_tool_calls or options.starts_in_tool_calls:
        return options.malformed_calls != "keep"
    return options.leaked_markup == "suppress"


def _opening_tags(options: ParsingOptions) -> tuple[str, ...]:
    """What leads to Calls, after "<" and the special token."""
    if reads_calls(options):
        return (" calls>", "tool_calls>", " invoke ", "invoke ", "calls>", " tool_calls>")
    return ("",) if options.parse_tool_calls else ()


@lru_cache(maxsize=32)
def _build(
    stops: tuple[str, ...], opening_tags: tuple[str, ...], parses_json: bool, thinking_end: str, dsml: str
) -> Mapping[StageName, Stage]:
    content = StageName.PROSE if parses_json else StageName.CONTENT
    end = Marker(thinking_end, special=(0, len(thinking_end)))
    end_after_newlines = Marker(thinking_end, special=(0, len(thinking_end)), after_newlines=True)
    openings = [Marker(f"<{dsml}{tag}", special=(1, 1 + len(dsml)), after_newlines=True) for tag in opening_tags]

    stop_rules = [Rule(Marker(stop), StageName.DONE, Effect.STOP) for stop in stops]
    open_rules = [Rule(opening, StageName.CALLS) for opening in openings]
    stages = [
        Stage(StageName.REASONING, PartKind.REASONING, [Rule(end_after_newlines, content, trim=True), *open_rules]),
        Stage(StageName.CONTENT, PartKind.CONTENT, [*stop_rules, *open_rules, Rule(end, content)]),
        Stage(StageName.PROSE, PartKind.SPACE, [*_json_openings(), *open_rules, Rule(end, content)]),
        Stage(
            StageName.JSON,
            PartKind.CONTENT,
            [*stop_rules, Rule(Marker(f"\n{_FENCE}"), StageName.AFTER_JSON)],
        ),
        Stage(StageName.AFTER_JSON, PartKind.SPACE, open_rules),
        *_call_stages(dsml),
    ]
    return {stage.name: stage for stage in stages}


def _json_openings() -> list[Rule]:
    fences = [Rule(Marker(f"{_FENCE}{language}\n"), StageName.JSON) for language in ("json", "")]
    return fences + [Rule(Marker(bracket), StageName.JSON, Effect.EMIT, bracket, PartKind.CONTENT) for bracket in "{["]


def _call_stages(dsml: str) -> list[Stage]:
    def closing(tag: str = "") -> Marker:
        return Marker(f"</{dsml}{tag}", special=(2, 2 + len(dsml)))

    def writes(marker: Marker, target: StageName, text: str) -> Rule:
        return Rule(marker, target, Effect.EMIT, text, PartKind.ARGUMENTS)

    parameter = Marker("parameter name=")
    return [
        Stage(
            StageName.CALLS,
            PartKind.DROPPED,
            [
                Rule(Marker('invoke name="'), StageName.NAME),
                Rule(closing("tool_calls>"), StageName.DONE),
                Rule(closing(" calls>"), StageName.DONE),
            ],
        ),
        Stage(StageName.NAME, PartKind.NAME, [Rule(Marker('"'), StageName.ARGS_FIRST, Effect.START_CALL)]),
        Stage(
            StageName.ARGS_FIRST,
            PartKind.DROPPED,
            [writes(parameter, StageName.KEY, "{"), writes(closing(), StageName.CALLS, "{}")],
        ),
        Stage(
            StageName.ARGS,
            PartKind.DROPPED,
            [writes(parameter, StageName.KEY, ", "), writes(closing(), StageName.CALLS, "}")],
        ),
        Stage(StageName.KEY, PartKind.ARGUMENTS, [writes(Marker(" "), StageName.TYPE, ": ")]),
        Stage(
            StageName.TYPE,
            PartKind.DROPPED,
            [writes(Marker('true">'), StageName.STRING, '"'), Rule(Marker('false">'), StageName.VALUE)],
        ),
        Stage(StageName.STRING, PartKind.STRING, [writes(closing(), StageName.ARGS, '"')]),
        Stage(StageName.VALUE, PartKind.ARGUMENTS, [Rule(closing(), StageName.ARGS)]),
        Stage(StageName.DONE, PartKind.DROPPED, []),
    ]
