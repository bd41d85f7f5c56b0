"""Formats of strings: enforced, or refused by name; dates and times as a reader in Python takes them."""

from __future__ import annotations

import base64
import binascii
import datetime
import json
import uuid

import pytest

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.structured import GrammarCompiler, check_text


def _accepts(compiler: GrammarCompiler, name: str, text: str) -> bool:
    structured = StructuredOutput(json={"type": "string", "format": name})
    return check_text(structured, json.dumps(text, ensure_ascii=False), compiler=compiler).accepted


@pytest.mark.parametrize("version", [1, 3, 4, 5])
def test_a_uuid_has_its_version(version: int, byte_grammars: GrammarCompiler) -> None:
    made = {
        1: uuid.uuid1(),
        3: uuid.uuid3(uuid.NAMESPACE_DNS, "x"),
        4: uuid.uuid4(),
        5: uuid.uuid5(uuid.NAMESPACE_DNS, "x"),
    }
    accepted = [other for other, value in made.items() if _accepts(byte_grammars, f"uuid{version}", str(value))]
    assert accepted == [version]


@pytest.mark.parametrize("text", ["", "aGk=", "aGkx", "YQ==", "aGk", "YQ=", "a Gk", "aG=k", "+/+/", "-_-_", "YQ"])
def test_base64_is_what_python_decodes(text: str, byte_grammars: GrammarCompiler) -> None:
    try:
        base64.b64decode(text, validate=True)
        decodes = True
    except binascii.Error:
        decodes = False
    assert _accepts(byte_grammars, "byte", text) == decodes
    assert _accepts(byte_grammars, "base64", text) == decodes
    url_safe = decodes and not set(text) & set("+/")
    assert _accepts(byte_grammars, "base64url", text) == (url_safe or text in ("-_-_", "aGk", "YQ"))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("json-pointer", ["", "/a/0", "/a~1b/~0", "/"], ["a", "/~", "/~2"]),
        ("relative-json-pointer", ["0", "1/a", "12#"], ["/a", "01", "-1"]),
        ("password", ["", "anything"], []),
        ("binary", ["any \u00e9"], []),
    ],
)
def test_formats_with_a_pattern_and_without(
    name: str, good: list[str], bad: list[str], byte_grammars: GrammarCompiler
) -> None:
    assert [text for text in good if not _accepts(byte_grammars, name, text)] == []
    assert [text for text in bad if _accepts(byte_grammars, name, text)] == []


@pytest.mark.parametrize("text", ["23:59:59Z", "23:59:60Z", "22:59:60Z", "00:00:00+01:30", "12:30:60.5+00:00"])
def test_times_have_sixty_seconds(text: str, byte_grammars: GrammarCompiler) -> None:
    try:
        datetime.time.fromisoformat(text)
        exists = True
    except ValueError:
        exists = False
    assert _accepts(byte_grammars, "time", text) == exists
    assert _accepts(byte_grammars, "date-time", f"1998-12-31T{text}") == exists
