"""`BlockLedger`: the blocks of running requests, from the pool and the prefix index to the rows of the slot table.

    admit     share the blocks of a hit, allocate the rest of the known tokens
    grow      more blocks for a request that is about to cross into them
    seal      a block is full and computed: make it hittable
    release   everything goes back; sealed blocks stay cached until they are needed

Whether a hit is worth taking is decided by `ReplayRules`.
"""

from __future__ import annotations

from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.scheduling.blocks import BlockPool
from deepinfer_core.scheduling.prefix_index import Hit, PrefixHasher, PrefixIndex
from deepinfer_core.scheduling.replay import HitOutcome, ReplayRules, Reuse
from deepinfer_core.scheduling.request import Request
from deepinfer_core.scheduling.slots import SlotTable

__all__ = ["BlockLedger", "num_blocks_for"]


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold so many positions."""
    return -(-num_tokens // BLOCK_TOKENS)


class BlockLedger:
    """Connects pool, index and slot table. `hasher` None: no prefix is ever kept."""

    def __init__(self, table: SlotTable, num_blocks: int, hasher: PrefixHasher | None, rules: ReplayRules) -> None:
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self.index.forget)
        self._table = table
        self._hasher = None if rules.prefix_replay == "off" else hasher
        self._rules = rules

    @property
    def num_used(self) -> int:
        """Blocks that requests or pins hold."""
        return self.pool.num_blocks - self.pool.num_available

    def prepare(self, request: Request) -> None:
        """Hash the blocks of a prompt when it arrives, so that the step that admits it need not."""
        if not request.all_rows_wanted:
            self._extend_keys(request, request.num_tokens)

    def find(self, request: Request) -> tuple[Hit, Reuse]:
        """What of `request` is cached, and what to make of it."""
        if self._hasher is None:
            return Hit(0), Reuse(HitOutcome.OFF)
        if request.all_rows_wanted:
            hit = Hit(0)
        else:
            self._extend_keys(request, request.num_tokens)
            hit = self.index.find(request.keys)
        reuse = self._rules.reuse(hit, request.num_tokens, request.decoder_from, all_rows=request.all_rows_wanted)
        return hit, reuse

    def missing_blocks(self, request: Request, hit: Hit, reuse: Reuse) -> int:
        """Blocks to allocate beyond what is available, if positive, before `request` can be admitted."""
        shared = hit.blocks[: reuse.shared_tokens // BLOCK_TOKENS]
        revived = sum(self.pool.references(block) == 0 for block in shared)
        return num_blocks_for(request.num_tokens) - len(shared) + revived - self.pool.num_available

    def admit(self, slot: int, request: Request, hit: Hit, reuse: Reuse) -> None:
        """Give `slot` the shared blocks and fresh ones for all known tokens. CapacityError: nothing was taken."""
        shared = list(hit.blocks[: reuse.shared_tokens // BLOCK_TOKENS])
        self.pool.share(shared)
        try:
            fresh = self.pool.allocate(num_blocks_for(request.num_tokens) - len(shared))
        except Exception:
            self.pool.release(shared)
            raise
        self._table.add_blocks(slot, shared + fresh)
        self._table.sealed_blocks[slot] = len(shared)

    def grow(self, slot: int, num_blocks: int) -> None:
        """Let `slot` have `num_blocks` blocks more. Raises CapacityError, with nothing taken."""
        self._table.add_blocks(slot, self.pool.allocate(num_blocks))

    def seal(self, slot: int, first: int, end: int) -> None:
        """Blocks first .. end - 1 of `slot`, those after its sealed ones, are full and computed: they are final."""
        table = self._table
        request = table.flush(slot)
        table.sealed_blocks[slot] = end
        if self._hasher is None:
            return
        self._extend_keys(request, end * BLOCK_TOKENS)
        for key, block in zip(request.keys[first:end], table.block_table[slot, first:end].tolist(), strict=True):
            if self.index.insert(key, block):
                self.pool.mark_hashed(block)

    def release(self, slot: int) -> Request:
        """Take the request out of `slot`; its blocks go back to the pool."""
        request = self._table.request(slot)
        self.pool.release(self._table.vacate(slot))
        return request

    def _extend_keys(self, request: Request, num_tokens: int) -> None:
        if self._hasher is not None and len(request.keys) < num_tokens // BLOCK_TOKENS:
            tokens = request.tokens[:num_tokens]
            self._hasher.chain(request.keys, request.root_key, tokens, request.identity)
