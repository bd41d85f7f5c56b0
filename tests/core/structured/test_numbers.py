"""Bounds of numbers: a number is allowed exactly if it is within them, wherever they lie."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.structured import GrammarCompiler, check_text
from deepinfer_core.structured.bounds import exact_bounds

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _accepts(compiler: GrammarCompiler, schema: Any, text: str) -> bool:
    return check_text(StructuredOutput(json=schema), text, compiler=compiler).accepted


def _is_within(schema: dict[str, Any], text: str) -> bool:
    number = Fraction(text)
    low, high, above, below = (Fraction(str(schema[name])) if name in schema else None for name in _BOUNDS)
    return (
        (low is None or number >= low)
        and (high is None or number <= high)
        and (above is None or number > above)
        and (below is None or number < below)
        and (schema["type"] == "number" or number.denominator == 1)
    )


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.00001"], ["0", "-0", "0.0", "0.50001"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.00001"], ["0", "-0", "-0.0"]),
        ({"exclusiveMinimum": 12, "exclusiveMaximum": 12.25}, ["12.1", "12.2499"], ["12", "12.0", "12.25"]),
        ({"minimum": -12.25, "exclusiveMaximum": -12}, ["-12.1", "-12.25"], ["-12", "-12.0"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1e-5}, ["0.000001"], ["0", "0.00000", "0.00001"]),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.1"], ["0", "-0"]),
        ({"exclusiveMaximum": 1}, ["0.9", "0.99999", "-5"], ["1", "1.0"]),
        ({"exclusiveMinimum": True, "minimum": 0, "maximum": 0.5}, ["0.5"], ["0"]),
        ({"exclusiveMinimum": False, "minimum": 0, "maximum": 0.5}, ["0"], ["-0.1"]),
        ({"minimum": 2, "exclusiveMinimum": 0}, ["2"], ["1", "1.5"]),
        ({"minimum": 0, "exclusiveMinimum": 0}, ["0.5"], ["0"]),
    ],
)
def test_a_whole_bound_that_is_excluded_cannot_be_written(
    bounds: dict[str, Any], good: list[str], bad: list[str], byte_grammars: GrammarCompiler
) -> None:
    schema = {"type": "number"} | bounds
    assert [text for text in good if not _accepts(byte_grammars, schema, text)] == []
    assert [text for text in bad if _accepts(byte_grammars, schema, text)] == []


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("size", [2**53 - 1, 2**53, 2**53 + 1, 2**54 + 3, 10**16, 2**60, 2**63 - 1, 2**64 - 1])
def test_bounds_that_float64_cannot_hold_let_nothing_beyond_them_pass(
    kind: str, size: int, byte_grammars: GrammarCompiler
) -> None:
    texts = [str(size + step) for step in (0, 1, 2, 3, 1025, 5000)] + [str(size - step) for step in (1, 2, 3)]
    for name, sign in (("maximum", 1), ("minimum", -1), ("exclusiveMaximum", 1), ("exclusiveMinimum", -1)):
        schema = {"type": kind, name: sign * size}
        for text in (f"-{text}" if sign < 0 else text for text in texts):
            assert not _accepts(byte_grammars, schema, text) or _is_within(schema, text), (schema, text)
        assert _accepts(byte_grammars, schema, "5")
        assert _accepts(byte_grammars, schema, f"{sign * (size // 2048)}")


def test_numbers_within_random_bounds_and_no_others(byte_grammars: GrammarCompiler) -> None:
    rng = random.Random(5)
    sizes = [0, 0, 1, -1, 0.5, 0.05, 1e-5, -1e-5, 12, -12, 3.25, -3.25, 100, -0.5, 1000]
    num_checked = 0
    for _ in range(120):
        schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
        schema |= {name: rng.choice(sizes) for name in _BOUNDS if rng.random() < 0.5}
        # More decimals than any bound has: a number that is the beginning of a bound has fewer ways to be written.
        texts = [f"{rng.choice(sizes) + rng.choice([-1, -0.5, 1e-7, -1e-7, 0.5, 1]) + 3e-8:.8f}" for _ in range(8)]
        texts += [f"{rng.choice(sizes):.0f}" for _ in range(8)]
        if any(_is_within(schema, text) for text in texts):
            for text in texts:
                is_written_so = schema["type"] == "number" or "." not in text
                expected = _is_within(schema, text) and is_written_so
                if text == "-0":  # another way to write 0
                    continue
                assert _accepts(byte_grammars, schema, text) == expected, (schema, text)
                num_checked += 1
    assert num_checked > 500


def test_bounds_only_move_inwards() -> None:
    rng = random.Random(6)
    for _ in range(2_000):
        value = rng.choice([rng.randint(-(2**62), 2**62), rng.randint(-99, 99), rng.uniform(-9, 9), 0, -0.0, 1e300])
        name = rng.choice(["maximum", "exclusiveMaximum"])
        node: dict[str, Any] = {"type": rng.choice(["integer", "number"]), name: value}
        exact_bounds(node, "#")
        (found,) = node.keys() - {"type"}
        assert node[found] <= value
        assert name == "maximum" or found == "exclusiveMaximum" or node[found] < value
        assert float(node[found]) == node[found]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("int32", ["0", "2147483647", "-2147483648"], ["2147483648", "-2147483649"]),
        ("uint8", ["0", "255"], ["-1", "256"]),
        ("int64", ["1234567890123456789", "-5"], ["9223372036854775808", "-9223372036854775809"]),
        ("uint64", ["0", "5"], ["-1", "18446744073709551616"]),
        ("unix-time", ["1700000000"], ["1.5"]),
    ],
)
def test_formats_of_integers_are_bounds(
    name: str, good: list[str], bad: list[str], byte_grammars: GrammarCompiler
) -> None:
    schema = {"type": "integer", "format": name}
    assert [text for text in good if not _accepts(byte_grammars, schema, text)] == []
    assert [text for text in bad if _accepts(byte_grammars, schema, text)] == []
    verdict = check_text(StructuredOutput(json=schema), "1", compiler=byte_grammars)
    is_known = name != "unix-time"
    assert verdict.enforced == (("format", "type") if is_known else ("type",))
    assert verdict.ignored == (() if is_known else ("format unix-time",))
