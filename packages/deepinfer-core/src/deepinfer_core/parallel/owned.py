"""Tables whose rows may be spread over processes (embedding, head, Engram): lookups by owned range.

    row ids of all layers, known from the tokens ─► unique, ascending ─► counts and ids to their owners, all_to_all
    decoded where a layer wants them             ◄──────────────────────  packed rows back, at the start of a step

An owner reads its rows from where it keeps them (device, host memory, disk); rows travel as they are stored, 264 bytes
each in the release, and decode to the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepinfer_core.checkpoint.engram_store import EngramTable
from deepinfer_core.checkpoint.sharding import share
from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.communicator import Communicator

__all__ = ["EngramSource", "LocalEngram", "OwnedRange", "SharedEngram"]


@dataclass(frozen=True)
class OwnedRange:
    """Rows `start .. stop - 1` of a table of `total` rows are held by this process."""

    start: int
    stop: int
    total: int

    @classmethod
    def whole(cls, total: int) -> OwnedRange:
        """One process holds everything."""
        return cls(0, total, total)

    def lookup(self, table: Tensor, ids: Tensor) -> Tensor:
        """table [stop - start, D], ids [R] -> [R, D]."""
        if self.stop - self.start != self.total:
            raise ParallelError(
                f"rows {self.start} to {self.stop} of {self.total} are held here and no exchange for the others is "
                "built; run with one process"
            )
        return table.index_select(0, ids)


class EngramSource(Protocol):
    """Rows of the Engram tables, by layer. Every layer of the model is named in every `fetch`."""

    def fetch(self, wanted: Mapping[int, Tensor]) -> None:
        """Layer -> row ids [N]: they will be taken in this step."""
        ...

    def take(self, layer: int) -> Tensor:
        """Values [N, W] of the rows that were fetched for `layer`."""
        ...


class LocalEngram:
    """One process holds every row."""

    def __init__(self, tables: Mapping[int, EngramTable]) -> None:
        self._tables = dict(tables)
        self._wanted: Mapping[int, Tensor] = {}

    def fetch(self, wanted: Mapping[int, Tensor]) -> None:
        """Nothing has to move: rows are looked up when they are taken."""
        self._wanted = wanted

    def take(self, layer: int) -> Tensor:
        """See `EngramSource`."""
        return self._tables[layer].lookup(self._wanted[layer])


class SharedEngram:
    """Rows of every table split over the members of `comm` as `sharding.share` does; `tables` hold the own part.

    A step: `begin`, then one `fetch` by every member; `finish` makes up for a member that did not come to it.
    """

    def __init__(self, comm: Communicator, tables: Mapping[int, EngramTable]) -> None:
        self.comm = comm
        self._tables = dict(sorted(tables.items()))
        for layer, table in self._tables.items():
            own = share(table.num_rows, comm.rank, comm.size)
            if table.owned_rows != own:
                raise ParallelError(f"Engram layer {layer} holds {table.owned_rows}; member {comm.rank} owns {own}")
        self._starts = {layer: self._first_rows(table.num_rows) for layer, table in self._tables.items()}
        self._is_due = False
        self._fetched: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> packed unique rows, place of each wanted one

    def begin(self) -> None:
        """A step begins: a fetch is due."""
        self._is_due = bool(self._tables)

    def finish(self) -> None:
        """Take part in the step's fetch without rows of one's own, if it has not happened."""
        if self._is_due:
            nothing = torch.zeros(0, dtype=torch.int64, device=self.comm.device)
            self.fetch(dict.fromkeys(self._tables, nothing))

    def fetch(self, wanted: Mapping[int, Tensor]) -> None:
        """See `EngramSource`; a collective of all members."""
        unique: list[Tensor] = []
        places: list[Tensor] = []
        for layer in self._tables:
            ids, place = torch.unique(wanted[layer], return_inverse=True)  # ascending, so by owner
            unique.append(ids)
            places.append(place)
        counts = torch.stack([self._by_owner(layer, ids) for layer, ids in zip(self._tables, unique, strict=True)], 1)
        self._is_due = False
        ones = [1] * self.comm.size
        asked = self.comm.all_to_all_rows(counts, ones, ones, "Engram counts")  # [G, L] by member and layer
        sent, came = counts.tolist(), asked.tolist()
        own_total, asked_total = [sum(row) for row in sent], [sum(row) for row in came]
        by_layer = [ids.split([row[n] for row in sent]) for n, ids in enumerate(unique)]
        ids = torch.cat([part[member] for member in range(self.comm.size) for part in by_layer])
        received = self.comm.all_to_all_rows(ids, own_total, asked_total, "Engram row ids")
        records = self.comm.all_to_all_rows(self._read(received, came), asked_total, own_total, "Engram rows")
        chunks = records.split([count for row in sent for count in row])  # by owner, then layer
        self._fetched = {
            layer: (torch.cat(chunks[n :: len(self._tables)]), places[n]) for n, layer in enumerate(self._tables)
        }

    def take(self, layer: int) -> Tensor:
        """See `EngramSource`."""
        records, place = self._fetched.pop(layer)
        return self._tables[layer].decode(records)[place]

    def _first_rows(self, num_rows: int) -> Tensor:
        """First row of members 1, 2, .."""
        starts = [share(num_rows, member, self.comm.size).start for member in range(1, self.comm.size)]
        return torch.tensor(starts, dtype=torch.int64, device=self.comm.device)

    def _by_owner(self, layer: int, ids: Tensor) -> Tensor:
        """[G]: how many of the ids each member owns."""
        owner = torch.bucketize(ids, self._starts[layer], right=True)
        return torch.bincount(owner, minlength=self.comm.size)

    def _read(self, ids: Tensor, counts: list[list[int]]) -> Tensor:
        """Packed rows of ids that come by member, then layer."""
        chunks = ids.split([count for row in counts for count in row])
        num_layers = len(self._tables)
        read = [
            table.read(torch.cat(chunks[n::num_layers])).split([row[n] for row in counts])
            for n, table in enumerate(self._tables.values())
        ]
        return torch.cat([read[n][member] for member in range(self.comm.size) for n in range(num_layers)])
