"""Collectives of real processes give what the pictures say, along every axis; the identity gives the same of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.communicator import SoleCommunicator
from tests.core.parallel.rank_processes import RankProcesses


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankProcesses]:
    with RankProcesses(4, 6.0, data_parallel_size=2, context_parallel_size=2, expert_parallel_size=4) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("axis", "groups"), [("expert", [[0, 1, 2, 3]]), ("context", [[0, 1], [2, 3]]), ("data", [[0, 2], [1, 3]])]
)
def test_collectives_along_an_axis(four_ranks: RankProcesses, axis: str, groups: list[list[int]]) -> None:
    four_ranks.ask("collectives", axis=axis)
    answers = four_ranks.answers()
    for group in groups:
        size = len(group)
        for member, rank in enumerate(group):
            status, result = answers[rank]
            assert status == "ok", result
            assert result["ranks"] == group
            assert result["all_gather"] == group
            assert result["rows"] == [[other] * 2 for place, other in enumerate(group) for _ in range(place % 3)]
            received: list[float] = []
            for place, other in enumerate(group):
                counts = [(place + to) % 3 for to in range(size)]
                start = sum(counts[:member])
                received += [100.0 * other + i for i in range(start, start + counts[member])]
            assert result["exchanged"] == received
            assert result["max"] == [max(group), -min(group)]
            assert result["sum"] == [sum(group)]
            assert result["bytes"] == f"from {group[-1]}"
            assert result["empty"] == 0
            assert result["texts"] == ["x" * (other % 2) for other in group]
            assert result["nothing"] == [0, 1]


def test_calls_in_different_orders_are_recognized(four_ranks: RankProcesses) -> None:
    """Last of this file's processes: a failed world stays failed."""
    four_ranks.ask("mismatch")
    answers = four_ranks.answers()
    assert {status for status, *_ in answers} == {"error"}
    texts = [text for _, _, text, _ in answers[1:]]
    assert any("rank 0" in text and "different orders" in text for text in texts), texts
    four_ranks.ask("step", step=1, seconds={})
    assert all("cannot run after a failure" in answer[2] for answer in four_ranks.answers())


def test_one_process_is_the_identity() -> None:
    alone = SoleCommunicator()
    rows = torch.arange(6).view(3, 2).to(torch.bfloat16)
    assert torch.equal(alone.all_gather(rows, "x")[0], rows)
    assert torch.equal(alone.all_gather_rows(rows, [3], "x"), rows)
    assert torch.equal(alone.all_to_all_rows(rows, [3], [3], "x"), rows)
    assert torch.equal(alone.all_reduce_max(torch.tensor([3]), "x"), torch.tensor([3]))
    assert alone.broadcast_bytes(b"abc", 0, "x") == b"abc"
    assert alone.all_gather_bytes(b"abc", "x") == [b"abc"]
    alone.barrier("x")


@pytest.mark.bad_input
def test_counts_that_contradict_the_rows_are_refused() -> None:
    alone, rows = SoleCommunicator(), torch.zeros(3, 2)
    with pytest.raises(ParallelError, match=r"counts says 2 rows; the tensor has shape \[3, 2\]"):
        alone.all_gather_rows(rows, [2], "x")
    with pytest.raises(ParallelError, match=r"counts is \[3, 1\]; it must be 1 numbers"):
        alone.all_gather_rows(rows, [3, 1], "x")
    with pytest.raises(ParallelError, match="send_counts says 4 rows"):
        alone.all_to_all_rows(rows, [4], [4], "x")
    with pytest.raises(ParallelError, match="recv_counts is"):
        alone.all_to_all_rows(rows, [3], [-1], "x")


@pytest.mark.bad_input
def test_sums_without_a_fixed_order_are_refused() -> None:
    with pytest.raises(ParallelError, match=r"torch\.float32 is summed in no fixed order"):
        SoleCommunicator().all_reduce_sum(torch.zeros(1), "x")
    with pytest.raises(ParallelError, match=r"torch\.bfloat16 has no maximum"):
        SoleCommunicator().all_reduce_max(torch.zeros(1, dtype=torch.bfloat16), "x")


@pytest.mark.bad_input
def test_a_broadcast_from_nobody_is_refused() -> None:
    with pytest.raises(ParallelError, match="root is 1"):
        SoleCommunicator().broadcast_bytes(b"", 1, "x")
    with pytest.raises(ParallelError, match="member 0 gives nothing"):
        SoleCommunicator().broadcast_bytes(None, 0, "x")
