"""Which rank computes which rows: equal in rows and in work, pieces on pair borders, only what is needed exchanged."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfer_core.parallel.context_split import EVERYONE, AttentionWork, RowSplit, fewest_rows, split_rows
from tests.core.model_configs import release_config, small_config

PAGE = (Path(__file__).parents[3] / "docs" / "context_parallel.md").read_text(encoding="utf-8")
CONFIG = release_config()
ENCODER, WHOLE = range(CONFIG.decoder_start), range(CONFIG.num_hidden_layers)


def owners(start: int, length: int, size: int, layers: range = ENCODER) -> NDArray[np.int64]:
    """Of one segment."""
    position = np.arange(start, start + length)
    segment, may_split = np.zeros(length, np.int64), np.ones(length, np.bool_)
    return split_rows(position, segment, may_split, AttentionWork(CONFIG, layers), size=size)


def most_over_mean(owner: NDArray[np.int64], weight: NDArray[np.int64], size: int) -> float:
    total = np.bincount(owner, weights=weight, minlength=size)
    return float(total.max() / total.mean())


def in_turn(length: int, size: int) -> NDArray[np.int64]:
    """The usual zig-zag: 2 P pieces of one length, rank r takes pieces r and 2 P - 1 - r."""
    piece = np.arange(length) * 2 * size // length
    return np.minimum(piece, 2 * size - 1 - piece)


# ---- work -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 126, 127, 1022, 1023, 5_000, 40_000])
def test_the_work_of_a_row_counts_the_keys_that_it_sees(position: int) -> None:
    seen = position + 1
    attention = indexer = 0
    for layer in range(40):
        keys = min(128, seen)
        if layer >= 2:
            visible = seen // (2 if layer < 20 else 1)
            keys += min(512, visible)
            if layer in (2, 8, 14, 20):
                indexer += 32 * 128 * visible
            elif layer in (24, 28, 32, 36):
                indexer += 32 * 128 * min(visible, 2048 * 8)
        attention += 2 * 64 * 512 * keys
    assert AttentionWork(CONFIG, WHOLE).at(np.array([position])).tolist() == [attention + indexer]


@pytest.mark.parametrize("layers", [ENCODER, WHOLE, range(CONFIG.decoder_start, CONFIG.num_hidden_layers)])
def test_work_never_falls_with_the_position(layers: range) -> None:
    assert (np.diff(AttentionWork(CONFIG, layers).at(np.arange(40_000))) >= 0).all()


# ---- balance --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    start=st.one_of(st.just(0), st.integers(0, 900_000)),
    length=st.integers(4_096, 20_000),
    size=st.integers(2, 8),
    layers=st.sampled_from([ENCODER, WHOLE]),
)
def test_long_prompts_are_balanced_in_rows_and_in_work(start: int, length: int, size: int, layers: range) -> None:
    owner = owners(start, length, size, layers)
    work = AttentionWork(CONFIG, layers).at(np.arange(start, start + length))
    assert most_over_mean(owner, work, size) <= 1.01
    assert most_over_mean(owner, np.ones_like(work), size) <= 1.01


def test_the_balance_on_the_page_is_that_of_the_split() -> None:
    """Beside pieces of equal length: the first rows see few keys, so that these leave rank 0 too little to do."""
    rows = re.findall(r"^\| ([\d,]+) rows, P = (\d) \| (\S+) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for length, size, *printed in rows:
        n, ranks = int(length.replace(",", "")), int(size)
        work = AttentionWork(CONFIG, ENCODER).at(np.arange(n))
        owner = owners(0, n, ranks)
        found = [(owner, np.ones_like(work)), (owner, work), (in_turn(n, ranks), work)]
        assert printed == [f"{most_over_mean(*case, ranks):.4f}" for case in found]


def test_work_that_grows_linearly_gives_the_usual_zig_zag() -> None:
    start, length = 400_000, 8_192  # windows and selections are full; the indexer alone grows
    assert (np.abs(np.flatnonzero(np.diff(owners(start, length, 4))) - [1023, 2047, 3071, 5119, 6143, 7167]) <= 2).all()


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=30), size=st.integers(2, 6), data=st.data())
def test_many_segments_do_not_add_their_odd_rows_on_one_rank(
    lengths: list[int], size: int, data: st.DataObject
) -> None:
    starts = [data.draw(st.integers(0, 5_000)) for _ in lengths]
    position = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)])
    segment = np.repeat(np.arange(len(lengths)), lengths)
    may_split = (np.array(lengths) >= fewest_rows(CONFIG, size))[segment]
    owner = split_rows(position, segment, may_split, AttentionWork(CONFIG, ENCODER), size=size)
    assert (owner[~may_split] == EVERYONE).all()
    assert ((owner[may_split] >= 0) & (owner[may_split] < size)).all()
    rows = np.bincount(owner[may_split], minlength=size)
    num_split = len(np.unique(segment[may_split]))
    assert rows.max() - rows.min() <= 4 * -(-num_split // size) + 4


# ---- pieces ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(start=st.integers(0, 2_000), extra=st.integers(0, 600), size=st.integers(2, 8))
def test_every_rank_has_rows_in_at_most_two_pieces_between_pairs(start: int, extra: int, size: int) -> None:
    length = fewest_rows(CONFIG, size) + extra
    owner = owners(start, length, size)
    borders = 1 + np.flatnonzero(np.diff(owner))
    assert ((start + borders) % 2 == 0).all()
    pieces = np.bincount(owner[np.concatenate(([0], borders))], minlength=size)
    assert pieces.min() >= 1
    assert pieces.max() <= 2


def test_segments_that_are_too_short_stay_with_everyone() -> None:
    small = small_config()
    assert fewest_rows(CONFIG, 4) == 512
    assert fewest_rows(small, 3) == 3 * max(small.sliding_window, 4)


# ---- what is exchanged ----------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(1, 12), st.integers(-1, 3)), min_size=1, max_size=12),
    window=st.integers(1, 16),
    data=st.data(),
)
def test_halos_are_the_rows_that_another_rank_sees(
    pieces: list[tuple[int, int]], window: int, data: st.DataObject
) -> None:
    owner = np.repeat([rank for _, rank in pieces], [count for count, _ in pieces])
    cuts = data.draw(st.lists(st.integers(0, len(owner) - 1), max_size=3))
    segment = np.searchsorted(np.unique(cuts), np.arange(len(owner)), side="right")
    for s in np.unique(segment):  # a segment belongs to everyone as a whole, or not at all
        mine = segment == s
        if (owner[mine] == EVERYONE).any():
            owner[mine] = EVERYONE
    split = RowSplit(owner, segment, rank=0, size=4)
    seen = np.zeros(len(owner), np.bool_)
    for i in range(len(owner)):
        for j in range(max(0, i - window + 1), i):
            seen[j] |= segment[j] == segment[i] and owner[j] != owner[i]
    assert np.array_equal(split.halos(window), seen)


def test_halos_of_a_long_prompt_are_a_window_less_one_at_each_border() -> None:
    for size in (2, 4, 8):
        split = RowSplit(owners(300_000, 8_192, size), np.zeros(8_192, np.int64), 0, size)
        assert split.halos(128).sum() == (2 * size - 2) * 127


def test_what_is_handed_over_is_in_the_order_of_the_ranks() -> None:
    owner = np.array([2, 2, 0, 0, EVERYONE, 1, 1, 0])
    needed = np.array([True, False, True, True, True, False, True, True])
    for rank, sent in enumerate(([2, 3, 7], [6], [0])):
        handover = RowSplit(owner, np.zeros(8, np.int64), rank, 3).handed_over(needed)
        assert handover.rows.tolist() == [2, 3, 7, 6, 0]
        assert handover.counts == (3, 1, 1)
        assert handover.sent.tolist() == sent
