"""One engine on the fixture checkpoint for all tests of the face; its weights are random, so its text is noise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer_core import LLM
from tests.core.harness import FIXTURES

MODEL = FIXTURES / "tiny-a"


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, quiet=True, max_num_seqs=16, max_num_batched_tokens=256) as made:
        yield made
