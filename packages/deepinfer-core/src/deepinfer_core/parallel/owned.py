"""Tables whose rows may be spread over processes (embedding, head): lookups by owned range."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer_core.errors import ParallelError

__all__ = ["OwnedRange"]


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
