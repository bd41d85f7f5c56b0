"""The bundled model, loaded once for all tests of chat, replay and determinism."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer_core import LLM


@pytest.fixture(scope="session")
def tiny_llm() -> Iterator[LLM]:
    with LLM("tiny", quiet=True, max_num_seqs=16, max_num_batched_tokens=512, draft_schedule="fixed") as llm:
        yield llm
