"""Engram rows spread over ranks: fetched once a step for all layers, the same bits as a table in one place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_core.checkpoint.engram_store import EngramTable
from deepinfer_core.checkpoint.sharding import share
from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.owned import LocalEngram, SharedEngram
from tests.core.parallel.in_process import on_ranks

WIDTH = 64
NUM_ROWS = {1: 40, 14: 23}


def table(layer: int, rows: range) -> EngramTable:
    random = torch.Generator().manual_seed(layer)
    codes = torch.randint(0, 120, (NUM_ROWS[layer], WIDTH), generator=random, dtype=torch.uint8)
    scales = torch.randint(110, 140, (NUM_ROWS[layer], WIDTH // 32), generator=random, dtype=torch.uint8)
    held = slice(rows.start, rows.stop)
    cpu = torch.device("cpu")
    return EngramTable(codes[held], scales[held], NUM_ROWS[layer], rows.start, torch.float32, cpu)


def shared(comm: Communicator) -> SharedEngram:
    return SharedEngram(
        comm, {layer: table(layer, share(rows, comm.rank, comm.size)) for layer, rows in NUM_ROWS.items()}
    )


ids = st.lists(st.integers(0, 22), max_size=30)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.none() | st.tuples(ids, ids), min_size=1, max_size=4))
def test_rows_come_from_their_owners_with_the_same_bits(wanted: list[tuple[list[int], list[int]] | None]) -> None:
    """None: a rank that has no rows in this step, or failed before it asked for any."""
    whole = LocalEngram({layer: table(layer, range(rows)) for layer, rows in NUM_ROWS.items()})

    def work(comm: Communicator) -> tuple[dict[int, Tensor], list[str]]:
        engram = shared(comm)
        mine = wanted[comm.rank]
        values: dict[int, Tensor] = {}
        for _ in range(2):  # steps
            engram.begin()
            if mine is not None:
                engram.fetch(
                    {layer: torch.tensor(one, dtype=torch.int64) for layer, one in zip(NUM_ROWS, mine, strict=True)}
                )
                values = {layer: engram.take(layer) for layer in NUM_ROWS}
            engram.finish()
        return values, comm.meeting.labels[comm.rank]

    results = on_ranks(len(wanted), work)
    assert all(labels == ["Engram counts", "Engram row ids", "Engram rows"] * 2 for _, labels in results)
    for mine, (values, _) in zip(wanted, results, strict=True):
        if mine is not None:
            whole.fetch(
                {layer: torch.tensor(one, dtype=torch.int64) for layer, one in zip(NUM_ROWS, mine, strict=True)}
            )
            assert all(torch.equal(values[layer], whole.take(layer)) for layer in NUM_ROWS)


@pytest.mark.bad_input
def test_a_share_that_is_not_the_members_own_is_named() -> None:
    def work(comm: Communicator) -> None:
        SharedEngram(comm, {1: table(1, share(NUM_ROWS[1], 0, comm.size))})

    with pytest.raises(ParallelError, match=r"Engram layer 1 holds range\(0, 20\); member 1 owns range\(20, 40\)"):
        on_ranks(2, work)


@pytest.mark.bad_input
def test_a_row_of_another_owner_is_refused() -> None:
    with pytest.raises(IndexError, match=r"rows 3 to 25 are asked for; held are range\(0, 20\)"):
        table(1, range(20)).read(torch.tensor([3, 25]))
