"""`Topology`: what each rank of a world is. Pure: integers only.

    8 ranks on 2 nodes, data_parallel_size 4, context_parallel_size 2, expert_parallel_size 4, engram_parallel_size 2

    rank          0   1   2   3 | 4   5   6   7
    node          0   0   0   0 | 1   1   1   1
    data          0   0   1   1 | 2   2   3   3      which requests: the ranks of one number serve the same ones
    context       0   1   0   1 | 0   1   0   1      which part of their long prompts
    expert        0   1   2   3 | 0   1   2   3      which share of the experts; neighbours make a whole set
    engram        0   1   0   1 | 0   1   0   1      which share of the Engram tables; likewise

Every rank computes attention, so world = data x context. The experts of a layer are spread over `expert_parallel_size`
neighbours, which must divide the world: 1 = every rank has all of them, world = there is one set. Engram likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from deepinfer_core.config.checks import check_choice, check_integer
from deepinfer_core.errors import ConfigError

__all__ = ["AXES", "Axis", "Place", "Topology"]

Axis = Literal["data", "context", "expert", "engram"]
AXES: tuple[Axis, ...] = get_args(Axis)
_MAX_RANKS = 65_536


class Place(NamedTuple):
    """One rank's numbers: `data` < data_parallel_size and so on; `local_rank` counts within its node."""

    rank: int
    node: int
    local_rank: int
    data: int
    context: int
    expert: int
    engram: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes by kind; `ranks_per_node` 0 = all on one node. Raises ConfigError for sizes that do not fit together."""

    data_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    engram_parallel_size: int = 1
    ranks_per_node: int = 0

    def __post_init__(self) -> None:
        for name in ("data", "context", "expert", "engram"):
            check_integer(f"{name}_parallel_size", self._size(name), 1, _MAX_RANKS, ConfigError)
        product = f"data_parallel_size {self.data_parallel_size} x context_parallel_size {self.context_parallel_size}"
        check_integer(f"the number of ranks, {product},", self.world_size, 1, _MAX_RANKS, ConfigError)
        for name in ("expert", "engram"):
            size = self._size(name)
            if self.world_size % size:
                legal = ", ".join(str(n) for n in range(1, self.world_size + 1) if self.world_size % n == 0)
                raise ConfigError(
                    f"{name}_parallel_size is {size}; it must divide the number of ranks, {product} = "
                    f"{self.world_size}: one of {legal}"
                )
        check_integer("ranks_per_node", self.ranks_per_node, 0, _MAX_RANKS, ConfigError)
        if self.ranks_per_node and self.world_size % self.ranks_per_node:
            raise ConfigError(
                f"ranks_per_node is {self.ranks_per_node}; {self.world_size} ranks ({product}) do not fill such nodes "
                "evenly"
            )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def num_nodes(self) -> int:
        """Nodes in all."""
        return self.world_size // self.ranks_per_node if self.ranks_per_node else 1

    def place(self, rank: int) -> Place:
        """What `rank` is. Raises ConfigError for one outside the world."""
        check_integer("rank", rank, 0, self.world_size - 1, ConfigError)
        node, local_rank = divmod(rank, self.ranks_per_node or self.world_size)
        data, context = divmod(rank, self.context_parallel_size)
        return Place(
            rank, node, local_rank, data, context, rank % self.expert_parallel_size, rank % self.engram_parallel_size
        )

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """The world cut into groups that work together along `axis`, ranks ascending: they differ in that number only
        (expert and engram: neighbours that hold one whole set).
        """
        check_choice("axis", axis, AXES, ConfigError)
        size = self._size(axis)
        if axis == "data":
            return tuple(
                tuple(range(first, self.world_size, self.context_parallel_size))
                for first in range(self.context_parallel_size)
            )
        return tuple(tuple(range(first, first + size)) for first in range(0, self.world_size, size))

    def group_of(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The group of `rank` along `axis`."""
        place = self.place(rank)
        groups = self.groups(axis)
        return groups[place.context] if axis == "data" else groups[rank // len(groups[0])]

    def _size(self, axis: Axis) -> int:
        return {
            "data": self.data_parallel_size,
            "context": self.context_parallel_size,
            "expert": self.expert_parallel_size,
            "engram": self.engram_parallel_size,
        }[axis]
