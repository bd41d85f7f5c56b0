"""Text to token ids and back."""

from __future__ import annotations

from deepinfer_core.text.stream import TextStream
from deepinfer_core.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
