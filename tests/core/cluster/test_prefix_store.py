"""What of a prompt is still there: whole blocks, least recently used first to go, retention."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.cluster.prefix_store import PrefixStore

FOREVER = 1e9


def test_hits_are_whole_blocks_and_leave_the_last_token() -> None:
    store = PrefixStore(100)
    store.put("a", 5 * 128 + 100, 0.0, FOREVER)
    assert store.hit_tokens("a", 10_000, 0.0) == 5 * 128
    assert store.hit_tokens("a", 3 * 128, 0.0) == 2 * 128
    assert store.hit_tokens("a", 3 * 128 + 1, 0.0) == 3 * 128
    assert store.hit_tokens("b", 10_000, 0.0) == 0


def test_a_hit_of_one_block_is_not_taken() -> None:
    store = PrefixStore(100)
    store.put("a", 255, 0.0, FOREVER)
    assert store.hit_tokens("a", 1_000, 0.0) == 0


def test_what_was_not_used_for_its_retention_is_gone() -> None:
    store = PrefixStore(100)
    store.put("a", 1_280, 0.0, 10.0)
    assert store.hit_tokens("a", 2_000, 9.9) == 1_280
    assert store.hit_tokens("a", 2_000, 10.0) == 0
    assert (store.used_blocks, store.expired_blocks) == (0, 10)


def test_shared_blocks_take_no_room_twice() -> None:
    store = PrefixStore(20)
    store.put("shared", 10 * 128, 0.0, FOREVER)
    store.put("a", 15 * 128, 0.0, FOREVER, shared_tokens=10 * 128)
    store.put("b", 15 * 128, 0.0, FOREVER, shared_tokens=10 * 128)
    assert (store.used_blocks, store.evicted_blocks) == (20, 0)
    assert store.hit_tokens("b", 10_000, 0.0) == 15 * 128


def test_a_store_without_room_keeps_nothing() -> None:
    store = PrefixStore(0)
    store.put("a", 1_000, 0.0, FOREVER)
    assert store.hit_tokens("a", 2_000, 0.0) == 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 6), st.booleans()), max_size=60))
def test_the_least_recently_used_goes_first(uses: list[tuple[str, int, bool]]) -> None:
    """Against a list that is kept in order of use and searched."""
    store, kept = PrefixStore(10), list[tuple[str, int]]()
    for key, blocks, is_put in uses:
        found = dict(kept).get(key, 0)
        if is_put and blocks:
            kept = [(k, n) for k, n in kept if k != key] + [(key, blocks)]
            while sum(n for _, n in kept) > 10:
                kept.pop(0)
            store.put(key, blocks * 128, 0.0, FOREVER)
        elif not is_put:
            kept = [(k, n) for k, n in kept if k != key] + [(k, n) for k, n in kept if k == key]
            assert store.hit_tokens(key, 10_000, 0.0) == (found * 128 if found > 1 else 0)
        assert store.used_blocks == sum(n for _, n in kept)
