"""A group of ranks as threads of one process: collectives that really exchange bytes, without processes to start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.communicator import Communicator

_PATIENCE_S = 60.0  # a rank that does not come fails the test instead of hanging it


@dataclass
class Meeting:
    """Where `size` threads put what they bring, and read what the others brought. Records every collective's label."""

    size: int
    labels: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.size)
        self._brought: list[tuple[str, Any]] = [("", None)] * self.size
        self.labels = [[] for _ in range(self.size)]

    def exchange(self, rank: int, label: str, value: object) -> list[Any]:
        self.labels[rank].append(label)
        self._brought[rank] = (label, value)
        try:
            self._barrier.wait(_PATIENCE_S)
            brought = list(self._brought)
            self._barrier.wait(_PATIENCE_S)
        except threading.BrokenBarrierError as error:
            raise ParallelError(f"{label}: a rank has left") from error
        if {name for name, _ in brought} != {label}:
            raise RuntimeError(f"ranks meet in different collectives: {[name for name, _ in brought]}")
        return [one for _, one in brought]

    def leave(self) -> None:
        """A rank has failed: whoever waits is told at once."""
        self._barrier.abort()


class ThreadCommunicator(Communicator):
    def __init__(self, meeting: Meeting, rank: int, ranks: Sequence[int] | None = None) -> None:
        super().__init__("threads", ranks or range(meeting.size), rank, torch.device("cpu"))
        self.meeting = meeting

    def _gather(self, data: Tensor, label: str) -> Tensor:
        return torch.stack([one.clone() for one in self.meeting.exchange(self.rank, label, data.clone())])

    def _exchange(self, data: Tensor, send: list[int], recv: list[int], label: str) -> Tensor:
        brought = self.meeting.exchange(self.rank, label, data.clone().split(send))
        parts = [parts[self.rank] for parts in brought]
        if [len(part) for part in parts] != recv:
            raise RuntimeError(f"{label}: {[len(part) for part in parts]} bytes came, {recv} were expected")
        return torch.cat(parts)

    def _reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, label: str) -> Tensor:
        every = torch.stack(self.meeting.exchange(self.rank, label, tensor.clone()))
        return every.max(0).values if op == dist.ReduceOp.MAX else every.sum(0)

    def _broadcast(self, data: Tensor, root: int, label: str) -> Tensor:
        return self.meeting.exchange(self.rank, label, data.clone())[root].clone()


def on_ranks[T](size: int, work: Callable[[Communicator], T]) -> list[T]:
    """`work` on `size` ranks at once; the result of each. The first error of a rank is raised."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadCommunicator(meeting, rank))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if "a rank has left" not in str(error):
                raise error
        return [future.result() for future in futures]
