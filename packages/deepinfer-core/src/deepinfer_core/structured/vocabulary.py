"""`Vocabulary`: the tokens of a tokenizer as grammars see them: bytes by id, which ids are special, the end token.

Special tokens never stand for their spelling: a grammar that allows the text "<think>" allows plain tokens that spell
it, not the control token.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

__all__ = ["TokenizerLike", "Vocabulary"]


class TokenizerLike(Protocol):
    """What is needed of `deepinfer_core.text.Tokenizer`."""

    @property
    def num_tokens(self) -> int:
        """Ids go from 0 to this, exclusive."""
        ...

    @property
    def eos_token_id(self) -> int:
        """The token that ends an answer."""
        ...

    @property
    def special_ids(self) -> AbstractSet[int]:
        """Control tokens."""
        ...

    def token_bytes(self, token_id: int, /) -> bytes:
        """Bytes of a token, empty for an id without one."""
        ...

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """Token ids of a text."""
        ...


@dataclass(frozen=True)
class Vocabulary:
    """tokens [V]: bytes by id. special: ids that stand for no text, the end token among them."""

    tokens: tuple[bytes, ...]
    special: tuple[int, ...]
    eos_token_id: int

    @classmethod
    def of(cls, tokenizer: TokenizerLike) -> Vocabulary:
        """The vocabulary of a tokenizer."""
        tokens = tuple(tokenizer.token_bytes(token) for token in range(tokenizer.num_tokens))
        special = tuple(sorted({*tokenizer.special_ids, tokenizer.eos_token_id}))
        return cls(tokens, special, tokenizer.eos_token_id)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_mask_words(self) -> int:
        """32-bit words of a mask."""
        return (len(self.tokens) + 31) // 32

    @cached_property
    def fingerprint(self) -> str:
        """Differs between any two vocabularies that could give different masks."""
        state = hashlib.blake2b(digest_size=16)
        for token in self.tokens:
            state.update(len(token).to_bytes(4, "little") + token)
        state.update(repr((self.special, self.eos_token_id)).encode())
        return state.hexdigest()

    def to_json(self) -> str:
        """For the child process."""
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        return json.dumps({"tokens": tokens, "special": self.special, "eos": self.eos_token_id})

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        """The inverse of `to_json`; reads only what that wrote."""
        root: dict[str, Any] = json.loads(text)
        return cls(tuple(base64.b64decode(token) for token in root["tokens"]), tuple(root["special"]), root["eos"])
