"""The state machine that splits model output into reasoning, content and calls.

    unit   = what arrives together: one text chunk, one run of ordinary token ids, one special token
    feed   : unit → [part]        a part is a stretch of one kind, or the fixed text that a marker writes

            settled                   position
    ─────────┼──────────────────────────┼──▶
     emitted │ held: may yet be a marker│

A part never spans units. While the tail of a unit is held, the last part before it is held too, so that a delta is
not torn apart by a marker that turns out to be none. A marker's fixed text belongs to the unit in which it began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any, NamedTuple

from deepseek_recipe.streaming.calls import CallReader, Mode
from deepseek_recipe.streaming.markers import Marker, Origin
from deepseek_recipe.streaming.options import ParsingOptions
from deepseek_recipe.streaming.stages import (
    Effect,
    PartKind,
    Rule,
    Stage,
    StageName,
    reads_calls,
    stages_for,
    start_stage,
)
from deepseek_recipe.tokens import SpecialToken

__all__ = ["OutputParser", "Part", "public_part"]

_QUIET_KINDS = (PartKind.REASONING, PartKind.CONTENT, PartKind.ARGUMENTS, PartKind.STRING)
_READER_CHARACTERS = 4096  # given to a reader of calls at once, which looks at all of it again after each block
_TRIMMED_NEWLINE = Rule(Marker("\n"), StageName.CONTENT)


class Part(NamedTuple):
    """A stretch of output of one public kind. `logprobs` are those of the whole unit that it is from."""

    kind: PartKind
    text: str
    logprobs: Any


class _Unit:
    """Text that arrived together and the parts known so far. `is_assigned`: an empty unit has found its place."""

    __slots__ = ("end", "is_assigned", "logprobs", "parts", "start", "text")

    def __init__(self, text: str, start: int, logprobs: Any) -> None:
        self.text = text
        self.start = start
        self.end = start + len(text)
        self.logprobs = logprobs
        self.is_assigned = bool(text)
        self.parts: list[_OpenPart] = []


class _OpenPart:
    """A part that may still grow, unless a marker wrote it."""

    __slots__ = ("is_fixed", "kind", "pieces")

    def __init__(self, kind: PartKind, text: str, is_fixed: bool) -> None:
        self.kind = kind
        self.pieces = [text]
        self.is_fixed = is_fixed


class OutputParser:
    """Splits one response. Not reusable.

    `quiet_search` is set while nothing is held and text is passed on: a unit in which it finds nothing may be emitted
    as one part, `public_part(quiet_kind, text)`, without asking the parser.
    """

    def __init__(self, options: ParsingOptions) -> None:
        self._stages = stages_for(options)
        name, self._trims_newlines = start_stage(options)
        self._stage: Stage = self._stages[name]
        self._state = self._stage.markers.root
        self._content = StageName.PROSE if options.parse_json_output else StageName.CONTENT
        self._calls_mode: Mode | None = None
        self._hides_calls = not (options.parse_tool_calls or options.starts_in_tool_calls)
        self._dsml = options.special_tokens.token(SpecialToken.Dsml)
        self._reader: CallReader | None = None
        if reads_calls(options):
            self._calls_mode = "reject" if options.malformed_calls == "reject" and not self._hides_calls else "repair"
            if name is StageName.CALLS:
                self._reader = CallReader(self._calls_mode, self._dsml)
        self._open_units: deque[_Unit] = deque()
        self._finished_units: list[_Unit] = []
        self._settled = 0
        self._position = 0
        self._run_starts = [0] * len(self._stage.rules)
        self._last_kind: PartKind | None = None  # of the last text or marker; where an empty unit belongs
        self._name: list[str] = []
        self.stop_sequence: str | None = None
        self.quiet_search: Callable[..., object] | None = None
        self.quiet_kind = PartKind.CONTENT

    def feed(self, text: str, origin: Origin = Origin.TEXT, logprobs: Any = None) -> list[Part]:
        """The parts that `text` completes. After a stop sequence everything is ignored."""
        if self.stop_sequence is not None:
            return []
        unit = _Unit(text, self._position, logprobs)
        self._open_units.append(unit)
        if origin is Origin.SPECIAL_TOKEN:
            self._scan_special(unit)
        elif text:
            self._scan(unit, origin)
        else:
            self._place_empty(unit)
        self._settle_up_to_held()
        parts = self._take_parts()
        self._update_quiet()
        return parts

    def flush(self) -> list[Part]:
        """The parts of what is held, as it stands. The end of the stream."""
        if self._position > self._settled:
            self._settle(self._position)
        parts = self._take_parts()
        if self._reader is not None and not self._hides_calls:
            parts += [Part(kind, text, None) for kind, text in self._reader.flush()]
        return parts

    def _scan(self, unit: _Unit, origin: Origin) -> None:
        """Step through a unit of text or ordinary tokens, skipping what cannot begin a marker."""
        text, length = unit.text, len(unit.text)
        i = self._skip(unit, 0, origin)
        markers, state = self._stage.markers, self._state
        while i < length and self.stop_sequence is None:
            if state is markers.root:
                start = markers.find_start(text, i)
                if start is None:
                    break
                i = start.start()
            state = markers.step(state, text[i], origin)
            i += 1
            for marker in state.new_runs:
                self._run_starts[marker] = unit.start + i - 1
            if state.matched >= 0:
                self._state = state
                self._position = unit.start + i
                self._match(self._stage.rules[state.matched])
                i = self._skip(unit, i, origin)
                markers, state = self._stage.markers, self._state
        self._state = state
        if self.stop_sequence is None:
            self._position = unit.end

    def _skip(self, unit: _Unit, i: int, origin: Origin) -> int:
        """The index at which markers are to be looked for again, behind a block of calls and newlines."""
        if self._reader is not None and i < len(unit.text):
            i = self._read_calls(self._reader, unit, i, origin)
        return self._trim(unit.text, i) if self._trims_newlines and i < len(unit.text) else i

    def _read_calls(self, reader: CallReader, unit: _Unit, i: int, origin: Origin) -> int:
        while i < len(unit.text) and self._reader is reader:
            parts, consumed = reader.feed(unit.text[i : i + _READER_CHARACTERS], origin)
            if not self._hides_calls:
                unit.parts += [_OpenPart(kind, text, is_fixed=True) for kind, text in parts]
            i += consumed
            if reader.is_closed and self._calls_mode != "reject":
                self._reader = None
                self._enter(self._content, trims_newlines=True)
        self._position = self._settled = unit.start + i
        self._last_kind = PartKind.DROPPED
        self._retire_units()
        return i

    def _scan_special(self, unit: _Unit) -> None:
        if self._reader is not None:
            self._read_calls(self._reader, unit, 0, Origin.SPECIAL_TOKEN)
            return
        self._trims_newlines = False
        self._state = self._stage.markers.step_special(self._state, unit.text)
        self._position = unit.end
        if self._state.matched >= 0:
            self._match(self._stage.rules[self._state.matched])

    def _trim(self, text: str, i: int = 0) -> int:
        """Drop newlines from `i` on, each as a marker of its own; the index of the first character that is none."""
        base = self._position - i
        while i < len(text) and text[i] == "\n" and self.stop_sequence is None:
            i += 1
            self._position = base + i
            self._write_marker(self._stage.is_trimming_stop or _TRIMMED_NEWLINE, self._position - 1)
        self._trims_newlines = i == len(text)
        return i

    def _match(self, rule: Rule) -> None:
        """Act on the marker that ends at the present position."""
        index = self._state.matched
        _, in_run = self._state.candidates[index]
        start = self._run_starts[index] if in_run else self._position - len(rule.marker.literal)
        if start > self._settled:
            self._settle(start)
        self._write_marker(rule, start)
        if rule.effect is not Effect.STOP:
            self._enter(rule.target, rule.trim)
            if rule.target is StageName.CALLS and self._calls_mode is not None:
                self._reader = CallReader(self._calls_mode, self._dsml, rule.marker.literal)

    def _enter(self, name: StageName, trims_newlines: bool) -> None:
        self._stage = self._stages[name]
        self._state = self._stage.markers.root
        self._run_starts = [0] * len(self._stage.rules)
        self._trims_newlines = trims_newlines

    def _write_marker(self, rule: Rule, start: int) -> None:
        """Put what a marker writes into the unit in which it began, and swallow its characters."""
        text, kind = rule.text, rule.kind
        if rule.effect is Effect.START_CALL:
            text, kind = "".join(self._name), PartKind.CALL
            self._name.clear()
        elif rule.effect is Effect.STOP:
            self.stop_sequence = rule.marker.literal
        first = next(unit for unit in self._open_units if unit.end > start)
        first.parts.append(_OpenPart(kind, text, is_fixed=True))
        for unit in self._open_units:
            unit.is_assigned = True
        self._settled = self._position
        self._last_kind = PartKind.DROPPED
        self._retire_units()

    def _place_empty(self, unit: _Unit) -> None:
        """An empty unit goes on with what came last; at the very start it waits for what comes first."""
        if self._position > self._settled or self._last_kind is None:
            return
        unit.is_assigned = True
        if self._last_kind is not PartKind.DROPPED:
            unit.parts.append(_OpenPart(self._last_kind, "", is_fixed=False))
        self._retire_units()

    def _settle_up_to_held(self) -> None:
        state = self._state
        held_from = self._position - state.progress
        for marker in state.runs:
            held_from = min(held_from, self._run_starts[marker])
        if held_from > self._settled:
            self._settle(held_from)

    def _settle(self, end: int) -> None:
        """Give the characters from `settled` to `end` to their units, as text of the present stage."""
        kind, start = self._stage.text_kind, self._settled
        for unit in self._open_units:
            if unit.start > end or (unit.start == end and unit.text):
                break
            text = unit.text[max(0, start - unit.start) : end - unit.start]
            if kind is PartKind.NAME:
                self._name.append(text)
            last = unit.parts[-1] if unit.parts else None
            if last is not None and last.kind is kind and not last.is_fixed:
                last.pieces.append(text)
            else:
                unit.parts.append(_OpenPart(kind, text, is_fixed=False))
            unit.is_assigned = True
        self._settled = end
        self._last_kind = kind
        self._retire_units()

    def _retire_units(self) -> None:
        units = self._open_units
        while units and units[0].end <= self._settled and units[0].is_assigned:
            self._finished_units.append(units.popleft())

    def _take_parts(self) -> list[Part]:
        """Remove and return what can be emitted: finished units, and the first open one without its last part."""
        if self.stop_sequence is not None:
            self._finished_units += self._open_units
            self._open_units.clear()
        taken: list[Part] = []
        for unit in self._finished_units:
            taken += _public_parts(unit, len(unit.parts))
        self._finished_units.clear()
        if self._open_units:
            unit = self._open_units[0]
            taken += _public_parts(unit, len(unit.parts) - 1)
            del unit.parts[:-1]
        return taken

    def _update_quiet(self) -> None:
        stage = self._stage
        is_quiet = (
            stage.text_kind in _QUIET_KINDS
            and not self._open_units
            and not self._trims_newlines
            and self._state is stage.markers.root
            and self._last_kind is stage.text_kind
            and self.stop_sequence is None
        )
        self.quiet_search = stage.markers.find_start if is_quiet else None
        self.quiet_kind = stage.text_kind


def _public_parts(unit: _Unit, count: int) -> list[Part]:
    """The first `count` parts of `unit` in their public form."""
    taken: list[Part] = []
    for part in unit.parts[: max(count, 0)]:
        kind = part.kind
        if kind is PartKind.DROPPED or kind is PartKind.NAME:
            continue
        kind, text = public_part(kind, "".join(part.pieces))
        taken.append(Part(kind, text, unit.logprobs))
    return taken


def public_part(kind: PartKind, text: str) -> tuple[PartKind, str]:
    """A part of a kind that only the parser knows, as the generators see it."""
    if kind is PartKind.STRING:
        return PartKind.ARGUMENTS, encode_basestring(text)[1:-1]
    if kind is PartKind.SPACE:
        return PartKind.CONTENT, " "
    return kind, text
