"""Expert exchange: rows go to where their experts live, outputs come back in ascending expert id.

    dispatch(layer, x [R, D], logical ids [R, k], weights [R, k])    rows, local ids, weights as the owner sees them
    combine(sent, pairs)                                             [R, k, D] at the row's own process

`LocalExperts` is the exchange of one process that owns all experts; it moves nothing. Ids of padding rows never enter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["DispatchedRows", "ExpertExchange", "LocalExperts"]


@dataclass(frozen=True, eq=False)
class DispatchedRows:
    """Rows that this process runs its experts on."""

    rows: Tensor  # [R', D]
    local_ids: Tensor  # [R', k']
    weights: Tensor  # [R', k'] float32


class ExpertExchange(Protocol):
    """Moves rows to experts and outputs back."""

    def dispatch(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> DispatchedRows:
        """x [R, D], logical expert ids [R, k] ascending, weights [R, k]."""
        ...

    def combine(self, sent: DispatchedRows, pairs: Tensor) -> Tensor:
        """pairs [R', k', D], outputs of the local experts -> [R, k, D] of this process's own rows."""
        ...


class LocalExperts:
    """One process owns every expert. `expert_maps`: layer -> [E] local slot of each logical expert; a layer without one
    has slot = id.
    """

    def __init__(self, expert_maps: Mapping[int, Tensor] | None = None) -> None:
        self._maps = dict(expert_maps or {})

    def dispatch(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> DispatchedRows:
        """Hands the rows through, ids turned into local slots."""
        expert_map = self._maps.get(layer)
        return DispatchedRows(x, ids if expert_map is None else expert_map[ids], weights)

    def combine(self, sent: DispatchedRows, pairs: Tensor) -> Tensor:
        """The pairs are already where they belong."""
        return pairs
