"""Compiling: hostile grammars end in a clean error in time and harm nothing; the cache stays within its bytes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.errors import GrammarError, RequestError
from deepinfer_core.structured import GrammarCompiler, Matcher
from deepinfer_core.structured.accepts import byte_compiler
from deepinfer_core.text import Tokenizer

_LIMIT_S = 2.0

_LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
_DOUBLING = "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(40))

_HOSTILE: dict[str, dict[str, Any]] = {
    "30,000 parentheses in a regex": {"regex": "(" * 30_000 + ")" * 30_000},
    "90 optional groups around each other": {"regex": "(?:" * 90 + "a" + "|b)*" * 90},
    "nested counted repetitions": {"regex": "(a{1000}){1000}"},
    "counts that are slow at every token": {"regex": "(a{200}){200}"},
    "30,000 parentheses in GBNF": {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "30,000 parentheses in Lark": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "rules that double forty times": {"grammar": f'root ::= a0\n{_DOUBLING}\na40 ::= "x"'},
    "a hundred thousand enum values": {"json": {"enum": [f"v{i}" for i in range(100_000)]}},
    "a $ref to itself": {"json": {"$ref": "#"}},
    "a $ref loop": {"json": _LOOP},
    "an object without end": {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    "an array without end": {"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
    "a grammar without end": {"grammar": 'root ::= "a" root'},
    "sixty patterns at once": {
        "json": {"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(1, 60)]}
    },
    "a number that crashes llguidance": {"json": {"const": -(2**63)}},
    "look-behind": {"regex": "(?<=a)b"},
    "a backreference": {"regex": r"(a)\1"},
    "a remote $ref": {"json": {"$ref": "https://example.com/schema.json"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def warm() -> Any:
    compiler = byte_compiler()
    compiler.compile(StructuredOutput(choice=["warm"]))
    yield compiler
    compiler.close()


@pytest.mark.bad_input
@pytest.mark.parametrize("name", _HOSTILE)
def test_a_hostile_grammar_is_refused_in_time_and_the_next_one_compiles(name: str, warm: GrammarCompiler) -> None:
    warm.compile(StructuredOutput(regex=f"a{len(name)}"))  # the child may just be starting again
    started = time.monotonic()
    with pytest.raises(GrammarError):
        warm.compile(StructuredOutput(**_HOSTILE[name]))
    assert time.monotonic() - started < _LIMIT_S
    assert Matcher(warm.compile(StructuredOutput(choice=[name]))).advance(ord(name[0]))


@pytest.mark.bad_input
def test_a_schema_text_too_deep_to_read_is_refused_for_its_depth() -> None:
    with pytest.raises(RequestError, match="nests deeper than 100 levels"):
        StructuredOutput(json='{"items":' * 60_000 + "{}" + "}" * 60_000)


@pytest.mark.bad_input
def test_a_schema_deeper_than_100_levels_is_refused() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(5_000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="deeper than 100"):
        StructuredOutput(json=schema)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(.*a.*b.*c){8}", "(x+x+)+y", "([a-z]+)*[0-9]"])
def test_patterns_that_ruin_backtracking_engines_cost_nothing_here(pattern: str, warm: GrammarCompiler) -> None:
    started = time.monotonic()
    matcher = Matcher(warm.compile(StructuredOutput(regex=pattern)))
    for _ in range(2_000):
        if not matcher.advance(ord("a")):
            break
        matcher.mask()
    assert time.monotonic() - started < _LIMIT_S


def test_a_refusal_is_remembered(byte_grammars: GrammarCompiler) -> None:
    hostile = StructuredOutput(json={"allOf": [{"type": "string", "pattern": f"b{{{i}}}"} for i in range(1, 60)]})
    with pytest.raises(GrammarError):
        byte_grammars.compile(hostile)
    started = time.monotonic()
    with pytest.raises(GrammarError, match=r"within 1\.2 s"):
        byte_grammars.compile(hostile)
    assert time.monotonic() - started < 0.1


def test_the_same_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(StructuredOutput(json={"type": "integer"}))
    assert compiler.compile(StructuredOutput(json='{ "type" : "integer" }', after=[5])) is first


def test_the_cache_holds_no_more_bytes_than_it_may(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, max_cache_bytes=300_000)
    try:
        first = compiler.compile(StructuredOutput(regex="a0"))
        for number in range(1, 20):
            compiler.compile(StructuredOutput(regex=f"a{number}"))
            compiler.compile(StructuredOutput(regex=f"a{number}"))
            assert compiler.num_cached_bytes <= 300_000
        assert compiler.num_cached_bytes > 150_000
        assert compiler.compile(StructuredOutput(regex="a19")) is compiler.compile(StructuredOutput(regex="a19"))
        assert compiler.compile(StructuredOutput(regex="a0")) is not first
    finally:
        compiler.close()


def test_of_two_grammars_the_one_not_used_for_longest_goes_first(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, max_cache_bytes=240_000)  # three of them
    try:
        kept, lost = (compiler.compile(StructuredOutput(regex=regex)) for regex in ("kept", "lost"))
        for number in range(3):
            assert compiler.compile(StructuredOutput(regex="kept")) is kept
            compiler.compile(StructuredOutput(regex=f"a{number}"))
        assert compiler.compile(StructuredOutput(regex="lost")) is not lost
    finally:
        compiler.close()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="Linux says what another process may use")
def test_the_child_may_use_four_gibibytes(byte_grammars: GrammarCompiler) -> None:
    byte_grammars.compile(StructuredOutput(choice=["a child runs"]))
    child = next(sandbox._child for sandbox in byte_grammars._sandboxes if sandbox.is_ready)
    assert child is not None
    assert 0 < resource.prlimit(child._process.pid, resource.RLIMIT_AS)[0] <= 4 << 30  # no limit is -1
    assert resource.prlimit(child._process.pid, resource.RLIMIT_CORE)[0] == 0


def test_a_grammar_larger_than_the_cache_still_works(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, max_cache_bytes=0)
    try:
        assert Matcher(compiler.compile(StructuredOutput(choice=["yes"]))).forced()
        assert compiler.num_cached_bytes == 0
    finally:
        compiler.close()


def test_grammars_from_many_threads(byte_grammars: GrammarCompiler) -> None:
    results: dict[int, bool] = {}

    def work(number: int) -> None:
        grammar = byte_grammars.compile(StructuredOutput(choice=[f"t{number % 3}"]))
        results[number] = Matcher(grammar).forced() == [*f"t{number % 3}".encode()]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(12), True)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one worker")
def test_a_hostile_grammar_holds_up_nobody_elses(warm: GrammarCompiler) -> None:
    def hostile(letter: str) -> StructuredOutput:
        return StructuredOutput(
            json={"allOf": [{"type": "string", "pattern": f"{letter}{{{i}}}"} for i in range(1, 60)]}
        )

    slow = warm.submit(hostile("c"))
    warm.compile(StructuredOutput(choice=["a second child has started"]))
    assert "not compiled within" in str(slow.exception())
    turn = 0
    while not all(sandbox.is_ready for sandbox in warm._sandboxes):  # the first child is being replaced
        turn += 1
        warm.compile(StructuredOutput(choice=[f"{turn}"]))
    slow = warm.submit(hostile("d"))
    warm.compile(StructuredOutput(choice=["quick"]))
    assert not slow.done()
    assert "not compiled within" in str(slow.exception())


def test_a_grammar_that_many_ask_for_is_compiled_once(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    try:
        asked = [compiler.submit(StructuredOutput(regex="[a-z]{3}x")) for _ in range(8)]
        assert len({id(one.result()) for one in asked}) == 1
        refused = [compiler.submit(StructuredOutput(regex="(?=a)b")) for _ in range(2)]
        assert refused[0].exception() is not refused[1].exception()  # a caller may add notes to its own
    finally:
        compiler.close()


def test_a_request_that_waits_when_the_compiler_is_closed_is_told(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    asked = [compiler.submit(StructuredOutput(regex=f"[a-z]{{3}}{i}")) for i in range(12)]
    compiler.close()
    errors = [one.exception() for one in asked]
    assert all(error is None or "closed" in str(error) for error in errors)
    assert errors[-1] is not None


@pytest.mark.bad_input
def test_a_closed_compiler_says_so(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    compiler.close()
    with pytest.raises(GrammarError, match="closed"):
        compiler.compile(StructuredOutput(json_object=True))


def test_llguidance_is_not_imported_before_the_first_grammar() -> None:
    program = (
        "import json, sys; import deepinfer_core.structured, deepinfer_core.structured.accepts as a; a.byte_compiler();"
        "print(json.dumps([name in sys.modules for name in ('llguidance', 'torch')]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, False]
