"""`BlockPool`: who holds which block of the paged cache.

    clean    free, holds nothing worth keeping            taken first
    cached   free, but the prefix index can still hit it   taken last, least recently used first
    held     references > 0: slots that use it, pins on it

A block is written by the one request that allocated it and is shared only when it is full, so copy-on-write needs no
copy: a request that goes on where a shared prefix ends takes fresh blocks. The pool counts; what lies in a block is
the device's affair.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from deepinfer_core.errors import CapacityError, EngineError

__all__ = ["BlockPool"]


class BlockPool:
    """Reference counts and free lists of `num_blocks` blocks.

    `on_evict(block)` is called when a cached block is taken for something else: its hash must be forgotten.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        if num_blocks < 1:
            raise CapacityError(f"the cache has {num_blocks} blocks; it needs at least 1: give it more memory")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._hashed = bytearray(num_blocks)  # 1 = the prefix index knows the block
        self._clean = list(range(num_blocks - 1, -1, -1))  # a stack: low numbers first, recently freed ones again soon
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._pins: dict[tuple[str, int], tuple[int, ...]] = {}

    # ---- counts ----------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: clean and cached ones."""
        return len(self._clean) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that a prefix hit can still revive."""
        return len(self._cached)

    def references(self, block: int) -> int:
        """How many slots and pins hold `block`."""
        return self._references[block]

    def is_shared(self, block: int) -> bool:
        """Whether nobody may write `block` any more: it is in the prefix index, or more than one holds it."""
        return bool(self._hashed[block]) or self._references[block] > 1

    # ---- taking and giving back ------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; all or none. Raises CapacityError when there are not that many."""
        if count > self.num_available:
            raise CapacityError(
                f"{count} cache blocks are wanted and {self.num_available} of {self.num_blocks} are free"
            )
        from_clean = min(count, len(self._clean))
        blocks = [self._clean.pop() for _ in range(from_clean)]
        for _ in range(count - from_clean):
            block, _none = self._cached.popitem(last=False)
            self._hashed[block] = 0
            self._on_evict(block)
            blocks.append(block)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, which are held or cached."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise EngineError(
                        f"block {block} is shared but neither held nor cached; this is a bug in the scheduler"
                    )
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less. The end of a prefix is evicted first: without it the rest is still a hit."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise EngineError(f"block {block} is released but nobody holds it; this is a bug in the scheduler")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hashed[block]:
                    self._cached[block] = None
                else:
                    self._clean.append(block)

    # ---- the prefix index ------------------------------------------------------------------------------------------

    def mark_hashed(self, block: int) -> None:
        """The prefix index can now hit `block`, which is held."""
        self._hashed[block] = 1

    def forget_hashed(self, block: int) -> None:
        """The prefix index no longer knows `block`."""
        self._hashed[block] = 0
        if block in self._cached:
            del self._cached[block]
            self._clean.append(block)

    # ---- pins of others than slots ---------------------------------------------------------------------------------

    def pin(self, owner: str, epoch: int, blocks: Sequence[int]) -> None:
        """Hold `blocks` for a reader outside the scheduler (an export, a transfer) until `unpin(owner, epoch)`."""
        key = (owner, epoch)
        if key in self._pins:
            raise EngineError(f"{owner} already has pins of epoch {epoch}; give each transfer its own epoch")
        self.share(blocks)
        self._pins[key] = tuple(blocks)

    def unpin(self, owner: str, epoch: int) -> bool:
        """Drop the pins of that owner and epoch. False if there are none: a late message changes nothing."""
        blocks = self._pins.pop((owner, epoch), None)
        if blocks is None:
            return False
        self.release(blocks)
        return True

    # ---- integrity -------------------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Raise EngineError unless every block is free or cached, as it must be when no request has a slot."""
        if self._pins:
            raise EngineError(f"pins are left: {', '.join(f'{owner} (epoch {epoch})' for owner, epoch in self._pins)}")
        if self.num_available != self.num_blocks:
            leaked = [block for block, count in enumerate(self._references) if count]
            raise EngineError(
                f"{len(leaked)} of {self.num_blocks} cache blocks are held by nobody, the first is {leaked[:1]}"
            )
