"""Collectives between the ranks of one group, each with a label, a deadline and an error that names the late rank.

    all_gather_rows   rank 0  a a      ─►  a a b c c c  on every rank      counts [2, 1, 3] are known to all
                      rank 1  b
                      rank 2  c c c

    all_to_all_rows   rank 0  a0 a1 a1 ─►  a0 b0        on rank 0          send_counts [1, 2], recv_counts [1, 1]
                      rank 1  b0 b1    ─►  a1 a1 b1     on rank 1          send_counts [1, 1], recv_counts [2, 1]

Rows travel as bytes, so that any dtype passes and nothing is rounded; only integers are summed, so that no result
depends on the order in which a transport adds. Every rank of a group makes the same calls in the same order, also with
nothing to send: a collective never depends on what only one rank knows.

`SoleCommunicator` is the identity of one process. `GroupCommunicator` runs on torch.distributed: gloo on a CPU, NCCL or
HCCL on devices; `parallel.world` makes them, `parallel.watch` finds out who is late.
"""

from __future__ import annotations

import datetime
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.watch import Entry, Watch

__all__ = ["Communicator", "GroupCommunicator", "SoleCommunicator"]

_REDUCED_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
_SUMMED_DTYPES = (torch.int32, torch.int64)
_MAX_BROADCAST_BYTES = 1 << 31

type _Issue = Callable[[], dist.Work | None]


class Communicator(ABC):
    """`ranks[i]` is the world's rank of member i; `rank` is this process's place among them, `size` their number."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int, device: torch.device) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.device = device

    # ---- what a transport gives ------------------------------------------------------------------------------------

    @abstractmethod
    def _gather(self, data: Tensor, label: str) -> Tensor:
        """data [n] uint8, the same n everywhere -> [size, n]."""

    @abstractmethod
    def _exchange(self, data: Tensor, send: list[int], recv: list[int], label: str) -> Tensor:
        """data [sum(send)] uint8, `send[i]` bytes for member i -> [sum(recv)] in the order of the members."""

    @abstractmethod
    def _reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, label: str) -> Tensor:
        """Element by element over the members; a new tensor."""

    @abstractmethod
    def _broadcast(self, data: Tensor, root: int, label: str) -> Tensor:
        """data uint8 of member `root`; the others give a tensor of its size."""

    # ---- collectives -----------------------------------------------------------------------------------------------

    def all_gather(self, tensor: Tensor, label: str) -> Tensor:
        """tensor [...], the same shape and dtype everywhere -> [size, ...]."""
        gathered = self._gather(_as_bytes(tensor), label)
        return gathered.view(-1).view(tensor.dtype).view(self.size, *tensor.shape)

    def all_gather_rows(self, rows: Tensor, counts: Sequence[int], label: str) -> Tensor:
        """rows [counts[rank], ...] -> [sum(counts), ...], members in order. All members know all counts.

        Members with fewer rows than the largest count send padding.
        """
        self._check_counts("counts", counts, label)
        self._check_rows("counts", counts[self.rank], rows, label)
        most = max(counts)
        padded = rows
        if len(rows) < most:
            padded = rows.new_zeros((most, *rows.shape[1:]))
            padded[: len(rows)] = rows
        gathered = self.all_gather(padded, label)
        if min(counts) == most:
            return gathered.flatten(0, 1)
        return torch.cat([gathered[member, :count] for member, count in enumerate(counts)])

    def all_to_all_rows(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], label: str
    ) -> Tensor:
        """rows [sum(send_counts), ...], those for member 0 first -> [sum(recv_counts), ...], those of 0 first."""
        self._check_counts("send_counts", send_counts, label)
        self._check_counts("recv_counts", recv_counts, label)
        self._check_rows("send_counts", sum(send_counts), rows, label)
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        received = self._exchange(
            _as_bytes(rows),
            [count * row_bytes for count in send_counts],
            [count * row_bytes for count in recv_counts],
            label,
        )
        return received.view(rows.dtype).view(sum(recv_counts), *rows.shape[1:])

    def all_reduce_max(self, tensor: Tensor, label: str) -> Tensor:
        """The largest value of any member, element by element; int32, int64, float32 or float64."""
        if tensor.dtype not in _REDUCED_DTYPES:
            raise self._misuse(label, f"dtype {tensor.dtype} has no maximum here; use one of {_REDUCED_DTYPES}")
        return self._reduce(tensor, dist.ReduceOp.MAX, label)

    def all_reduce_sum(self, tensor: Tensor, label: str) -> Tensor:
        """The sum over the members, element by element; int32 or int64."""
        if tensor.dtype not in _SUMMED_DTYPES:
            raise self._misuse(label, f"dtype {tensor.dtype} is summed in no fixed order; use one of {_SUMMED_DTYPES}")
        return self._reduce(tensor, dist.ReduceOp.SUM, label)

    def broadcast_bytes(self, data: bytes | None, root: int, label: str) -> bytes:
        """The bytes that member `root` gives; `data` of the others is not looked at."""
        if not 0 <= root < self.size:
            raise self._misuse(label, f"root is {root}; it must be a member, 0 to {self.size - 1}")
        payload = data if self.rank == root else b""
        if payload is None or len(payload) > _MAX_BROADCAST_BYTES:
            found = "nothing" if payload is None else f"{len(payload)} bytes"
            raise self._misuse(label, f"member {root} gives {found}; it must be at most {_MAX_BROADCAST_BYTES} bytes")
        size = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        length = int(self._broadcast(_as_bytes(size), root, label).view(torch.int64))
        if length == 0:
            return b""
        sent = self._from_bytes(payload) if self.rank == root else self._empty(length)
        return _to_bytes(self._broadcast(sent, root, label))

    def all_gather_bytes(self, data: bytes, label: str) -> list[bytes]:
        """What each member gives, in their order; two collectives: the lengths, then the bytes."""
        length = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        counts = [int(count) for count in self.all_gather(length, label)[:, 0].tolist()]
        joined = _to_bytes(self.all_gather_rows(self._from_bytes(data), counts, label))
        ends = [sum(counts[: member + 1]) for member in range(self.size)]
        return [joined[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def barrier(self, label: str) -> None:
        """Returns when all members have entered."""
        self._gather(torch.zeros(1, dtype=torch.uint8, device=self.device), label).cpu()

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _misuse(self, label: str, problem: str) -> ParallelError:
        return ParallelError(f"{label} of group {self.name}: {problem}")

    def _check_counts(self, name: str, counts: Sequence[int], label: str) -> None:
        if len(counts) != self.size or min(counts) < 0:
            raise self._misuse(label, f"{name} is {list(counts)}; it must be {self.size} numbers of rows")

    def _check_rows(self, name: str, count: int, rows: Tensor, label: str) -> None:
        if rows.ndim == 0 or len(rows) != count:
            raise self._misuse(label, f"{name} says {count} rows; the tensor has shape {list(rows.shape)}")

    def _from_bytes(self, data: bytes) -> Tensor:
        if not data:
            return self._empty(0)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


class SoleCommunicator(Communicator):
    """The identity: one process is the whole group."""

    def __init__(self, name: str = "alone", rank: int = 0, device: torch.device | None = None) -> None:
        super().__init__(name, (rank,), 0, device or torch.device("cpu"))

    def _gather(self, data: Tensor, label: str) -> Tensor:
        return data[None]

    def _exchange(self, data: Tensor, send: list[int], recv: list[int], label: str) -> Tensor:
        if send != recv:
            raise self._misuse(label, f"{send} bytes are sent and {recv} are expected")
        return data

    def _reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, label: str) -> Tensor:
        return tensor.clone()

    def _broadcast(self, data: Tensor, root: int, label: str) -> Tensor:
        return data


class GroupCommunicator(Communicator):
    """A group of torch.distributed whose collectives are watched.

    On a CPU a call returns when its result is there, and raises ParallelError where it does not come: the error names
    the collective, the step and who is late, stopped, dead or failed. On a device a call returns when it is queued; the
    watch follows it, and the next call raises.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device, watch: Watch
    ) -> None:
        super().__init__(name, ranks, dist.get_rank(group), device)
        self.group = group
        self._watch = watch

    def _gather(self, data: Tensor, label: str) -> Tensor:
        gathered = self._empty(self.size * data.numel()).view(self.size, data.numel())
        self._run(label, lambda: dist.all_gather(list(gathered.unbind()), data, self.group, async_op=True))
        return gathered

    def _exchange(self, data: Tensor, send: list[int], recv: list[int], label: str) -> Tensor:
        received = self._empty(sum(recv))
        self._run(label, lambda: dist.all_to_all_single(received, data, recv, send, self.group, async_op=True))
        return received

    def _reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, label: str) -> Tensor:
        reduced = tensor.clone(memory_format=torch.contiguous_format)
        self._run(label, lambda: dist.all_reduce(reduced, op, self.group, async_op=True))
        return reduced

    def _broadcast(self, data: Tensor, root: int, label: str) -> Tensor:
        self._run(label, lambda: dist.broadcast(data, self.ranks[root], self.group, async_op=True))
        return data

    def abort(self) -> None:
        """End collectives that are queued on a device; the group cannot be used afterwards."""
        self.group.abort()

    def _run(self, label: str, issue: _Issue) -> None:
        """Enter, issue, wait. A device's work is only queued behind what its stream holds, and followed."""
        entry = self._watch.enter(self.name, label)
        try:
            work = issue()
        except RuntimeError as error:  # the transport is broken: a peer is gone
            raise self._watch.broken(entry, error) from error
        if work is None:
            raise self._misuse(label, "this process is no member")
        if self.device.type != "cpu":
            work.wait()
            self._watch.follow(entry, work)
            return
        self._wait(entry, work)
        self._watch.leave(entry)

    def _wait(self, entry: Entry, work: dist.Work) -> None:
        """In slices, so that a rank that is known to have failed ends the wait long before the deadline."""
        while True:
            try:
                work.wait(datetime.timedelta(seconds=self._watch.slice_s))
                return
            except RuntimeError as error:
                if work.is_completed():  # else only the slice is over
                    raise self._watch.broken(entry, error) from error
            self._watch.check(entry)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _to_bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
