"""Strict reading and protocol writing of JSON, on ordinary and on hostile texts."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.json_text import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_VALUES,
    JsonTextError,
    compact,
    json_value,
    loads,
    loads_body,
    spaced,
    spaced_v4,
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_written_reads_back(value: Any) -> None:
    for write in (compact, spaced, spaced_v4):
        assert loads(write(value)) == value
    assert loads_body(compact(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-0", "-0.0"),
        ("[-0, -0.5, -0]", "[-0.0, -0.5, -0.0]"),
        ('"x -0, y"', "'x -0, y'"),
        ("18446744073709551615", "18446744073709551615"),
        ("18446744073709551616", "1.8446744073709552e+19"),
        ("-9223372036854775808", "-9223372036854775808"),
        ("-9223372036854775809", "-9.223372036854776e+18"),
        ('{"a":1,"b":2,"a":3}', "{'a': 3, 'b': 2}"),
        ('"\\ud83d\\ude00"', "'😀'"),
        ("1e-400", "0.0"),
    ],
)
def test_numbers_and_keys_read_as_the_protocol_reads_them(text: str, value: str) -> None:
    assert repr(loads(text)) == value


@pytest.mark.parametrize(
    ("value", "v41", "v4"),
    [
        (1e-5, "1e-05", "0.00001"),
        (1.25e-5, "1.25e-05", "0.0000125"),
        (-2.5e-5, "-2.5e-05", "-0.000025"),
        (1e-6, "1e-06", "1e-6"),
        (1e-7, "1e-07", "1e-7"),
        (1.5e-10, "1.5e-10", "1.5e-10"),
        (1e16, "1e+16", "1e+16"),
        (1e15, "1000000000000000.0", "1000000000000000.0"),
        (0.0001, "0.0001", "0.0001"),
        (-0.0, "-0.0", "-0.0"),
        (2**70, "1.1805916207174113e+21", "1.1805916207174113e+21"),
        (2**64 - 1, "18446744073709551615", "18446744073709551615"),
    ],
)
def test_numbers_are_written_as_each_version_writes_them(value: float, v41: str, v4: str) -> None:
    assert (spaced(value), spaced_v4(value)) == (v41, v4)
    assert (spaced({"e-0": [value]}), spaced_v4({"e-0": [value]})) == (f'{{"e-0": [{v41}]}}', f'{{"e-0": [{v4}]}}')
    assert (compact(value), compact({"e-0": [value]})) == (v4, f'{{"e-0":[{v4}]}}')


def test_only_quotes_backslashes_and_controls_are_escaped() -> None:
    for write in (compact, spaced):
        assert write('"\\/\b\t\n\f\r\x01\x1f\x7f\u2028é') == '"\\"\\\\/\\b\\t\\n\\f\\r\\u0001\\u001f\x7f\u2028é"'


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "text",
    [
        "", " ", "nul", "NaN", "Infinity", "01", "1.", ".5", "+1", "1e", "[1,]", "{1:2}", '{"a":}', "1 2", "'a'",
        '"\\x"', '"\x01"', '"\\ud800"', '"\\udc00\\ud800"', '"open', "\ufeff1", "1e400", "-1e400", "1" * 400, "[",
        "[}", "\x0b1", b"\xff", b'"\xed\xa0\x80"', b'{"\xff": 1}',
    ],
)  # fmt: skip
def test_what_is_not_strict_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(JsonTextError):
        loads(text)


@pytest.mark.bad_input
def test_the_place_of_a_mistake_is_named() -> None:
    with pytest.raises(JsonTextError, match="line 3 column 6"):
        loads('{\n "a": 1,\n "b" 2\n}')


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_is_allowed_up_to_the_limit(opening: str) -> None:
    closing = "]" if opening == "[" else "}"

    def nested(depth: int) -> str:
        return opening * depth + "1" + closing * depth

    assert loads(nested(MAX_DEPTH)) is not None
    for depth in (MAX_DEPTH + 1, 500, 10_000, 1_000_000):
        with pytest.raises(JsonTextError, match=str(MAX_DEPTH)):
            loads(nested(depth))


def test_brackets_in_strings_are_not_nesting() -> None:
    assert loads(json.dumps(["[{" * 1_000])) == ["[{" * 1_000]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "text",
    [
        b"1" * 10_000_000,
        b"1." + b"1" * 10_000_000 + b"x",
        b'"' + b'\\"' * 5_000_000,
        b"[" * 10_000_000,
        b'{"a":' * 2_000_000,
        b"[" + b"[]," * (MAX_VALUES // 2 + 1) + b"1]",
        b" " * (MAX_BYTES + 1),
    ],
    ids=["digits", "fraction", "unclosed string", "arrays", "objects", "values", "bytes"],
)
def test_a_hostile_text_is_refused_in_bounded_time(text: bytes) -> None:
    start_s = time.process_time()
    with pytest.raises(JsonTextError):
        loads_body(text)
    assert time.process_time() - start_s < 5


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "text",
    [
        b"[" + b",".join([b"1" * 308] * 20_000) + b"]",
        b'["' + (b" " * 50 + b"-0}") * 100_000 + b'"]',
        b'["' + b" " * 5_000_000 + b"-0}" + b'"]',
    ],
    ids=["long integers", "no minus zeros", "blanks"],
)
def test_a_hostile_text_is_read_in_bounded_time(text: bytes) -> None:
    start_s = time.process_time()
    assert len(loads_body(text)) > 0
    assert time.process_time() - start_s < 3


@pytest.mark.bad_input
@pytest.mark.parametrize("read", [loads, loads_body])
@pytest.mark.parametrize("num_digits", [310, 400, 4_299, 4_301, 100_000])
def test_an_integer_beyond_the_doubles_is_refused(read: Any, num_digits: int) -> None:
    for before in ("", " " * 17, "[[0, " * 7):
        with pytest.raises(JsonTextError, match="range"):
            read(f"{before}{'9' * num_digits}{']]' * before.count('[[')}")
    assert read(json.dumps("9" * num_digits)) == "9" * num_digits


def test_a_million_keys_are_read() -> None:
    text = "{" + ",".join(f'"{number}":{number}' for number in range(1_000_000)) + "}"
    assert len(loads_body(text)) == 1_000_000


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (2**64, OverflowError),
        (-(2**63) - 1, OverflowError),
        ({1: 2}, TypeError),
        ({"a": b"x"}, TypeError),
        ([{1, 2}], TypeError),
        ("\ud800", UnicodeEncodeError),
        ({"\ud800": 1}, UnicodeEncodeError),
    ],
)
def test_a_python_value_that_json_cannot_say_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        json_value(value)


@pytest.mark.bad_input
def test_a_python_value_nested_too_deep_is_refused() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueError, match=str(MAX_DEPTH)):
        json_value(value)


def test_tuples_become_lists() -> None:
    assert json_value({"a": (1, (2,))}) == {"a": [1, [2]]}
