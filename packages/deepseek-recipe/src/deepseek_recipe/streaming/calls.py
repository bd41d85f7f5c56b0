"""A block of calls, read strictly or mended: what `malformed_calls` "repair" and "reject" do instead of the stages.

    block     = call* </◇ calls>                                        ◇ is the DSML special token
    call      = <◇ invoke name="NAME"> parameter* </◇ invoke>
    parameter = <◇ parameter name="KEY" string="true|false"> value </◇ parameter>

Both spellings of the tags are read (V4: no space after ◇, `tool_calls`). Strings stream as they come; other values are
held until they are complete, because they must be JSON. Mended:

| deviation | repair | reject |
| --- | --- | --- |
| unclosed parameter, call or block | closed | error |
| value that is not JSON | becomes a string | error |
| missing or odd `string` attribute | JSON if it is, else a string | error |
| attributes in another order, extra ones, single quotes | read | error |
| spaces in a name | kept | error in the name of a function |
| parameter given twice | the first counts | error |
| call without a name | left out | error |
| text between the tags, unknown tags | left out | error |
| text or another block after the block | content, more calls | error |
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring
from typing import Final, Literal

from deepseek_recipe.checks import shown
from deepseek_recipe.errors import MalformedToolCallError
from deepseek_recipe.json_text import JsonTextError, loads
from deepseek_recipe.streaming.markers import Origin
from deepseek_recipe.streaming.stages import PartKind

__all__ = ["CallReader", "Mode"]

Mode = Literal["repair", "reject"]

# One character that stands for the special token; a noncharacter, which no text may contain.
_DSML: Final = "\ufdd0"
_MAX_TAG: Final = 1024  # characters from "<" to ">"; longer is no tag

_CLOSINGS: Final = tuple(
    f"</{_DSML}{gap}{tag}>" for gap in (" ", "") for tag in ("parameter", "invoke", "calls", "tool_calls")
)
_LONGEST_CLOSING: Final = max(map(len, _CLOSINGS))
_CLOSING = re.compile(f"</{_DSML} ?(parameter|invoke|calls|tool_calls)>")
_OPENING = re.compile(f"<{_DSML} ?(invoke|parameter|calls|tool_calls)\\b(.*)>", re.DOTALL)
_STRICT_INVOKE = re.compile(r' name="([^\s"\'<>]+)"')
_STRICT_PARAMETER = re.compile(r' name="([^"<>]*)" string="(true|false)"')
_ATTRIBUTE_END: Final = r"(?=\s+\w+\s*=|\s*$)"
_NAME = re.compile(rf"\bname\s*=\s*(?:\"(.*?)\"|'(.*?)'|([^\s\"']+)){_ATTRIBUTE_END}", re.DOTALL)
_LOOSE_NAME = re.compile(r"\bname\s*=\s*[\"']?([^\"'>]*)", re.DOTALL)
_IS_STRING = re.compile(r"\bstring\s*=\s*[\"']?(true|false)\b")


class CallReader:
    """Reads one block. `is_closed` once its end was seen; in "reject" mode it then refuses everything but whitespace.

    `opening` is the text that led here: the tag of a block, or the beginning of a call without one.
    """

    def __init__(self, mode: Mode, dsml: str, opening: str = "") -> None:
        self._rejects = mode == "reject"
        self._dsml = dsml
        self._spelled = ""  # text that may become the spelling of the special token
        self._buffer = ""
        self._at = 0  # what of the buffer has been read
        self._parts: list[tuple[PartKind, str]] = []
        self._keys: set[str] | None = None  # of the open call
        self._value: _Value | None = None
        self.is_closed = False
        if "invoke" in opening:
            self._deviate(f"a call outside of a block: {opening.strip()!r}")
            self._buffer = opening.lstrip("\n").replace(dsml, _DSML)

    def feed(self, text: str, origin: Origin) -> tuple[list[tuple[PartKind, str]], int]:
        """The parts that `text` completes, and how much of it belongs to the block.

        Raises: MalformedToolCallError in "reject" mode.
        """
        self._buffer = self._buffer[self._at :] + self._with_marks(text, origin)
        self._at = 0
        while not self.is_closed and self._step():
            pass
        consumed = len(text)
        if self.is_closed:
            rest, self._at = self._buffer[self._at :], len(self._buffer)
            if self._rejects:
                self._require_blank(rest + self._spelled, "after the block of calls")
            else:
                consumed -= len(rest.replace(_DSML, self._dsml)) + len(self._spelled)
        parts, self._parts = self._parts, []
        return parts, max(consumed, 0)

    def flush(self) -> list[tuple[PartKind, str]]:
        """The parts that the end of the output completes.

        Raises: MalformedToolCallError in "reject" mode, if the block is open.
        """
        if not self.is_closed:
            self._deviate("the output ends inside a block of calls")
            if self._value is not None:
                rest = self._buffer[self._at :]
                self._add_to_value("" if rest.startswith("</") else rest + self._spelled)
                self._end_value()
            self._end_call()
            self.is_closed = True
        parts, self._parts = self._parts, []
        return parts

    def _with_marks(self, text: str, origin: Origin) -> str:
        """`text` with the special token as one character. Ordinary token ids never spell it."""
        if origin is Origin.SPECIAL_TOKEN:
            spelled, self._spelled = self._spelled, ""
            return spelled + (_DSML if text == self._dsml else text)
        text = text.replace(_DSML, "\ufffd")
        if origin is Origin.PLAIN_TOKENS:
            spelled, self._spelled = self._spelled, ""
            return spelled + text
        text = (self._spelled + text).replace(self._dsml, _DSML)
        start = _partial_start(text, self._dsml)
        self._spelled = text[start:]
        return text[:start]

    def _step(self) -> bool:
        """Take one tag or stretch of text from the buffer; False if it needs more text."""
        if self._value is not None:
            return self._step_in_value()
        buffer, at = self._buffer, self._at
        start = buffer.find("<", at)
        if start != at:
            self._at = len(buffer) if start < 0 else start
            self._require_blank(buffer[at : self._at], "between the tags of calls")
            return start > 0
        end = buffer.find(">", at, at + _MAX_TAG)
        if end < 0:
            if len(buffer) - at < _MAX_TAG:
                return False
            end = at  # too long for a tag: the "<" is junk
        self._at = end + 1
        self._read_tag(buffer[at : end + 1])
        return True

    def _step_in_value(self) -> bool:
        buffer, at = self._buffer, self._at
        closing = _CLOSING.search(buffer, at)
        if closing is None:
            start = buffer.rfind("<", at)
            tail = buffer[start:] if start >= 0 and len(buffer) - start < _LONGEST_CLOSING else ""
            self._at = start if tail and any(tag.startswith(tail) for tag in _CLOSINGS) else len(buffer)
            self._add_to_value(buffer[at : self._at])
            return False
        self._at = closing.end()
        self._add_to_value(buffer[at : closing.start()])
        self._end_value()
        if closing[1] != "parameter":
            self._deviate(f"a parameter that is closed by {closing[1]!r}")
            self._close(closing[1])
        return True

    def _read_tag(self, tag: str) -> None:
        closing = _CLOSING.fullmatch(tag)
        if closing is not None:
            self._close(closing[1])
            return
        opening = _OPENING.fullmatch(tag)
        kind = "" if opening is None else opening[1]
        if opening is not None and kind == "invoke":
            self._start_call(opening[2])
        elif opening is not None and kind == "parameter":
            self._start_parameter(opening[2])
        else:
            self._deviate(f"an unknown tag {self._shown(tag)}")

    def _close(self, kind: str) -> None:
        if kind == "parameter" or (kind == "invoke" and self._keys is None):
            self._deviate(f"a closing {kind!r} that nothing opened")
        elif kind == "invoke":
            self._end_call()
        else:
            if self._keys is not None:
                self._deviate("a call that is not closed")
            self._end_call()
            self.is_closed = True

    def _start_call(self, attributes: str) -> None:
        if self._keys is not None:
            self._deviate("a call inside a call")
            self._end_call()
        strict = _STRICT_INVOKE.fullmatch(attributes)
        if strict is None:
            self._deviate(f"a call whose name cannot be read: {self._shown(attributes)}")
        name = (strict[1] if strict else _name(attributes)).replace(_DSML, self._dsml)
        if name:
            self._keys = set()
            self._parts.append((PartKind.CALL, name))

    def _start_parameter(self, attributes: str) -> None:
        strict = _STRICT_PARAMETER.fullmatch(attributes)
        if strict is None:
            self._deviate(f"a parameter whose attributes cannot be read: {self._shown(attributes)}")
        is_string = _IS_STRING.search(attributes)
        self._value = _Value(None if is_string is None else is_string[1] == "true")
        if self._keys is None:
            self._deviate("a parameter outside of a call")
            self._value.is_ignored = True
            return
        key = (strict[1] if strict else _name(attributes)).replace(_DSML, self._dsml)
        if key in self._keys:
            self._deviate(f"parameter {shown(key)} given twice")
            self._value.is_ignored = True
            return
        lead = ", " if self._keys else "{"
        self._keys.add(key)
        quote = '"' if self._value.is_string else ""
        self._write(f"{lead}{encode_basestring(key)}: {quote}")

    def _add_to_value(self, text: str) -> None:
        value = self._value
        if _DSML in text:
            self._deviate("the special token inside a value")
        if value is None or value.is_ignored or not text:
            return
        text = text.replace(_DSML, self._dsml)
        if value.is_string:
            self._write(encode_basestring(text)[1:-1])
        else:
            value.pieces.append(text)

    def _end_value(self) -> None:
        value, self._value = self._value, None
        if value is None or value.is_ignored:
            return
        if value.is_string:
            self._write('"')
            return
        text = "".join(value.pieces)
        try:
            loads(text)
        except JsonTextError as error:
            if value.is_string is not None:
                self._deviate(f"a value that is not JSON ({error}): {self._shown(text)}")
            text = encode_basestring(text)
        self._write(text)

    def _end_call(self) -> None:
        if self._keys is not None:
            self._write("}" if self._keys else "{}")
            self._keys = None

    def _write(self, text: str) -> None:
        self._parts.append((PartKind.ARGUMENTS, text))

    def _require_blank(self, text: str, where: str) -> None:
        if text and not text.isspace():
            self._deviate(f"text {where}: {self._shown(text)}")

    def _shown(self, text: str) -> str:
        text = text.replace(_DSML, self._dsml)
        return repr(text if len(text) <= 80 else f"{text[:80]}...")

    def _deviate(self, what: str) -> None:
        if self._rejects:
            raise MalformedToolCallError(f'{what}; parse with malformed_calls="repair" or "keep" to accept it')


class _Value:
    """The value that is being read. `is_string` None: the model did not say."""

    __slots__ = ("is_ignored", "is_string", "pieces")

    def __init__(self, is_string: bool | None) -> None:
        self.is_string = is_string
        self.is_ignored = False
        self.pieces: list[str] = []


def _name(attributes: str) -> str:
    found = _NAME.search(attributes)
    if found is not None:
        return next(group for group in found.groups() if group is not None).strip()
    loose = _LOOSE_NAME.search(attributes)
    return "" if loose is None else loose[1].strip()


def _partial_start(text: str, spelling: str) -> int:
    """Where the longest end of `text` that begins `spelling` starts; the length of `text` if there is none."""
    for start in range(max(0, len(text) - len(spelling) + 1), len(text)):
        if spelling.startswith(text[start:]):
            return start
    return len(text)
