"""`ParallelConfig`: how many devices share the work, by kind, and how long they wait for each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from deepinfer_core.config.checks import check_choice, check_integer, check_number
from deepinfer_core.config.topology import Topology
from deepinfer_core.errors import ConfigError

__all__ = ["ExpertTransport", "Launcher", "ParallelConfig"]

ExpertTransport = Literal["torch", "deepep"]
Launcher = Literal["local", "ray"]

_MAX_RANKS = 65_536
_MIN_DEADLINE_S = 1.0
_MAX_DEADLINE_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Raises ConfigError for a size out of range and for sizes that do not fit together (`Topology` says which do)."""

    data_parallel_size: Annotated[
        int | None, "groups that each serve their own requests; None = as many as the shared parts need"
    ] = None
    expert_parallel_size: Annotated[int, "ranks that share the experts"] = 1
    context_parallel_size: Annotated[int, "ranks that share a long prompt"] = 1
    engram_parallel_size: Annotated[int, "ranks that share the Engram tables"] = 1
    expert_transport: Annotated[ExpertTransport, "how rows reach their experts; deepep was never run"] = "torch"
    launcher: Annotated[Launcher, "what starts ranks that torchrun has not; ray was never run"] = "local"
    collective_deadline_s: Annotated[float, "longest wait of a rank for another in a step"] = 120.0
    start_deadline_s: Annotated[float, "longest wait for every rank to appear"] = 60.0

    def __post_init__(self) -> None:
        if self.data_parallel_size is not None:
            check_integer("data_parallel_size", self.data_parallel_size, 1, _MAX_RANKS, ConfigError)
        for name in ("expert_parallel_size", "context_parallel_size", "engram_parallel_size"):
            check_integer(name, getattr(self, name), 1, _MAX_RANKS, ConfigError)
        check_choice("expert_transport", self.expert_transport, get_args(ExpertTransport), ConfigError)
        check_choice("launcher", self.launcher, get_args(Launcher), ConfigError)
        for name in ("collective_deadline_s", "start_deadline_s"):
            check_number(name, getattr(self, name), _MIN_DEADLINE_S, _MAX_DEADLINE_S, ConfigError)
        self.topology()

    def topology(self, ranks_per_node: int = 0) -> Topology:
        """Who is what; `ranks_per_node` 0 = all on one node. Raises ConfigError for nodes not filled evenly."""
        size = self.data_parallel_size
        if size is None:  # the fewest ranks that the shared parts divide; all of them serve requests too
            shared = math.lcm(self.expert_parallel_size, self.engram_parallel_size)
            size = shared // math.gcd(shared, self.context_parallel_size)
        return Topology(
            data_parallel_size=size,
            context_parallel_size=self.context_parallel_size,
            expert_parallel_size=self.expert_parallel_size,
            engram_parallel_size=self.engram_parallel_size,
            ranks_per_node=ranks_per_node,
        )
