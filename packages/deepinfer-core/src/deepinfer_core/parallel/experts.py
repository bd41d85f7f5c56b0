"""Expert exchange: rows go to where their experts live, outputs come back in ascending expert id.

    own rows      r0: experts 1 6      r1: 2 3                   members   A has experts 0 .. 3, B has 4 .. 7
    counts        A ─► B: 1 row        A ─► A: 2 rows            all_to_all of numbers of rows
    dispatch      A ─► B: r0 | - 2 | w      A ─► A: r0 | 1 - | w, r1 | 2 3 | w          a row once a member
    experts       each member runs the pairs (row, expert) that it got, and nothing is added there
    combine       B ─► A: y(r0, 6)     ─►  pairs [R, k, D], k in ascending expert id, summed at the row's own process

A pair's output has the same bits wherever it is computed, and the sum has one order, so tokens are the same for any
number of members, any placement and any replica. Sizes depend on the router alone; who takes part in which layers of a
step is agreed before it (`parallel.lockstep`), so that a member without rows, or one that failed, joins with none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.placement_tables import PlacementTable
from deepinfer_core.scheduling.expert_load import replica_start

__all__ = ["DispatchedRows", "ExchangeObserver", "ExpertExchange", "LocalExperts", "RowOrigin", "SharedExperts"]


@dataclass(frozen=True, eq=False)
class RowOrigin:
    """Whose rows are dispatched: the slot [P] and the position [P] of each; P may count padding at the end."""

    slot: Tensor
    position: Tensor


@dataclass(frozen=True, eq=False)
class DispatchedRows:
    """Rows that this process runs its experts on."""

    rows: Tensor  # [R', D]
    local_ids: Tensor  # [R', k']
    weights: Tensor  # [R', k'] float32


class ExpertExchange(Protocol):
    """Moves rows to experts and outputs back."""

    def dispatch(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, origin: RowOrigin) -> DispatchedRows:
        """x [R, D], logical expert ids [R, k] ascending, weights [R, k]; R may be 0. Padding rows never enter."""
        ...

    def combine(self, sent: DispatchedRows, pairs: Tensor) -> Tensor:
        """pairs [R', k', D], outputs of the local experts -> [R, k, D] of this process's own rows."""
        ...


class LocalExperts:
    """One process owns every expert, expert e in slot e; nothing moves."""

    def dispatch(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, origin: RowOrigin) -> DispatchedRows:
        """Hands the rows through."""
        return DispatchedRows(x, ids, weights)

    def combine(self, sent: DispatchedRows, pairs: Tensor) -> Tensor:
        """The pairs are already where they belong."""
        return pairs


@dataclass(frozen=True, eq=False)
class _Exchanged(DispatchedRows):
    """The pairs (row, expert) that came, one a row; and what is needed to send their outputs home."""

    layer: int
    pairs_from: list[int]  # member -> pairs that came from it
    pairs_to: list[int]  # member -> own pairs that went there
    home: Tensor  # [sum(pairs_to)] flat index row * k + choice of each own pair, in the order sent
    num_rows: int
    num_chosen: int


class ExchangeObserver(Protocol):
    """Is told what an exchange does, layer by layer."""

    def routed(self, layer: int, ids: Tensor) -> None:
        """Own real rows go to experts [R, k]."""
        ...

    def experts_begin(self, layer: int) -> None:
        """What came is there: the experts here can start."""
        ...

    def experts_end(self, layer: int) -> None:
        """Their outputs are there."""
        ...


class SharedExperts:
    """Experts spread over the members of `comm` as `tables` (layer -> table) say; the exchange by all_to_all.

    A step: `begin(layers)`, then dispatch and combine once for each of `layers` in that order, by every member. What a
    member skips it makes up for with `unfinished`. `num_slots`: of the scheduler, for the choice of replicas.
    """

    def __init__(self, comm: Communicator, tables: Mapping[int, PlacementTable], num_slots: int) -> None:
        self.comm = comm
        self.tables = dict(tables)
        self._start = torch.zeros(num_slots, dtype=torch.int64, device=comm.device)  # of each slot's request
        self._peers = torch.arange(comm.size, device=comm.device)
        self._due: deque[int] = deque()
        self._open: _Exchanged | None = None
        self.observer: ExchangeObserver | None = None

    # ---- a step ----------------------------------------------------------------------------------------------------

    def admit(self, slot: int, seed: int) -> None:
        """The request with `seed` takes `slot`: its replicas follow from seed and position, wherever it runs."""
        self._start[slot] = replica_start(seed)

    def begin(self, layers: Iterable[int]) -> None:
        """The layers whose exchange every member takes part in, in this order."""
        if self._due or self._open is not None:
            raise ParallelError(f"a step begins and layers {list(self._due)} of the last one are not exchanged")
        self._due = deque(layers)

    def unfinished(self) -> list[int]:
        """Layers that this member still has to take part in, after sending home zeros for what it left half done.

        The rows of others that it had then get wrong outputs: the step must not count, see `Lockstep.conclude`.
        """
        if self._open is not None:
            sent = self._open
            self.combine(sent, sent.rows.new_zeros(len(sent.rows), 1, sent.rows.shape[1]))
        return list(self._due)

    # ---- a layer ---------------------------------------------------------------------------------------------------

    def take_turn(self, layer: int) -> None:
        """From here on the exchange of `layer` is under way. Raises ParallelError where another one is due."""
        if not self._due or self._due[0] != layer:
            raise ParallelError(f"layer {layer} is exchanged, due are {list(self._due)}; this is a bug in the engine")
        self._due.popleft()

    def locate(self, layer: int, ids: Tensor, origin: RowOrigin) -> tuple[Tensor, Tensor]:
        """Member and its slot for each of ids [R, k], those of own real rows."""
        rows = len(ids)
        if self.observer is not None:
            self.observer.routed(layer, ids)
        return self.tables[layer].locate(ids, self._start[origin.slot[:rows]], origin.position[:rows])

    def dispatch(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, origin: RowOrigin) -> DispatchedRows:
        """See `ExpertExchange`. Raises ParallelError where `layer` is not the one that is due."""
        rows, k = ids.shape
        owner, local = self.locate(layer, ids, origin)  # [R, k] each
        goes = owner == self._peers[:, None, None]  # [G, R, k]
        peer, row = goes.any(-1).nonzero(as_tuple=True)  # by member, then by row
        chosen = goes[peer, row]  # [n, k]
        send_counts = torch.bincount(peer, minlength=self.comm.size)
        record = _pack(x[row], torch.where(chosen, local[row], -1), weights[row])
        self.take_turn(layer)
        recv_counts = self.comm.all_to_all_rows(
            send_counts[:, None], [1] * self.comm.size, [1] * self.comm.size, f"expert counts of layer {layer}"
        )[:, 0]
        came = recv_counts.tolist()
        received = self.comm.all_to_all_rows(record, send_counts.tolist(), came, f"expert rows of layer {layer}")
        rows_in, local_in, weights_in = _unpack(received, x.shape[1], k, x.dtype)
        pair_row, pair_choice = (local_in >= 0).nonzero(as_tuple=True)
        source = torch.repeat_interleave(self._peers, recv_counts, output_size=sum(came))
        self._open = _Exchanged(
            rows=rows_in[pair_row],
            local_ids=local_in[pair_row, pair_choice][:, None].long(),
            weights=weights_in[pair_row, pair_choice][:, None],
            layer=layer,
            pairs_from=torch.bincount(source[pair_row], minlength=self.comm.size).tolist(),
            pairs_to=goes.sum((1, 2)).tolist(),
            home=(row[:, None] * k + torch.arange(k, device=row.device))[chosen],
            num_rows=rows,
            num_chosen=k,
        )
        if self.observer is not None:
            self.observer.experts_begin(layer)
        return self._open

    def combine(self, sent: DispatchedRows, pairs: Tensor) -> Tensor:
        """See `ExpertExchange`."""
        if sent is not self._open or not isinstance(sent, _Exchanged):
            raise ParallelError("outputs are combined that were not dispatched last; this is a bug in the engine")
        self._open = None
        if self.observer is not None:
            self.observer.experts_end(sent.layer)
        returned = self.comm.all_to_all_rows(
            pairs[:, 0], sent.pairs_from, sent.pairs_to, f"expert outputs of layer {sent.layer}"
        )
        combined = returned.new_empty(sent.num_rows * sent.num_chosen, pairs.shape[-1])
        combined[sent.home] = returned
        return combined.view(sent.num_rows, sent.num_chosen, pairs.shape[-1])


def _pack(x: Tensor, local: Tensor, weights: Tensor) -> Tensor:
    """x [n, D], local slots [n, k] (-1 = not here), weights [n, k] -> one record of bytes a row."""
    widths = _widths(x.shape[1], local.shape[1], x.dtype)
    parts = (x, local.to(torch.int32), weights)
    columns = [
        part.contiguous().view(-1).view(torch.uint8).view(len(x), width)
        for part, width in zip(parts, widths, strict=True)
    ]
    return torch.cat(columns, 1)


def _unpack(records: Tensor, dim: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, local, weights = records.split(_widths(dim, k, dtype), 1)
    count = len(records)
    return (
        x.contiguous().view(-1).view(dtype).view(count, dim),
        local.contiguous().view(-1).view(torch.int32).view(count, k),
        weights.contiguous().view(-1).view(torch.float32).view(count, k),
    )


def _widths(dim: int, k: int, dtype: torch.dtype) -> list[int]:
    """Bytes of a row, of its local slots (int32) and of its weights (float32)."""
    return [dim * dtype.itemsize, 4 * k, 4 * k]
