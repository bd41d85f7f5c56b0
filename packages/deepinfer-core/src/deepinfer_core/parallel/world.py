"""`World`: this process among its ranks. Joins torch.distributed, makes a communicator for every kind of sharing.

    store (TCP)  ─►  gloo group of all ranks: control, small messages on the host
                 ─►  one group an axis of the topology, on the device: gloo, NCCL or HCCL
                 ─►  gloo groups of ranks that share prompts: plans, what their leader runs
                 ─►  gloo groups of ranks that share experts: moves, weights that travel beside the steps
                 ─►  the watch: signs of life, deadlines

Groups are made in the same order on every rank. A group of one is the identity; a world of one opens nothing.
"""

from __future__ import annotations

import datetime
from types import TracebackType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # not exported to type checkers by the public name

from deepinfer_core.config.topology import AXES, Axis, Topology
from deepinfer_core.errors import ConfigError, ParallelError
from deepinfer_core.parallel.communicator import Communicator, GroupCommunicator, SoleCommunicator
from deepinfer_core.parallel.watch import Watch

__all__ = ["World"]

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


class World:
    """The communicators of one rank.

    control: all ranks, tensors on the host. data, context, expert, engram: this rank's group along that axis, tensors
    on `device`. plans: the context group once more, tensors on the host: a device's work must not be waited for where a
    plan is read. moves: the expert group likewise, for a thread of its own.
    """

    def __init__(self, store: Store | None, rank: int, topology: Topology, device: torch.device, deadline_s: float):
        self.topology = topology
        self.place = topology.place(rank)
        self.device = device
        self.watch: Watch | None = None
        host = torch.device("cpu")
        if topology.world_size == 1:
            self.control: Communicator = SoleCommunicator("control")
            self.plans: Communicator = SoleCommunicator("plans")
            self.moves: Communicator = SoleCommunicator("moves")
            self._axes = {axis: SoleCommunicator(axis, device=device) for axis in AXES}
            return
        if store is None:
            raise ParallelError(f"{topology.world_size} ranks need a store in which they meet; none is given")
        if device.type not in _BACKENDS:
            raise ConfigError(f"device {device} has no collectives here; one of {', '.join(_BACKENDS)} has")
        self._timeout = datetime.timedelta(seconds=2 * deadline_s + 60)  # the watch acts first
        dist.init_process_group(
            "gloo",
            store=PrefixStore("deepinfer/groups", store),
            rank=rank,
            world_size=topology.world_size,
            timeout=self._timeout,
        )
        signs = PrefixStore("deepinfer/signs", store.clone())
        self.watch = Watch(signs, rank, topology.world_size, deadline_s, self._abort)
        everybody = (tuple(range(topology.world_size)),)
        self.control = self._communicator("control", everybody, host, self.watch)
        self.plans = self._communicator("plans", topology.groups("context"), host, self.watch)
        self.moves = self._communicator("moves", topology.groups("expert"), host, self.watch, in_background=True)
        self._axes = {axis: self._communicator(axis, topology.groups(axis), device, self.watch) for axis in AXES}
        dist.barrier()  # every watch has published and every group is known before the first collective

    @property
    def rank(self) -> int:
        """In the world."""
        return self.place.rank

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.topology.world_size

    def along(self, axis: Axis) -> Communicator:
        """This rank's group along an axis."""
        return self._axes[axis]

    def begin_step(self, step: int) -> None:
        """The step that errors name from here on."""
        if self.watch is not None:
            self.watch.begin_step(step)

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on, before it ends."""
        if self.watch is not None:
            self.watch.fail(reason)

    def close(self) -> None:
        """Leave: the others see that this rank has ended. Nothing waits for them."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None
            dist.destroy_process_group()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(f"{type(error).__name__}: {error}")
        self.close()

    def _communicator(
        self,
        name: str,
        groups: tuple[tuple[int, ...], ...],
        device: torch.device,
        watch: Watch,
        *,
        in_background: bool = False,
    ) -> Communicator:
        """This rank's one of `groups`; all ranks make all of them, in this order."""
        mine: Communicator | None = None
        for ranks in groups:
            group_name = f"{name} {ranks[0]}-{ranks[-1]}"
            if len(ranks) == 1:
                if self.rank in ranks:
                    mine = SoleCommunicator(group_name, self.rank, device)
                continue
            watch.register(group_name, ranks, in_background=in_background)
            group = dist.new_group(list(ranks), timeout=self._timeout, backend=_BACKENDS[device.type])
            if isinstance(group, dist.ProcessGroup):  # else this rank is no member of it
                mine = GroupCommunicator(group_name, ranks, group, device, watch)
        if mine is None:
            raise ParallelError(f"rank {self.rank} is in no group of {name}")
        return mine

    def _abort(self) -> None:
        """End collectives that are stuck on a device, so that whoever waits for the device wakes up."""
        for communicator in self._axes.values():
            if isinstance(communicator, GroupCommunicator) and communicator.device.type != "cpu":
                communicator.abort()
