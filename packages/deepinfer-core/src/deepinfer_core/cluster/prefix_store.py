"""The store of prefixes: what of a prompt need not be computed again.

    stored by session    [ shared prefix | blocks of 128 tokens, up to the end of the last answer ]
    lost                 whole, when not used for `retention`, or as the least recently used when the store is full

Hits are exact prefixes in whole blocks. A hit of at most one block is not taken, and the last token of a
prompt is always computed, since its logits are wanted.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from deepinfer_core.cluster.settings import Section, setting

__all__ = ["BLOCK_TOKENS", "PrefixStore", "StoreSettings"]

BLOCK_TOKENS = 128


@dataclass(frozen=True)
class StoreSettings(Section):
    """`[store]` of a plan."""

    terabytes: float = setting(500.0, 0.0, 1e6, "assumed", "for the whole cluster; 0: nothing is reused")
    gigabytes_per_s: float = setting(40.0, 1e-3, 1e5, "published", "peak of one client of 3FS")
    latency_s: float = setting(0.002, 0.0, 60.0, "assumed", "of a look-up and first byte")


class _Entry(NamedTuple):
    blocks: int  # that a prompt with this key can hit
    own_blocks: int  # that take room: the others are shared with another key
    expires_s: float


class PrefixStore:
    """Blocks by key, least recently used first. Not more than `capacity_blocks`."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.used_blocks = 0
        self.evicted_blocks = 0
        self.expired_blocks = 0
        self._entries: OrderedDict[object, _Entry] = OrderedDict()

    def hit_tokens(self, key: object, prompt_tokens: int, now_s: float) -> int:
        """Tokens of a prompt that are there: whole blocks, more than one, never the last token."""
        entry = self._entries.get(key)
        if entry is None:
            return 0
        if entry.expires_s <= now_s:
            self.expired_blocks += entry.own_blocks
            self._remove(key)
            return 0
        self._entries.move_to_end(key)
        tokens = min(entry.blocks, (prompt_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        return tokens if tokens > BLOCK_TOKENS else 0

    def put(self, key: object, tokens: int, now_s: float, retention_s: float, shared_tokens: int = 0) -> None:
        """Keep the whole blocks of `tokens` tokens, as the most recently used.

        The blocks of the first `shared_tokens` lie under another key already and take no room.
        """
        blocks = tokens // BLOCK_TOKENS
        own_blocks = max(0, blocks - shared_tokens // BLOCK_TOKENS)
        if blocks == 0 or own_blocks > self.capacity_blocks:
            return
        if key in self._entries:
            self._remove(key)
        while self.used_blocks + own_blocks > self.capacity_blocks:
            oldest = next(iter(self._entries))
            self.evicted_blocks += self._entries[oldest].own_blocks
            self._remove(oldest)
        self._entries[key] = _Entry(blocks, own_blocks, now_s + retention_s)
        self.used_blocks += own_blocks

    def _remove(self, key: object) -> None:
        self.used_blocks -= self._entries.pop(key).own_blocks
