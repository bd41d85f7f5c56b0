"""Bodies that no client means: random ones, huge ones, and odd values in the place of good ones."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepseek_recipe as recipe
from tests.recipe.short_requests import EXTENDED, HI, MODEL, REQUESTS, STRICT
from tests.recipe.vectors import load_cases

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
WORDS = st.sampled_from(
    ["user", "assistant", "system", "tool", "text", "function", "tool_use", "tool_result", "hi", MODEL]
)
KEYS = st.sampled_from(
    ["model", "messages", "input", "role", "content", "type", "text", "tools", "function", "name", "parameters",
     "system", "tool_calls", "id", "arguments", "tool_choice", "thinking", "strict", "call_id", "output", "source",
     "url"]
)  # fmt: skip
JSON = st.recursive(
    SCALARS | WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=30
)


@settings(max_examples=150, deadline=None)
@given(body=JSON, fields=st.dictionaries(KEYS, JSON, max_size=4), extended=st.booleans())
def test_no_body_raises_anything_but_the_documented_errors(body: Any, fields: dict[str, Any], extended: bool) -> None:
    options = EXTENDED if extended else STRICT
    whole = {"model": MODEL, "messages": HI, "input": "hi", **fields}
    for candidate in (body, whole, json.dumps(whole), json.dumps(body).encode()):
        for request_type in REQUESTS:
            try:
                request = request_type(candidate, dialect=options.dialect)
                request.convert(options)
            except (ValueError, TypeError, OverflowError, recipe.ConversionError):
                continue


@pytest.mark.bad_input
@pytest.mark.parametrize("request_type", REQUESTS)
@pytest.mark.parametrize(
    "body",
    [
        b'{"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"model":"m","max_tokens":' + b"9" * 5_000_000 + b"}",
        b'{"model":"\\ud800"}',
        b"\x00",
        b'{"model":"m\x00"}',
        b'{"model":' + b'"x"' * 100_000,
        b"{" + b",".join(b'"%d":1' % n for n in range(300_000)) + b"}",
    ],
    ids=["depth", "digits", "surrogate", "NUL", "control", "no commas", "keys"],
)
def test_a_hostile_body_is_refused(request_type: Any, body: bytes) -> None:
    with pytest.raises(ValueError, match=r"^invalid (JSON request|request body): "):
        request_type(body)


ODD_VALUES: list[Any] = [
    None, True, -1, 1.5, 10**25, "", "x" * 5_000, "\0", [], {}, [[]], [{}], {"type": []},
    [{"type": {}}], {"a" * 3_000: 1},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, member in members:
        yield from places(member, (*path, step))


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    """A JSON value with another value at `path`."""
    if not path:
        return by
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], by)
    return changed


def refusal(request_type: Any, body: str, options: recipe.ConversionOptions) -> str:
    """The text of the documented error that a body meets on its way to a prompt; empty where it meets none."""
    try:
        converted = request_type(body, dialect=options.dialect).convert(options)
    except recipe.ConversionError as error:
        return str(error)
    except ValueError as error:
        if not str(error).startswith(("invalid JSON request: ", "invalid request body: ")):
            raise
        return str(error)
    recipe.encoding_for(converted.model_version).render_conversation(converted.conversation)
    return ""


@pytest.mark.bad_input
@pytest.mark.parametrize(("group", "request_type"), [*zip(("chat", "responses", "messages"), REQUESTS, strict=True)])
def test_an_odd_value_in_any_place_gives_a_documented_and_short_error(group: str, request_type: Any) -> None:
    rng = random.Random(5)
    cases = load_cases(f"convert_{group}")
    bodies = [case["input"]["body"] for case in cases if isinstance(case["input"].get("body"), dict)]
    for body in bodies:
        options = rng.choice([STRICT, EXTENDED])
        changed = json.dumps(replaced(body, rng.choice([*places(body)]), rng.choice(ODD_VALUES)))
        error = refusal(request_type, changed, options)
        assert len(error) < 900, error
