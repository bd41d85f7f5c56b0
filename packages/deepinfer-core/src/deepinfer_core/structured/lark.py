r"""`lark_dialect`: a Lark grammar as llguidance's dialect of it.

    ?start: value -> top          start: value          marks and aliases only shape trees
    !rule.2: "a"                  rule: "a"             so do priorities of rules, in a parser that follows every way
    x: item~2..5  y~3             x: item{2,5}  y{3}
    A: "0".."9"                   as it is: terminals, flags, %ignore, %import common.NAME and nested groups agree

    x: <[9]> %json {..}       as it is: a special token by its id; a JSON Schema, checked like one that stands alone

Terminals are matched at their longest, as Lark's lexers do. Ignored text comes between two terminals, never before the
first or after the last: a model could begin or end with white space for ever. Refused: priorities of terminals,
templates, %declare, %extend, %override and imports from files, since leaving them out would change the language; and
llguidance's other additions (%llguidance, rule[...]), which could switch limits off.
"""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.forcing import Fixed, fixed_in_lark
from deepinfer_core.structured.json_schema import CheckedSchema, check_schema
from deepinfer_core.structured.limits import MAX_NESTING, MAX_RULES
from deepinfer_core.structured.regex import portable_regex

__all__ = ["LarkText", "is_lark", "lark_dialect"]

_TOKEN: Final = re.compile(
    r"""(?P<space>(?:[ \t\r\f]|//[^\n]*|\#[^\n]*)+)
      | (?P<newline>\n)
      | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
      | (?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
      | (?P<embedded>%json(?=[ \t]*\{))
      | (?P<special><\[\d{1,9}\]>)
      | (?P<directive>%[a-z_]+)
      | (?P<alias>->[ \t]*[A-Za-z_]\w*)
      | (?P<tilde>~[ \t]*(?P<low>\d+)(?:[ \t]*\.\.[ \t]*(?P<high>\d+))?)
      | (?P<range>\.\.)
      | (?P<name>[?!]*[A-Za-z_]\w*)
      | (?P<priority>\.-?\d+)
      | (?P<counted>\{[ \t]*(?:\d+[ \t]*(?:,[ \t]*\d*)?|,[ \t]*\d+)[ \t]*\})
      | (?P<sign>[:|()\[\]*+?,.<>={}])""",
    re.VERBOSE,
)
_DEFINES: Final = re.compile(r"^[ \t]*[?!]*[A-Za-z_]\w*(?:\.-?\d+|\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*:(?!:)", re.MULTILINE)
_DEFINES_GBNF: Final = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
_REFUSED_SIGNS: Final = {"<": "a special token", "{": "a template or embedded grammar", "=": "an attribute"}
_DIRECTIVES: Final = ("%import", "%ignore")


def is_lark(text: str) -> bool:
    """Whether `text` is Lark (`name: ...`) rather than GBNF (`name ::= ...`)."""
    return bool(_DEFINES.search(text)) and not _DEFINES_GBNF.search(text)


class LarkText(NamedTuple):
    """A grammar for llguidance, and what its fixed texts are."""

    text: str
    fixed: Fixed


def lark_dialect(text: str) -> LarkText:
    """`text` for llguidance. Raises GrammarError that names the construct and the line."""
    lines: list[str] = []
    line = depth = num_rules = 0
    parts: list[str] = []
    tokens = _tokens(text)
    fixed = fixed_in_lark(tokens)
    for match in tokens:
        kind, token = str(match.lastgroup), match[0]
        if kind == "newline":
            lines.append("".join(parts))
            parts = []
            line += 1
            continue
        depth += (token in "([") - (token in ")]") if kind == "sign" else 0
        if depth > MAX_NESTING:
            raise GrammarError(f"structured.grammar nests groups deeper than {MAX_NESTING} in line {line + 1}")
        num_rules += token == ":"
        if kind == "embedded":
            schema = _embedded_schema(text, match.end())
            parts.append("%json " + json.dumps(schema.compiled(), ensure_ascii=False))
            fixed = schema.fixed if fixed is Fixed.SHORT else fixed
            line += text.count("\n", match.end(), _schema_end(text, match.end()))
            continue
        head = "".join(parts[:3])  # the name of a definition, or a directive
        parts.append(_converted(kind, match, head, text[match.end() : match.end() + 1], line + 1))
    lines.append("".join(parts))
    if num_rules > MAX_RULES:
        raise GrammarError(f"structured.grammar has {num_rules} rules; at most {MAX_RULES} are allowed")
    return LarkText("\n".join(lines) + "\n", fixed)


def _tokens(text: str) -> list[re.Match[str]]:
    found: list[re.Match[str]] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            line = text.count("\n", 0, at) + 1
            raise GrammarError(f"structured.grammar has {text[at : at + 20]!r} in line {line}, which is not Lark")
        found.append(match)
        at = _schema_end(text, match.end()) if match.lastgroup == "embedded" else match.end()
    return found


def _schema_end(text: str, at: int) -> int:
    """Where the JSON object behind `%json` ends."""
    start = text.index("{", at)
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        line = text.count("\n", 0, at) + 1
        raise GrammarError(f"structured.grammar has a %json in line {line} that is no JSON object: {error}") from error
    return end


def _embedded_schema(text: str, at: int) -> CheckedSchema:
    return check_schema(text[text.index("{", at) : _schema_end(text, at)])


def _converted(kind: str, match: re.Match[str], head: str, following: str, line: int) -> str:
    """head: how the line begins, as far as the token."""
    token = match[0]
    at_start = not head.strip()
    match kind:
        case "space":
            return " "
        case "alias":
            return token if head.lstrip().startswith("%import") else " "  # there it is the name to use
        case "name":
            bare = token.lstrip("?!")
            if at_start and following == "[":
                raise _refused(f"the attributes of {bare}", line)
            return bare
        case "priority":
            if head.strip()[:1].isupper() or head.strip()[:2].strip("_").isupper():
                raise _refused(f"the priority {token} of the terminal {head.strip()}", line)
            return ""
        case "directive":
            if token not in _DIRECTIVES:
                raise _refused(token, line)
            return token
        case "tilde":
            return f"{{{match['low']},{match['high']}}}" if match["high"] else f"{{{match['low']}}}"
        case "regex":
            body, _, flags = token[1:].rpartition("/")
            return f"/{portable_regex(body, f'the expression in line {line}').text}/{flags}"
        case "sign":
            if token in _REFUSED_SIGNS:
                raise _refused(_REFUSED_SIGNS[token], line)
            return token
        case _:
            return token


def _refused(what: str, line: int) -> GrammarError:
    return GrammarError(f"structured.grammar has {what} in line {line}, which cannot be enforced; write it out instead")
