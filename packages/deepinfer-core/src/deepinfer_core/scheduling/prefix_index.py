"""Prefix index: which cached blocks hold the beginning of a prompt.

    root  = H(layout version | weights fingerprint | tenant salt)
    key 0 = H(root  | tokens   0..127 | identity)       H = blake2b-256 keyed with the secret salt
    key 1 = H(key 0 | tokens 128..255 | identity)

A key names the whole prefix up to the end of its block. The secret makes keys unpredictable, so no prompt can be
built to collide with another's; a tenant salt keeps the cache of one tenant from answering, or timing, another's
prompts. The identity is one byte a position that tells images apart, whose positions all carry the same token id; it
is left out of blocks of pure text (all zero).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np

from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.scheduling.plan import Int64Array, UInt8Array

__all__ = ["LAYOUT_VERSION", "Hit", "HitSource", "PrefixHasher", "PrefixIndex"]

LAYOUT_VERSION = 1  # of what lies in a block; a new layout makes old keys miss
_KEY_BYTES = 32
_KEY_DTYPE = np.dtype("<i8")  # of token ids in a key, on every machine


class PrefixHasher:
    """Keys of the full blocks of a token sequence.

    salt: the secret, 16 to 64 bytes; None draws a new one, which makes keys of another process useless here.
    fingerprint: of the weights; other weights, other keys.
    """

    def __init__(self, fingerprint: bytes, salt: bytes | None = None) -> None:
        salt = secrets.token_bytes(32) if salt is None else salt
        self._keyed = blake2b(digest_size=_KEY_BYTES, key=salt)  # copied for each hash: cheaper than to key each anew
        self._prefix = LAYOUT_VERSION.to_bytes(4, "little") + len(fingerprint).to_bytes(4, "little") + fingerprint

    def root(self, tenant_salt: str = "") -> bytes:
        """Where the chain of a tenant starts."""
        return self._hash(self._prefix + tenant_salt.encode("utf-8", "surrogatepass"))

    def chain(self, keys: list[bytes], root: bytes, token_ids: Int64Array, identity: UInt8Array | None = None) -> None:
        """Append to `keys` until it has one key for each full block of `token_ids`."""
        parent = keys[-1] if keys else root
        for start in range(len(keys) * BLOCK_TOKENS, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            span = slice(start, start + BLOCK_TOKENS)
            body = parent + token_ids[span].astype(_KEY_DTYPE, copy=False).tobytes()
            if identity is not None and (images := identity[span]).any():
                body += images.tobytes()
            parent = self._hash(body)
            keys.append(parent)

    def _hash(self, data: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(data)
        return keyed.digest()


class Hit(NamedTuple):
    """How much of a prompt a source holds. `has_window`: window rings come along, so nothing need be replayed."""

    num_tokens: int
    has_window: bool = False
    blocks: tuple[int, ...] = ()  # where they lie on this device; empty for a source that has to load them first


class HitSource(Protocol):
    """Something that may hold the beginning of a prompt: this device, another rank, a store."""

    def find(self, keys: Sequence[bytes]) -> Hit:
        """The longest prefix of `keys` (one a block) that is held."""
        ...


class PrefixIndex:
    """Keys of the blocks on this device. A `HitSource`."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, keys: Sequence[bytes]) -> Hit:
        """The longest prefix of `keys` whose blocks are here."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return Hit(len(blocks) * BLOCK_TOKENS, blocks=tuple(blocks))

    def insert(self, key: bytes, block: int) -> bool:
        """Make `block` hittable. False if another block holds the same prefix: that one stays the shared one."""
        if key in self._block_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def forget(self, block: int) -> None:
        """The block is about to hold something else."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
