"""`Tokenizer`: text to token ids and back, for one checkpoint's tokenizer.json (byte-level BPE).

    encode("Hi <think>")                        [bos] + plain BPE: the spelling of a special token is mere text
    encode("Hi <think>", parse_special=True)    [bos] + BPE that turns such spellings into their ids

Two encoders are built from the one file: as it is, and with its added tokens taken out. Text of a user never becomes a
control token unless the caller says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from deepinfer_core.errors import CheckpointError, ModelNotFoundError, RequestError

__all__ = ["Tokenizer"]

_FILE_NAME = "tokenizer.json"
_MAX_FILE_BYTES = 256 << 20


class Tokenizer:
    """Encodes and decodes. `bos_token_id` and `eos_token_id` are the model's, from config.json."""

    def __init__(self, raw: bytes, *, bos_token_id: int, eos_token_id: int, where: str = _FILE_NAME) -> None:
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        root = _parse(raw, where)
        added: list[dict[str, Any]] = root.get("added_tokens") or []
        try:
            self._parsing = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(root | {"added_tokens": [], "post_processor": None}))
            self.special_ids = frozenset(int(token["id"]) for token in added if token["special"])
        except Exception as error:  # the library raises bare Exception for whatever it cannot read
            raise CheckpointError(f"{where} cannot be read as a tokenizer ({error}); fetch the file again") from error
        self.num_tokens = self._parsing.get_vocab_size(with_added_tokens=True)
        self._bytes_of = _token_bytes(self._parsing, {str(token["content"]) for token in added}, where)
        for name, token_id in (("bos_token_id", bos_token_id), ("eos_token_id", eos_token_id)):
            if not 0 <= token_id < self.num_tokens:  # an end token that is never drawn would end no answer
                raise CheckpointError(f"{where} has {self.num_tokens} tokens, but config.json's {name} is {token_id}")

    @classmethod
    def from_path(cls, path: str | Path, *, bos_token_id: int, eos_token_id: int) -> Tokenizer:
        """Read a tokenizer.json, or the one in a folder. Raises ModelNotFoundError or CheckpointError."""
        file = Path(path) / _FILE_NAME if Path(path).is_dir() else Path(path)
        try:
            if file.stat().st_size > _MAX_FILE_BYTES:
                raise CheckpointError(f"{file} has {file.stat().st_size} bytes; at most {_MAX_FILE_BYTES} are read")
            raw = file.read_bytes()
        except OSError as error:
            raise ModelNotFoundError(
                f"{file} cannot be read ({error.strerror}); a model's folder holds a {_FILE_NAME}, or set tokenizer"
            ) from error
        return cls(raw, bos_token_id=bos_token_id, eos_token_id=eos_token_id, where=str(file))

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object of the file as it is."""
        return self._parsing

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = True) -> list[int]:
        """Token ids of `text`, with the begin-of-sentence id once at the front unless it is there.

        Raises RequestError for text that is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate at character {error.start}; it cannot be encoded"
            ) from error
        ids: list[int] = (self._parsing if parse_special else self._plain).encode(text, add_special_tokens=False).ids
        return [self.bos_token_id, *ids] if add_bos and ids[:1] != [self.bos_token_id] else ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id without a token."""
        return self._bytes_of.get(token_id, b"")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", "replace")


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    try:
        root = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(root, dict) or "ByteLevel" not in json.dumps([root.get("decoder"), root.get("pre_tokenizer")]):
        raise CheckpointError(f"{where} is not a byte-level tokenizer; DeepSeek-V4.1 has one")
    return root


def _token_bytes(tokenizer: tokenizers.Tokenizer, added: set[str], where: str) -> dict[int, bytes]:
    byte_of = _byte_of_character()
    table: dict[int, bytes] = {}
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token in added:
            table[token_id] = token.encode("utf-8")
        elif all(character in byte_of for character in token):
            table[token_id] = bytes(byte_of[character] for character in token)
        else:
            raise CheckpointError(f"{where}: token {token_id} ({token!r}) is not in the byte-level alphabet")
    return table


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, other bytes for U+0100 and up, in order (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
