"""Block pool: counts, order of eviction, pins."""

from __future__ import annotations

import pytest

from deepinfer_core.errors import CapacityError, EngineError
from deepinfer_core.scheduling.blocks import BlockPool


def make_pool(num_blocks: int) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.append), evicted


def test_allocation_is_all_or_nothing() -> None:
    pool, _ = make_pool(4)
    pool.allocate(3)
    with pytest.raises(CapacityError, match=r"2 cache blocks are wanted and 1 of 4"):
        pool.allocate(2)
    assert pool.num_available == 1


def test_clean_blocks_go_before_cached_ones_and_cached_ones_by_age() -> None:
    pool, evicted = make_pool(4)
    old, young = pool.allocate(1), pool.allocate(1)
    for block in old + young:
        pool.mark_hashed(block)
    pool.release(old)
    pool.release(young)
    assert set(pool.allocate(2)).isdisjoint(old + young)
    assert evicted == []
    assert pool.allocate(1) == old
    assert evicted == old
    assert pool.allocate(1) == young


def test_an_evicted_block_is_clean_when_it_comes_back() -> None:
    pool, _ = make_pool(1)
    block = pool.allocate(1)
    pool.mark_hashed(block[0])
    pool.release(block)
    pool.release(pool.allocate(1))
    assert (pool.num_available, pool.num_cached) == (1, 0)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool, evicted = make_pool(3)
    chain = pool.allocate(3)
    for block in chain:
        pool.mark_hashed(block)
    pool.release(chain)
    pool.allocate(2)
    assert evicted == [chain[2], chain[1]]


def test_a_cached_block_that_is_shared_again_is_not_evicted() -> None:
    pool, _ = make_pool(2)
    block = pool.allocate(1)
    pool.mark_hashed(block[0])
    pool.release(block)
    pool.share(block)
    assert pool.num_available == 1
    assert pool.allocate(1) != block
    pool.release(block)
    assert pool.num_cached == 1


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool, _ = make_pool(1)
    block = pool.allocate(1)
    pool.share(block)
    assert pool.is_shared(block[0])
    pool.release(block)
    assert pool.num_available == 0
    pool.release(block)
    assert pool.num_available == 1
    pool.check_idle()


def test_pins_hold_blocks_until_their_epoch_is_dropped() -> None:
    pool, _ = make_pool(2)
    blocks = pool.allocate(2)
    pool.pin("export", 1, blocks)
    pool.release(blocks)
    assert pool.num_available == 0
    assert not pool.unpin("export", 0)
    assert not pool.unpin("other", 1)
    assert pool.unpin("export", 1)
    assert not pool.unpin("export", 1)
    assert pool.num_available == 2


def test_an_epoch_cannot_be_pinned_twice() -> None:
    pool, _ = make_pool(2)
    blocks = pool.allocate(1)
    pool.pin("export", 1, blocks)
    with pytest.raises(EngineError, match="already has pins of epoch 1"):
        pool.pin("export", 1, blocks)


def test_a_leak_is_found_when_idle() -> None:
    pool, _ = make_pool(3)
    pool.allocate(1)
    with pytest.raises(EngineError, match="1 of 3 cache blocks"):
        pool.check_idle()


def test_a_forgotten_pin_is_found_when_idle() -> None:
    pool, _ = make_pool(3)
    blocks = pool.allocate(1)
    pool.pin("transfer", 7, blocks)
    pool.release(blocks)
    with pytest.raises(EngineError, match=r"transfer \(epoch 7\)"):
        pool.check_idle()


def test_releasing_what_nobody_holds_is_an_error() -> None:
    pool, _ = make_pool(1)
    block = pool.allocate(1)
    pool.release(block)
    with pytest.raises(EngineError, match="nobody holds it"):
        pool.release(block)


def test_a_forgotten_hash_makes_a_cached_block_clean() -> None:
    pool, evicted = make_pool(1)
    block = pool.allocate(1)
    pool.mark_hashed(block[0])
    pool.release(block)
    pool.forget_hashed(block[0])
    assert (pool.num_cached, pool.num_available) == (0, 1)
    pool.allocate(1)
    assert evicted == []
