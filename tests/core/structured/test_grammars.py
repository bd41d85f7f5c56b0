"""GBNF keeps exactly its language, whatever lexemes are chosen; Lark is read as Lark, a regex as in Python."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import cache

import pytest

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.errors import GrammarError
from deepinfer_core.structured import GrammarCompiler, Matcher, check_text
from deepinfer_core.structured.gbnf import parse_gbnf
from deepinfer_core.structured.regex import portable_regex
from deepinfer_core.structured.rules import Chars, Choice, Expression, Reference, Repeat, Rules, Sequence

_JSON_GRAMMAR = r"""
# JSON, as llama.cpp users write it
root   ::= ws value ws
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (string ws ":" ws value ws ("," ws string ws ":" ws value ws)*)? "}"
array  ::= "[" ws (value ws ("," ws value ws)*)? "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws     ::= [ \t\n]*
"""


def _accepts(compiler: GrammarCompiler, structured: StructuredOutput, text: str) -> bool:
    return check_text(structured, text, compiler=compiler).accepted


# ---- GBNF ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["{}", ' {"a" : [1, -2.5e+3, "\\u00e9\\n", {"b": null}], "": true}\n', "[[[[]]]]", '"\U0001f600"', "0", "-0.1E9"],
)
def test_json_as_gbnf_accepts_json(text: str, byte_grammars: GrammarCompiler) -> None:
    assert _accepts(byte_grammars, StructuredOutput(grammar=_JSON_GRAMMAR), text)


@pytest.mark.parametrize("text", ["", "{", "01", "[1,]", "{'a':1}", '"\\x"', "tru", "1.", '"\n"', "nullnull", "+1"])
def test_json_as_gbnf_accepts_nothing_else(text: str, byte_grammars: GrammarCompiler) -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    assert not _accepts(byte_grammars, StructuredOutput(grammar=_JSON_GRAMMAR), text)


def _languages(rules: Rules, most: int) -> dict[str, set[str]]:
    """Texts of up to `most` characters that each rule derives, by a fixed point over the definition."""
    known: dict[str, set[str]] = {name: set() for name in rules}

    def of(expression: Expression) -> set[str]:
        match expression:
            case Chars(ranges):
                return {char for low, high in ranges for char in "abc" if low <= ord(char) <= high}
            case Reference(name):
                return known[name]
            case Choice(options):
                return set().union(*(of(option) for option in options))
            case Sequence(items):
                return _joined([of(item) for item in items], most)
            case Repeat(item, low, high):
                part = of(item)
                counts = range(low, (most if high is None else min(high, most + low)) + 1)
                return set().union(*(_joined([part] * count, most) for count in counts))

    while True:
        found = {name: of(body) for name, body in rules.items()}
        if found == known:
            return known
        known = found


def _joined(parts: list[set[str]], most: int) -> set[str]:
    texts = {""}
    for part in parts:
        texts = {a + b for a in texts for b in part if len(a) + len(b) <= most}
    return texts


_TRICKY = [
    'root ::= ("a" | "ab") "b"',
    'root ::= [a-c]+ "b" | root "c"',
    'root ::= "a" root "b" | "ab" | [b]*',
    'root ::= x root | "b"\nx ::= "a" | "ab" | "abc"',
    'root ::= root root | "a" | "ab"?',
    'root ::= x{2,3} y\nx ::= "a"? "b"\ny ::= "c" y | ""',
    'root ::= "a" dead | "b"\ndead ::= "c" dead',
    'root ::= (root "a"){0,2} [bc]',
    'root ::= word ("c" word)* | "(" root ")"\nword ::= [ab]+',
    'root ::= . root . | "b"',
    'root ::= "aa" root | "aab" | "a" root "c"',
]


def _random_grammar(seed: int) -> str:
    rng = random.Random(seed)

    def item(depth: int) -> str:
        kind = rng.randrange(7 if depth else 3)
        if kind < 2:
            return json.dumps("".join(rng.choice("abc") for _ in range(rng.randrange(1, 4))))
        if kind == 2:
            return rng.choice(["[ab]", "[^a]", "[a-c]", "x", "y", "root"])
        if kind == 3:
            return f"({choice(depth - 1)})" + rng.choice(["*", "+", "?", "{2}", "{0,2}"])
        return f"({choice(depth - 1)})"

    def choice(depth: int) -> str:
        return " | ".join(
            " ".join(item(depth) for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(1, 4))
        )  # fmt: skip

    return "\n".join(f"{name} ::= {choice(2)} | {json.dumps(rng.choice('abc'))}" for name in ("root", "x", "y"))


@pytest.mark.parametrize("grammar", [*_TRICKY, *(_random_grammar(seed) for seed in range(25))])
def test_the_choice_of_lexemes_never_changes_the_language(grammar: str, byte_grammars: GrammarCompiler) -> None:
    most = 5
    expected = _languages(parse_gbnf(grammar), most)["root"]
    matcher = Matcher(byte_grammars.compile(StructuredOutput(grammar=grammar)))

    @cache
    def prefixes() -> set[str]:
        return {text[:end] for text in expected for end in range(len(text) + 1)}

    def walk(text: str) -> None:
        """Every text of the automaton's tree, as deep as `most`."""
        assert matcher.is_complete == (text in expected), text
        for char in "abc" if len(text) < most else "":
            if matcher.advance(ord(char)):
                walk(text + char)
                matcher.rollback(1)
            else:
                assert text + char not in prefixes(), text + char

    walk("")


def test_gbnf_names_may_begin_with_digits_and_dashes(byte_grammars: GrammarCompiler) -> None:
    """What llama.cpp makes of properties such as "1" and "$id"."""
    grammar = 'root ::= "{" 1-kv ("," -id-kv)? "}"\n1-kv ::= [0-9]{2}\n-id-kv ::= "x"'
    assert _accepts(byte_grammars, StructuredOutput(grammar=grammar), "{12,x}")
    assert not _accepts(byte_grammars, StructuredOutput(grammar=grammar), "{12,}")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start ::= "a"', "none named root"),
        ("root ::= item", "uses 'item' in the rule 'root'"),
        ('root ::= "a\n', "in line 1"),
        ('root ::= ("a"', "not closed in line 1"),
        ('root ::= "a"\nroot ::= "b"', "defines 'root' twice in line 2"),
        ('root ::= "a" root', "endless"),
        ("root ::= [z-a]", "range z-a"),
        ("root ::= []", "no character"),
        ('root ::= "a"{3,2}', "repeats {3,2}"),
        ('root ::= "\\uD800"', "not in Unicode"),
        ("root ::= [\\d]+", "escape \\d"),
        ('root ::= "a" ) "b"', "in line 1"),
        ("just text", "line 1"),
    ],
)
def test_a_broken_gbnf_grammar_is_refused_with_its_place(
    grammar: str, reason: str, byte_grammars: GrammarCompiler
) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)):
        byte_grammars.compile(StructuredOutput(grammar=grammar))


# ---- Lark ---------------------------------------------------------------------------------------------------------

_ARITHMETIC = """
?start: sum
?sum: product | sum "+" product -> add   // shapes of trees do not matter
!product.2: atom | product "*" atom
atom: NUMBER | "-" atom | "(" sum ")"
NUMBER: /[0-9]+/ ("." "0".."9"~1..2)?
%ignore " "
"""


@pytest.mark.parametrize(
    ("text", "accepted"),
    [("1+2*3", True), ("-(1.25 + 4)", True), ("1.234", False), ("1+", False), ("1 + + 2", False), ("((7))", True)],
)
def test_lark_with_marks_aliases_and_counts(text: str, accepted: bool, byte_grammars: GrammarCompiler) -> None:
    assert _accepts(byte_grammars, StructuredOutput(grammar=_ARITHMETIC), text) == accepted


def test_lark_imports_of_the_common_library(byte_grammars: GrammarCompiler) -> None:
    structured = StructuredOutput(grammar='start: INT ("," INT)~2\n%import common.INT\n')
    assert _accepts(byte_grammars, structured, "1,22,333")
    assert not _accepts(byte_grammars, structured, "1,22")


def test_lark_imports_under_another_name(byte_grammars: GrammarCompiler) -> None:
    structured = StructuredOutput(grammar="%import common.INT -> NUMBER\nstart: NUMBER\n")
    assert _accepts(byte_grammars, structured, "12")


def test_lark_ignores_text_between_terminals_only(byte_grammars: GrammarCompiler) -> None:
    structured = StructuredOutput(grammar='start: "a" "b"\n%ignore " "\n')
    assert [_accepts(byte_grammars, structured, text) for text in ("ab", "a  b", " ab", "ab ")] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "grammar", ['// not a ::= b\nstart: "x" "="', 'start: "x"\n     | /x::=/ | "x="', '# root ::= "a"\nstart: /x=/']
)
def test_lark_that_mentions_the_sign_of_gbnf_is_lark(grammar: str, byte_grammars: GrammarCompiler) -> None:
    assert _accepts(byte_grammars, StructuredOutput(grammar=grammar), "x=")


def test_lark_flags_and_optional_groups(byte_grammars: GrammarCompiler) -> None:
    structured = StructuredOutput(grammar='start: "yes"i ["," /x.z/s]\n')
    assert [_accepts(byte_grammars, structured, text) for text in ("YeS", "yes,x\nz", "yes,", "ye")] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: A\nA.2: "a"', "priority .2 of the terminal A in line 2"),
        ('start: pair{"a"}\npair{x}: x x', "template"),
        ('start: "a"\n%declare B', "%declare in line 2"),
        ("start: %llguidance {}", "%llguidance"),
        ("start: <think>", "special token"),
        ('start[max_tokens=3]: "a"', "in line 1"),
        ("start: other", "other"),
        ("start: /(?=a)b/", "look-ahead"),
        ('start: "a" ; end', "not Lark"),
        ('begin: "a"', "start"),
        ("start: a\na: a", "no text satisfies it"),
    ],
)
def test_lark_that_cannot_be_kept_is_refused_with_its_place(
    grammar: str, reason: str, byte_grammars: GrammarCompiler
) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)):
        byte_grammars.compile(StructuredOutput(grammar=grammar))


# ---- regular expressions ------------------------------------------------------------------------------------------

_PATTERNS = [
    "a|ab|abc", "(a|b)*c{2}", "a{,2}b", "a{b", "a{}", "x{1,2}?a", "[[a]+b", "[]a]+", "[^]a]b", "[a&&b]+", "[a-c~~]+",
    "a.c", "(?:ab)+", "(?P<n>a)b", "\\x41\\u0042", "[\\w-]+", "\\d{2}", "^ab$", "^a|b$", "a+?b*?", "(?i:a)b",
    "[a-]+", "\\.\\*\\\\", "a\\/b", "(a|)b", "", "[\\]\\[]+", "(?s:.)", "a$|b",
]  # fmt: skip
_TEXTS = ["".join(text) for size in range(4) for text in itertools.product("abc[]{}&~-1AB.*\\/\n", repeat=size)]


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # Python may give these classes another meaning one day
@pytest.mark.parametrize("pattern", _PATTERNS)
def test_a_regular_expression_means_what_it_means_in_python(pattern: str, byte_grammars: GrammarCompiler) -> None:
    structured = StructuredOutput(regex=pattern) if pattern else StructuredOutput(regex="(?:)")
    matcher = Matcher(byte_grammars.compile(structured))
    compiled = re.compile(pattern)
    for text in _TEXTS:
        data = text.encode()
        taken = next((i for i, byte in enumerate(data) if not matcher.advance(byte)), len(data))
        accepted = taken == len(data) and matcher.is_complete
        matcher.rollback(taken)
        assert accepted == bool(compiled.fullmatch(text)), text


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"[\w-.]+", "a-.1", "a,"),  # as in many expressions for e-mail addresses; an error in Python
        (r"[a-\d]", "a-5", "b/"),
        (r"[\s-]", " -", "x"),
        (r"[\w-]", "x-", "+"),
        (r"[^\w-]", "+ ", "x-"),
        (r"[\p{Lu}-z]", "A-z", "ab"),
        (r"\0", "\0", "0"),
        (r"[\0-\x02]", "\0\1", "0"),
        (r"[\b]", "\b", "b"),
    ],
)
def test_a_regular_expression_means_what_it_means_in_ecmascript(
    pattern: str, good: str, bad: str, byte_grammars: GrammarCompiler
) -> None:
    structured = StructuredOutput(regex=pattern)
    texts = [good] if pattern.endswith("+") else list(good)
    assert all(_accepts(byte_grammars, structured, text) for text in texts)
    assert not any(_accepts(byte_grammars, structured, text) for text in ([bad] if pattern.endswith("+") else bad))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("\\07", "an octal escape at character 0"),
        ("a(?=b)", "look-ahead at character 1"),
        ("(?<!a)b", "negative look-behind at character 0"),
        ("(a)\\1", "backreference at character 3"),
        ("\\bword", "word boundary at character 0"),
        ("a++", "possessive quantifier"),
        ("a(?R)?", "recursion at character 1"),
        ("(?>a)", "atomic group"),
        ("(a", "never closed"),
        ("a)", "no group to close"),
        ("[a", "never closed at character 0"),
        ("a\\", "nothing after it"),
        ("(a{400}){400}", "160000 times at character 8, counting"),
        ("a" * 70_000, "70000 characters"),
    ],
)
def test_a_regular_expression_that_no_automaton_has_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)):
        portable_regex(pattern, "structured.regex")


# ---- choice -------------------------------------------------------------------------------------------------------


def test_choices_are_taken_literally(byte_grammars: GrammarCompiler) -> None:
    choices = ["yes", "yes/no", "a|b", ".*", "\u00e9\n", "\U0001f600", "(", " ", "\\d"]
    structured = StructuredOutput(choice=choices)
    assert all(_accepts(byte_grammars, structured, choice) for choice in choices)
    assert not any(_accepts(byte_grammars, structured, text) for text in ("", "a", "b", "1", "yesyes", "  ", "x"))
