"""A compiler for the tiny tokenizer, and one over bytes; each has one child process for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer_core.structured import GrammarCompiler
from deepinfer_core.structured.accepts import byte_compiler
from deepinfer_core.text import Tokenizer
from tests.core.harness import FIXTURES


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_path(FIXTURES / "tiny-a", bos_token_id=0, eos_token_id=1)


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer)
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def byte_grammars() -> Iterator[GrammarCompiler]:
    compiler = byte_compiler()
    yield compiler
    compiler.close()
