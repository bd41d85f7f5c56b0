"""What runs in the child process: grammars from the pipe, each converted, compiled and tried out.

    parent ─ line: vocabulary ─►  ─► "ready"
           ─ line: {form, text} ─► {"text", "enforced", "ignored"}   or   {"error": reason}

A grammar that hangs, exhausts memory or crashes llguidance does so here; the parent sees a closed pipe or no answer.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from typing import Any

from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.engine import build_tokenizer, rehearse, start_matcher
from deepinfer_core.structured.source import GrammarText, convert
from deepinfer_core.structured.vocabulary import Vocabulary

__all__ = ["main"]

_MAX_BYTES = 4 << 30  # of address space


def main() -> None:
    """Serve until the pipe closes."""
    _limit_memory()
    vocabulary = Vocabulary.from_json(sys.stdin.readline())
    tokenizer = build_tokenizer(vocabulary)
    print("ready", flush=True)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        answer: dict[str, Any]
        try:
            source = convert(GrammarText(request["form"], request["text"]))
            for text in (source.trial, source.text):
                if text is not None:
                    rehearse(start_matcher(tokenizer, text), vocabulary)
            answer = {"text": source.text, "enforced": source.enforced, "ignored": source.ignored}
        except GrammarError as error:
            answer = {"error": str(error)}
        except RecursionError:
            answer = {"error": "the grammar nests too deeply; flatten it"}
        except MemoryError:
            answer = {"error": "the grammar needs too much memory; make it smaller"}
        except ValueError as error:  # llguidance's, for schemas whose JSON it cannot take
            answer = {"error": f"the grammar cannot be enforced: {error}"}
        print(json.dumps(answer), flush=True)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _MAX_BYTES if hard == resource.RLIM_INFINITY else min(_MAX_BYTES, hard)
    with contextlib.suppress(ValueError):  # macOS takes no limit below what is mapped already
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
