r"""Output constraints as grammars that an engine can enforce.

    json, regex                   the schema or the expression itself
    tool_call, tool_call_required a Lark grammar (llguidance dialect) of a block of calls in DSML form

    start: TEXT | TEXT_LT D "tool_calls>\n" calls "</" D "tool_calls>"      TEXT_LT: text that ends with "<"
    call:  "<" D "invoke name=\"f\">\n" parameters "</" D "invoke>\n"       D: the DSML marker
    a parameter of type string      "<" D "parameter name=\"p\" string=\"true\">" raw text up to "</" D "parameter>\n"
    a parameter of another type     "<" D "parameter name=\"p\" string=\"false\">" JSON of its schema "</" D ...

Parameters come in the order of `properties`; required ones must, the others may appear; behind them anything goes
unless `additionalProperties` is false. As a special token D cannot occur inside text, so raw strings need no escaping.
`format` is an annotation, as JSON Schema has it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from deepseek_recipe.checks import shown
from deepseek_recipe.enums import ModelVersion
from deepseek_recipe.json_text import compact, is_array, is_object, loads
from deepseek_recipe.protocol_data import V4_DSML_TAGS, V41_DSML_TAGS, DsmlTags
from deepseek_recipe.schema.limits import SchemaError
from deepseek_recipe.tokens import SpecialToken

if TYPE_CHECKING:
    from deepseek_recipe.requests.result import OutputConstraint
    from deepseek_recipe.tokenizer import Tokenizer

__all__ = ["Grammar", "compile_constraint"]

_MAX_ALTERNATIVES = 1_000
_MAX_GRAMMAR_CHARS = 2**23
_MAX_REF_STEPS = 64
_ANY_TEXT = r"(?s:.*)"
_PATTERN_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!]|.", re.DOTALL)
_LOOKS_AROUND = frozenset(("^", "$", r"\b", r"\B", "(?=", "(?!", "(?<=", "(?<!"))
_ASCII_SETS = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}
_RUST_WORDS = {**_ASCII_SETS, "/": r"\/", "\n": r"\n"}
_MARK = '"'
_CLOSE = ">\n"
_STRING = json.dumps('string="true">')
_NO_STRING = json.dumps('string="false">')


class Grammar(msgspec.Struct, frozen=True):
    """A compiled constraint.

    `text` is a JSON Schema, a regular expression or a Lark grammar, by `kind`. With `after` the output is free up to
    and including that special token (the end of thinking), and the grammar begins behind it.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    after: SpecialToken | None = None


def compile_constraint(constraint: OutputConstraint, tokenizer: Tokenizer | None = None) -> Grammar:
    """The grammar of a constraint.

    With a `tokenizer` the DSML marker is written as its token id, which nothing but the marker can match; without, as
    text. SchemaError names what cannot be enforced.
    """
    after = SpecialToken.ThinkingEnd if constraint.after_thinking else None
    if constraint.kind == "json":
        return Grammar("json_schema", constraint.schema or '{"type":"object"}', after)
    if constraint.kind == "regex":
        return Grammar("regex", constraint.schema, after)
    spelling = SpecialToken.Dsml.default_str()
    marker = _quoted(spelling) if tokenizer is None else f"<[{tokenizer.special_token_id(spelling)}]>"
    tags = V4_DSML_TAGS if constraint.model_version is ModelVersion.DeepseekV4Pro else V41_DSML_TAGS
    functions = [entry["function"] for entry in loads(constraint.schema)]
    return Grammar("lark", _CallGrammar(marker, tags).text(functions, constraint), after)


class _CallGrammar:
    """Writes the rules of a block of calls."""

    def __init__(self, marker: str, tags: DsmlTags) -> None:
        self._marker = marker
        self._tags = tags
        self._rules: list[str] = []
        self._num_chars = 0

    def text(self, functions: list[dict[str, Any]], constraint: OutputConstraint) -> str:
        """The whole grammar."""
        block, marker = self._tags.block, self._marker
        calls = "call+" if constraint.parallel_tool_calls else "call"
        body = f'{calls} "</" {marker} {_quoted(block + ">")}'
        opened = f"{marker} {_quoted(block + _CLOSE)} {body}"
        if constraint.kind == "tool_call":
            start = f"TEXT | TEXT_LT {opened}"
        elif constraint.after_thinking:
            start = f'BLANK "<" {opened}'
        else:
            start = body  # the prompt opened the block
        names = [self._call(index, function) for index, function in enumerate(functions)]
        head = [f"start: {start}", f"call: {' | '.join(names)}"]
        terminals = [
            f"TEXT: /{_ANY_TEXT}/",
            f"TEXT_LT: /{_ANY_TEXT}</",
            r"BLANK: /\n*/",
            f"RAW: /{_ANY_TEXT}<\\//",
            r'NAME: /[^"]+/',
        ]
        return "\n".join([*head, *self._rules, *terminals]) + "\n"

    def _call(self, index: int, function: dict[str, Any]) -> str:
        invoke, marker = self._tags.invoke, self._marker
        schema = function["parameters"]
        root: dict[str, Any] = schema if is_object(schema) else {}
        rule = f"call_{index}"
        parameters = self._parameters(rule, root)
        opening = _quoted(f'{invoke} name="{function["name"]}">\n')
        # V4.1 writes an empty line where a call has no parameters.
        blank = '"\\n"?' if invoke == V41_DSML_TAGS.invoke else ""
        self._rules.append(
            f'{rule}: "<" {marker} {opening} {parameters} {blank} "</" {marker} {_quoted(invoke + _CLOSE)}'
        )
        return rule

    def _parameters(self, rule: str, root: dict[str, Any]) -> str:
        properties: dict[str, Any] = root.get("properties") or {}
        required: set[str] = set(root.get("required") or ())
        if unknown := required - set(properties):
            properties = {**properties, **dict.fromkeys(sorted(unknown), True)}
        parts: list[str] = []
        for number, (name, schema) in enumerate(properties.items()):
            parameter = f"{rule}_p{number}"
            attribute = _quoted(f' name="{name}" ')
            self._rules.append(f"{parameter}: {self._parameter(attribute, schema, root)}")
            self._num_chars += len(self._rules[-1])
            if self._num_chars > _MAX_GRAMMAR_CHARS:
                raise SchemaError(f"the grammar of the tools is over the limit of {_MAX_GRAMMAR_CHARS} characters")
            parts.append(parameter if name in required else f"{parameter}?")
        if root.get("additionalProperties") is not False:
            extra = f"{rule}_extra"
            attribute = f"{_quoted(' name=' + _MARK)} NAME {_quoted(_MARK + ' ')}"
            self._rules.append(f"{extra}: {self._parameter(attribute, True, root)}")
            parts.append(f"{extra}*")
        return " ".join(parts)

    def _parameter(self, name: str, schema: Any, root: dict[str, Any]) -> str:
        """The alternatives of one parameter: raw strings, JSON of everything else."""
        tag, marker = self._tags.parameter, self._marker
        open_tag = f'"<" {marker} {_quoted(tag)} {name}'
        close_tag = f"{marker} {_quoted(tag + _CLOSE)}"
        raw, other = _split(schema, root)
        alternatives = [f"{open_tag} {_STRING} {value} {close_tag}" for value in raw]
        if other is not None:
            alternatives.append(f'{open_tag} {_NO_STRING} %json {compact(_closed(other, root))} "</" {close_tag}')
        if not alternatives:
            raise SchemaError(f"no value fits the parameter with {name}")
        return " | ".join(alternatives)


def _split(schema: Any, root: dict[str, Any]) -> tuple[list[str], Any]:
    """(how its strings look in DSML, the JSON Schema of its other values or None)."""
    schema = _resolved(schema, root)
    if schema is False:
        return [], None
    if schema is True or not schema:
        return ["RAW"], {"type": ["number", "boolean", "object", "array", "null"]}
    options = schema.get("anyOf") or schema.get("oneOf")
    if options and "type" not in schema:
        halves = [_split(option, root) for option in options]
        raw = list(dict.fromkeys(value for strings, _ in halves for value in strings))
        others = [other for _, other in halves if other is not None]
        return raw, ({"anyOf": others} if others else None)
    literals = [schema["const"]] if "const" in schema else schema.get("enum")
    if literals is not None:
        if len(literals) > _MAX_ALTERNATIVES:
            raise SchemaError(f"an enum of {len(literals)} values is over the limit of {_MAX_ALTERNATIVES}")
        strings = [f"{_quoted(value + '</')}" for value in literals if isinstance(value, str)]
        others = [value for value in literals if not isinstance(value, str)]
        return strings, ({"enum": others} if others else None)
    kinds = schema.get("type", ["string", "number", "boolean", "object", "array", "null"])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    raw = [_raw_string(schema)] if "string" in kinds else []
    others = [kind for kind in kinds if kind != "string"]
    if not others:
        return raw, None
    return raw, {**schema, "type": others[0] if len(others) == 1 else others}


def _raw_string(schema: dict[str, Any]) -> str:
    """The terminal of a raw string and the `</` behind it."""
    low, high = schema.get("minLength"), schema.get("maxLength")
    pattern = schema.get("pattern")
    if pattern is not None:
        if low is not None or high is not None:
            raise SchemaError("a string with both a pattern and a length cannot be enforced in DSML form")
        return f"/{_anchored(pattern)}<\\//"
    if low is None and high is None:
        return "RAW"
    return f"/(?s:.{{{int(low or 0)},{'' if high is None else int(high)}}})<\\//"


def _anchored(pattern: str) -> str:
    """A pattern that may match anywhere, as one of the whole text: `^a$|b` is `a` or what has a `b` somewhere."""
    alternatives: list[list[str]] = [[]]
    depth = 0
    for token in _PATTERN_TOKEN.findall(pattern):
        depth += token.startswith("(")
        depth -= token == ")"
        if token == "|" and not depth:
            alternatives.append([])
        else:
            alternatives[-1].append(token)
    return f"({'|'.join(_whole(tokens, pattern) for tokens in alternatives)})"


def _whole(tokens: list[str], pattern: str) -> str:
    """One alternative with what may stand before and behind it."""
    starts, ends = tokens[:1] == ["^"], tokens[-1:] == ["$"]
    body = tokens[1 if starts else 0 : -1 if ends else None]
    if unknown := _LOOKS_AROUND.intersection(body):
        raise SchemaError(f"{min(unknown)} inside the pattern {shown(pattern)} cannot be enforced in DSML form")
    text = "".join(map(_rust_token, body))
    return f"{'' if starts else _ANY_TEXT}{text}{'' if ends else _ANY_TEXT}"


def _rust_token(token: str) -> str:
    """A token of an ECMA-262 pattern in the words of the enforcer, whose own digits and letters are all of Unicode."""
    if token.startswith("["):
        return re.sub(r"\\.|[/\n]", lambda part: _RUST_WORDS.get(part[0], part[0]), token)
    if token.lower() in _ASCII_SETS:
        return f"[{'' if token.islower() else '^'}{_ASCII_SETS[token.lower()]}]"
    return _RUST_WORDS.get(token, token)


def _resolved(schema: Any, root: dict[str, Any]) -> Any:
    """A schema behind its local references."""
    for _ in range(_MAX_REF_STEPS):
        if not is_object(schema) or "$ref" not in schema:
            return schema
        reference = schema["$ref"]
        if reference != "#" and not reference.startswith("#/"):
            raise SchemaError(f"the reference {shown(reference)} cannot be enforced: it is no path within the schema")
        value: Any = root
        for step in reference.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not is_object(value) or name not in value:
                raise SchemaError(f"the reference {shown(reference)} points at nothing")
            value = value[name]
        schema = value
    raise SchemaError("references lead in a circle")


def _closed(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A schema that stands alone: with the definitions of the root, if it refers to any."""
    if not _refers(schema):
        return schema
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    _refers(definitions)
    return {**schema, **definitions}


def _refers(schema: Any) -> bool:
    """Whether there are references in a schema. SchemaError for one to anything but a definition."""
    found = False
    pending = [schema]
    while pending:
        value = pending.pop()
        if is_object(value):
            reference = value.get("$ref", value.get("$dynamicRef"))
            if isinstance(reference, str):
                found = True
                if not reference.startswith(("#/$defs/", "#/definitions/")):
                    raise SchemaError(f"the reference {shown(reference)} inside a parameter is not to a definition")
            pending.extend(value.values())
        elif is_array(value):
            pending.extend(value)
    return found


def _quoted(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)
