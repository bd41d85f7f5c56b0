"""`check_text` and `deepinfer grammar`: yes or no, where, and what is enforced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_core.cli import main
from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.structured import GrammarCompiler, Verdict, check_text

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "position", "next_text"),
    [
        ('{"name":"Ada","age":36}', None, ""),
        ('{"name":"Ada","agr":36}', 17, 'e":'),
        ('{"name":"\u00c4d\U0001f600"}', 13, ',"age":'),
        ('{"name":"Ada","age":36', 22, ""),
        ('{"name":"Ada","age":36}x', 23, ""),
        ("", 0, '{"name":"'),
    ],
)
def test_the_first_illegal_character_is_found(
    text: str, position: int | None, next_text: str, byte_grammars: GrammarCompiler
) -> None:
    verdict = check_text(StructuredOutput(json=_SCHEMA), text, compiler=byte_grammars)
    enforced = ("additionalProperties", "properties", "required", "type")
    assert verdict == Verdict(position is None, position, next_text, enforced, ())


def test_a_character_cut_by_the_grammar_counts_as_the_illegal_one(byte_grammars: GrammarCompiler) -> None:
    assert check_text(StructuredOutput(choice=["\u00e9"]), "\u00e8", compiler=byte_grammars).position == 0


def test_the_command_says_yes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(_SCHEMA | {"colour": 1}))
    assert main(["grammar", "--json", str(file), "--accepts", '{"name":"Ada","age":36}']) == 0
    assert capsys.readouterr().out.splitlines() == [
        "yes",
        "enforced: additionalProperties, properties, required, type",
        "not JSON Schema, so without effect: colour",
    ]


def test_the_command_says_that_answers_are_compact_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(_SCHEMA))
    assert main(["grammar", "--json", str(file), "--accepts", '{"name": "Ada", "age": 36}']) == 1
    verdict, hint, _ = capsys.readouterr().out.splitlines()
    assert verdict == 'no: illegal at character 8, " "; there must come "\\""'
    assert hint == "answers to a schema are compact JSON, without spaces between their parts"


def test_the_command_says_where_it_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grammar", "--regex", "\u00e9[ab]c", "--accepts", "\u00e9a\u00e9"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == 'no: illegal at character 2, "\u00e9"; there must come "c"'


def test_the_command_shows_the_beginning_of_a_long_text_that_has_to_come(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grammar", "--regex", "a{200}b", "--accepts", "aa"]) == 1
    assert capsys.readouterr().out.splitlines()[0].endswith(f'there must come "{"a" * 80}" ...')


def test_the_command_reads_grammars_and_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "grammar.gbnf"
    file.write_text('root ::= "(" root ")" | "x"')
    monkeypatch.setattr("sys.stdin.read", lambda: "((x)", raising=False)
    assert main(["grammar", "--ebnf", str(file), "--accepts", "-"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        'no: the text ends at character 4, too early; there must come ")"',
        "enforced: GBNF",
    ]


@pytest.mark.parametrize(
    ("pattern", "text", "said"),
    [
        ("ab", "ab\n", "yes"),
        ("ab", "a\n", 'no: the text ends at character 1, too early; there must come "b"'),
        ("ab\n", "ab\n", "yes"),
        ("ab", "ab\n\n", 'no: illegal at character 2, "\\n"'),
    ],
)
def test_a_newline_at_the_end_of_standard_input_counts_only_if_it_is_wanted(
    pattern: str, text: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.read", lambda: text, raising=False)
    assert main(["grammar", "--regex", pattern, "--accepts", "-"]) == (0 if said == "yes" else 1)
    assert capsys.readouterr().out.splitlines()[0] == said


def test_the_command_reads_files_that_begin_with_a_byte_order_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type":"null"}', encoding="utf-8-sig")
    assert main(["grammar", "--json", str(file), "--accepts", "null"]) == 0
    assert capsys.readouterr().out.startswith("yes")


@pytest.mark.bad_input
def test_the_command_names_what_it_cannot_read_or_enforce(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grammar", "--json", str(tmp_path / "none.json"), "--accepts", "x"]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
    file = tmp_path / "schema.json"
    file.write_text('{"not":{}}')
    assert main(["grammar", "--json", str(file), "--accepts", "x"]) == 2
    assert "the keyword 'not' at #" in capsys.readouterr().err
    file.write_bytes(b'{"a":"\xff"}')
    assert main(["grammar", "--json", str(file), "--accepts", "x"]) == 2
    assert "not UTF-8" in capsys.readouterr().err
