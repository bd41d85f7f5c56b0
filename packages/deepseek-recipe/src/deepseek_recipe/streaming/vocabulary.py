"""What every token id spells, looked up once: the decoding half of a byte-level tokenizer.json.

ordinary id ─▶ bytes        the vocabulary writes each byte as one printable character (GPT-2's table)
added id    ─▶ its spelling, which stands alone
unknown id  ─▶ no bytes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

__all__ = ["REPLACEMENT", "Vocabulary"]

REPLACEMENT: Final = "\ufffd"
_MAX_VOCABULARY_ID: Final = 2**31 - 1  # beyond it the backend has no ids


def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER: Final = _byte_of_character()


class Vocabulary:
    """Bytes of token ids, remembered. One object serves any number of streams.

    `added`: spellings of the added tokens by id. `texts`: those ordinary ids met so far that are text by themselves,
    which is valid UTF-8, not empty and without U+FFFD.
    """

    __slots__ = ("_backend", "_bytes", "added", "texts")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.added: dict[int, str] = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of any id; none for an unknown one."""
        known = self._bytes.get(token_id)
        return self._look_up(token_id) if known is None else known

    def _look_up(self, token_id: int) -> bytes:
        added = self.added.get(token_id)
        if added is not None:
            spelled = added.encode()
        else:
            token = self._backend.id_to_token(token_id) if token_id <= _MAX_VOCABULARY_ID else None
            if token is None:
                return b""  # not remembered: there are 2**32 of them
            spelled = _spelled_bytes(token)
            text = spelled.decode("utf-8", "replace")
            if text and REPLACEMENT not in text:
                self.texts[token_id] = text
        self._bytes[token_id] = spelled
        return spelled


def _spelled_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()  # a vocabulary that is not byte-level
