"""`check_text`: does a text satisfy a grammar, and if not, where does it leave it?

The vocabulary is the 256 bytes, so the position is exact, and no model is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.structured.compiler import CompiledGrammar, GrammarCompiler
from deepinfer_core.structured.matcher import Matcher

__all__ = ["Verdict", "check_text"]

_NUM_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Verdict:
    """accepted: the whole text satisfies the grammar.

    position: number of characters up to the first illegal one; the length of the text if it only lacks its rest;
    None if accepted. next_text: what has to come there, as far as there is no choice.
    enforced, ignored: as in `GrammarSource`.
    """

    accepted: bool
    position: int | None
    next_text: str
    enforced: tuple[str, ...]
    ignored: tuple[str, ...]


class _Bytes:
    """A tokenizer with a token a byte."""

    num_tokens = _NUM_BYTES + 1
    eos_token_id = _NUM_BYTES
    special_ids = frozenset({_NUM_BYTES})

    def token_bytes(self, token_id: int, /) -> bytes:
        return b"" if token_id == self.eos_token_id else bytes([token_id])

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        return list(text.encode("utf-8"))


def check_text(structured: StructuredOutput, text: str, *, compiler: GrammarCompiler | None = None) -> Verdict:
    """Match `text` against the grammar of `structured`; its `after` and `until` play no part.

    compiler: to check many texts with one child process; must come from `byte_compiler`. Raises GrammarError.
    """
    own = compiler or byte_compiler()
    try:
        return _verdict(own.compile(structured), text)
    finally:
        if compiler is None:
            own.close()


def byte_compiler() -> GrammarCompiler:
    """A compiler for `check_text`. Close it after use."""
    return GrammarCompiler(_Bytes())


def _verdict(grammar: CompiledGrammar, text: str) -> Verdict:
    matcher = Matcher(grammar)
    data = text.encode("utf-8", "surrogatepass")
    num_legal = next((i for i, byte in enumerate(data) if not matcher.advance(byte)), len(data))
    accepted = num_legal == len(data) and matcher.is_complete
    position = None if accepted else len(data[:num_legal].decode("utf-8", "ignore"))
    forced = [] if accepted else [byte for byte in matcher.forced() if byte < _NUM_BYTES]
    source = grammar.source
    return Verdict(accepted, position, bytes(forced).decode("utf-8", "ignore"), source.enforced, source.ignored)
