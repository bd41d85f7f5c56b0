"""`deepinfer grammar`: does a text satisfy a schema, a regular expression or a grammar, and what of it is enforced?

$ deepinfer grammar --json person.json --accepts '{"name":"Ada"}'
no: illegal at character 13, "}"; there must come ",\\"age\\":"
enforced: properties, required, type
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.errors import GrammarError
from deepinfer_core.structured import Verdict, check_text

__all__ = ["add_parser", "run"]

_MAX_FILE_BYTES = 4 << 20
_MOST_SHOWN = 80  # characters of the text that has to come


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `grammar` command."""
    parser = subparsers.add_parser(
        "grammar",
        help="test a text against a schema or grammar",
        description="Says whether a text satisfies a grammar, where it first breaks it, and which keywords are "
        "enforced. Exit status 0 = yes, 1 = no, 2 = the grammar cannot be enforced.",
    )
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--json", metavar="FILE", type=Path, help="a JSON Schema")
    form.add_argument(
        "--regex", metavar="REGEX", help="a regular expression for the whole text; --regex=-.. if it begins with a dash"
    )
    form.add_argument("--ebnf", metavar="FILE", type=Path, help="a grammar: GBNF or Lark")
    form.add_argument("--choice", metavar="TEXT", action="append", help="one of these texts; may be repeated")
    parser.add_argument(
        "--accepts",
        metavar="TEXT",
        required=True,
        help="the text; - reads it from standard input, where one newline at its end may be too many",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the verdict. 0 = accepted, 1 = not."""
    text = sys.stdin.read() if args.accepts == "-" else args.accepts
    verdict = check_text(_structured(args), text)
    # What `echo` adds is no part of the text, unless the grammar wants it.
    if args.accepts == "-" and text.endswith("\n") and verdict.position == len(text) - 1:
        text = text[:-1]
        verdict = check_text(_structured(args), text)
    print("yes" if verdict.accepted else f"no: {_reason(verdict, text)}")
    if args.json is not None and verdict.position is not None and text[verdict.position :][:1].isspace():
        print("answers to a schema are compact JSON, without spaces between their parts")
    print(f"enforced: {', '.join(verdict.enforced) or 'nothing'}")
    if verdict.ignored:
        print(f"not JSON Schema, so without effect: {', '.join(verdict.ignored)}")
    return 0 if verdict.accepted else 1


def _structured(args: argparse.Namespace) -> StructuredOutput:
    if args.json is not None:
        return StructuredOutput(json=_read(args.json))
    if args.regex is not None:
        return StructuredOutput(regex=args.regex)
    if args.ebnf is not None:
        return StructuredOutput(grammar=_read(args.ebnf))
    return StructuredOutput(choice=args.choice)


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise GrammarError(f"{file} has {file.stat().st_size} bytes; at most {_MAX_FILE_BYTES} are read")
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise GrammarError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GrammarError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _reason(verdict: Verdict, text: str) -> str:
    if verdict.position == len(text):
        where = f"the text ends at character {verdict.position}, too early"
    else:
        where = f"illegal at character {verdict.position}, {_quoted(text[verdict.position or 0])}"
    more = " ..." if len(verdict.next_text) > _MOST_SHOWN else ""
    next_text = _quoted(verdict.next_text[:_MOST_SHOWN]) + more
    return f"{where}; there must come {next_text}" if verdict.next_text else where


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
