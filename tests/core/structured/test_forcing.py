"""Text without alternatives is followed while it is short; grammars in which it never ends do not stop the engine."""

from __future__ import annotations

import time
from typing import Any

import pytest

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.structured import GrammarCompiler, GrammarConstraint, Matcher
from deepinfer_core.structured.forcing import Fixed
from deepinfer_core.structured.lark import lark_dialect
from deepinfer_core.structured.regex import portable_regex
from deepinfer_core.text import Tokenizer
from tests.core.structured.driver import allowed_ids


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /[b-z]/ /a+/ /a/",
        'start: /[b-z]/ A "a"\nA: "a"+',
        'start: /[b-z]/ A "a"\nA: B{3,}\nB: "a"',
        'start: /[b-z]/ A "ab"\nA: ("ab")+',
        'start: /[b-z]/ A "a"\nA: "a".."a"+',
        "start: /[b-z]/ A A\nA: /(?:a(?:){3})+/",
        "start: /[b-z]/ A A\nA: /[a]+/",
        "start: /[b-z]/ A A\nA: /[^\\x00-\\x60b-\\u{10FFFF}]+/",
        "start: /[b-z]/ A A\nA: /(?:a[bc]{0})+/",
        "start: /[b-z]/ A A\nA: /[a ]+/x",
        "start: /[b-z]/ A A\nA: /(?x:[a ]+)/",
        'start: /[b-z]/ "c"? A A\nA: "\\u00e9"+',
    ],
)
def test_a_terminal_that_takes_all_that_follows_does_not_hang(grammar: str, byte_grammars: GrammarCompiler) -> None:
    matcher = Matcher(byte_grammars.compile(StructuredOutput(grammar=grammar)))
    assert matcher.advance(ord("b"))
    for _ in range(3):
        (allowed, *_) = allowed_ids(matcher.mask(), 257).tolist()
        assert matcher.forced() == []
        assert matcher.advance(allowed)


@pytest.mark.parametrize(
    ("grammar", "fixed"),
    [
        ('start: "name" INT\n%import common.INT', Fixed.SHORT),
        ('start: "name" A\nA: DIGIT+ "x"\n%import common.DIGIT', Fixed.SHORT),
        ('start: "name" A\nA: D+ L*\nD: /[0-9]/\nL: "a".."f"', Fixed.SHORT),
        ('start: "name" A\nA: ("0".."9")+', Fixed.ENDLESS),  # a group is not looked into
        ('start: "name" A\nA: "0".."9"+', Fixed.SHORT),
        ('start: "a"+ (b | "c")*\nb: "b"*', Fixed.SHORT),  # rules know how many there were
        ('start: "name" A\nA: /[a-z]+(,[a-z]+)*/ "-"?', Fixed.SHORT),
        ('start: "name" A\nA: "-"*', Fixed.ENDLESS),
        ('start: "name" /-*/', Fixed.ENDLESS),
        ('start: "name" A\n%ignore /x+/\nA: "a"', Fixed.ENDLESS),
        ('start: "name" A\nA: LETTER+\nLETTER: "a"', Fixed.ENDLESS),
        ('start: A "b" | A <[9]>\nA: /\\n*/', Fixed.SHORT),  # the next one begins with something else
        ('start: /a+/ "b"', Fixed.SHORT),
        ('start: A "b" | A "a"\nA: "a"+', Fixed.ENDLESS),
        ('start: A "b" | A\nA: "a"+', Fixed.ENDLESS),
        ('start: A "A"\nA: "a"i+', Fixed.ENDLESS),
        ('start: A "a"\nA: "\\x61"+', Fixed.ENDLESS),
        ('start: A "b"\nA: B | "c"\nB: "a"+', Fixed.ENDLESS),
        ('start: /a+/ "b"? "a"', Fixed.SHORT),
        ('start: /a+/ "b"{0} "a"', Fixed.ENDLESS),
        ('start: A "x"\n%ignore A\nA: "a"+', Fixed.ENDLESS),
        ('start: "name" A\nA: LETTER+\n%import common.CR -> LETTER', Fixed.ENDLESS),
        ('start: "name" A\nA: "a"\nb: "b"\n%ignore " "+', Fixed.ENDLESS),
        (f'start: "{"n" * 300}"', Fixed.LONG),
        ("start: /x{300}/", Fixed.LONG),
        ('start: A~300\nA: "a"', Fixed.LONG),
        (f'start: "a" %json {{"const": "{"n" * 300}"}}', Fixed.LONG),
    ],
)
def test_fixed_texts_of_lark_are_judged_by_their_length_and_by_what_repeats(grammar: str, fixed: Fixed) -> None:
    assert lark_dialect(grammar).fixed is fixed


@pytest.mark.parametrize(
    ("pattern", "num_fixed", "has_choice", "repeats_fixed"),
    [
        ("abc", 3, False, False),
        ("a{20}b", 21, False, False),
        ("(ab|cde){3}", 9, False, False),
        ("[ab]", 0, True, False),
        ("[a]", 1, False, False),
        ("(a[bc]){100}", 2, True, False),
        ("a+", 2, False, True),
        ("(ab|[cd])*", 4, False, True),
        ("([ab]|[cd])+", 0, True, False),
        ("\\d+x", 1, True, False),
        (".*", 0, True, False),
        ("[ab]{0}", 0, False, False),
        ("[\\p{Lu}]+", 2, False, True),  # only the automaton library knows
        ("", 0, False, False),
    ],
)
def test_what_a_pattern_fixes(pattern: str, num_fixed: int, has_choice: bool, repeats_fixed: bool) -> None:
    assert portable_regex(pattern, "it")[1:] == (num_fixed, has_choice, repeats_fixed)


_LONG = "the sea " * 12_000
_HIDDEN: list[dict[str, Any]] = [  # behind text that is free, so that trying the grammar out does not find it
    {
        "json": {
            "type": "array",
            "prefixItems": [{"pattern": "^[bc]{400}$", "type": "string"}, {"const": _LONG}],
            "minItems": 2,
        }
    },
    {
        "json": {
            "type": "object",
            "properties": {"b": {"type": "string", "pattern": "^[bc]{400}$"}, _LONG: {}},
            "required": ["b", _LONG],
            "additionalProperties": False,
        }
    },
    {
        "json": {
            "type": "object",
            "properties": {"b": {"type": "string", "pattern": "^[bc]{400}$"}}
            | {f"p{i}": {"const": _LONG[:200]} for i in range(400)},
            "required": ["b", *(f"p{i}" for i in range(400))],
            "additionalProperties": False,
        }
    },
    {"regex": f"[bc]{{400}}a{{{len(_LONG)}}}"},
    {"grammar": f'root ::= [bc]{{400}} "a"{{{len(_LONG)}}}'},
    {"grammar": f'start: /[bc]{{400}}/ "{"a" * len(_LONG)}"'},
    {"grammar": f'start: /[bc]{{400}}/ %json {{"const": "{_LONG}"}}'},
]


@pytest.mark.parametrize("number", range(len(_HIDDEN)))
def test_a_long_fixed_text_costs_a_step_nothing(number: int, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    structured = StructuredOutput(**_HIDDEN[number])
    constraint = GrammarConstraint(compiler.compile(structured), structured)
    start = {0: '["', 1: '{"b":"', 2: '{"b":"'}.get(number, "") + "bc" * 200 + ('"' if number < 3 else "")
    constraint.observe(tokenizer.encode(start, add_bos=False))
    started_s = time.thread_time()
    for _ in range(5):
        constraint.rows([], 5)
    assert time.thread_time() - started_s < 0.1  # followed to its end, it would take half a second each time


def test_a_short_fixed_text_is_forced_as_the_tokenizer_splits_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    for form in ({"choice": ["the sea"]}, {"regex": "the sea"}, {"grammar": 'start: "the sea"'}):
        matcher = Matcher(compiler.compile(StructuredOutput(**form)))
        tokens = tokenizer.encode("the sea", add_bos=False)
        assert matcher.forced()[: len(tokens)] == tokens
        assert allowed_ids(matcher.mask(), tokenizer.num_tokens).tolist() == tokens[:1]
