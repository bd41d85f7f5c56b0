"""Ranks as threads of one process, the whole way from their front end to their experts: fast, and open to mischief."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from deepinfer_core.config.engine import EngineConfig, flat_settings, resolve_settings
from deepinfer_core.config.topology import AXES, Axis, Topology
from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.channel import Channel, Inbox, Outbox
from deepinfer_core.parallel.communicator import Communicator, SoleCommunicator
from deepinfer_core.parallel.world import World
from deepinfer_core.runtime.assembly import AssembledEngine, assemble_engine
from deepinfer_core.runtime.front_end import FrontEnd
from deepinfer_core.runtime.rank_engine import RankEngine
from deepinfer_core.runtime.rank_messages import Failed, Start, decode_command, encode
from tests.core.parallel.in_process import Meeting, ThreadCommunicator


@dataclass
class ThreadWorld:
    """As `parallel.world.World`."""

    rank: int
    size: int
    topology: Topology
    control: Communicator
    plans: Communicator
    moves: Communicator
    axes: Mapping[Axis, Communicator]
    device: torch.device = torch.device("cpu")  # noqa: RUF009 -- a constant

    def along(self, axis: Axis) -> Communicator:
        return self.axes[axis]

    def begin_step(self, step: int) -> None:
        pass


class ThreadRanks:
    """As `parallel.workers.Workers`. `engines`: what each rank runs, once it has loaded."""

    def __init__(self, topology: Topology) -> None:
        self.engines: dict[int, AssembledEngine] = {}
        self._topology = topology
        size = topology.world_size
        self._control = Meeting(size)
        self._moves = [Meeting(len(ranks)) for ranks in topology.groups("expert")]
        self._groups = {axis: [Meeting(len(ranks)) for ranks in topology.groups(axis)] for axis in AXES}
        self._messages: list[tuple[int, bytes]] = []
        self._changed = threading.Condition()
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        for rank in range(size):
            ours, theirs = socket.socketpair()
            self._channels.append(Channel(ours, f"rank {rank}"))
            inbox = Inbox(Channel(theirs, "the front end"), exit_after_s=None)
            work = [
                threading.Thread(target=self._serve, args=(rank, inbox), daemon=True),
                threading.Thread(target=self._listen, args=(rank,), daemon=True),
            ]
            for thread in work:
                thread.start()
            self._threads += work

    def __len__(self) -> int:
        return self._topology.world_size

    def send(self, rank: int, message: bytes) -> None:
        self._channels[rank].send(message)

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._messages), timeout_s)
            found, self._messages = self._messages, []
        return found

    def stop(self, timeout_s: float) -> None:
        """A thread that waits for one that has ended is told so."""
        for thread in self._threads[::2]:
            thread.join(timeout_s)
        for channel in self._channels:
            channel.close()
        for meeting in (self._control, *self._moves, *(one for group in self._groups.values() for one in group)):
            meeting.leave()
        for thread in self._threads:
            thread.join(30)
            if thread.is_alive():
                raise RuntimeError(f"{thread.name} does not end")

    def _world(self, rank: int) -> World:
        axes: dict[Axis, Communicator] = {}
        for axis in AXES:
            ranks = self._topology.group_of(axis, rank)
            meeting = self._groups[axis][self._topology.groups(axis).index(ranks)]
            member = ThreadCommunicator(meeting, ranks.index(rank), ranks)
            axes[axis] = member if len(ranks) > 1 else SoleCommunicator(axis, rank)
        control = ThreadCommunicator(self._control, rank, range(len(self)))
        sharing = self._topology.group_of("expert", rank)
        meeting = self._moves[self._topology.groups("expert").index(sharing)]
        moves = ThreadCommunicator(meeting, sharing.index(rank), sharing)
        plans = axes["context"]  # in their order, these threads can share one
        return cast("World", ThreadWorld(rank, len(self), self._topology, control, plans, moves, axes))

    def _serve(self, rank: int, inbox: Inbox) -> None:
        engine: AssembledEngine | None = None
        outbox = Outbox(inbox.channel)
        try:
            start = decode_command(inbox.take(60)[0])
            assert isinstance(start, Start)
            values = {name: tuple(one) if isinstance(one, list) else one for name, one in start.settings.items()}
            engine = assemble_engine(EngineConfig.from_settings(**values), self._world(rank))
            self.engines[rank] = engine
            RankEngine(engine, inbox, outbox).serve()
        except Exception as error:
            blamed = error.late_ranks if isinstance(error, ParallelError) else ()
            with suppress(ParallelError):
                outbox.send(encode(Failed(f"{type(error).__name__}: {error}", list(blamed))))
        finally:
            if engine is not None:
                engine.close()
            outbox.close()
            inbox.close()

    def _listen(self, rank: int) -> None:
        channel = self._channels[rank]
        while not channel.is_closed:
            messages = channel.read()
            with self._changed:
                self._messages += [(rank, message) for message in messages]
                self._changed.notify_all()


@contextmanager
def front_end(model: str | Path, **settings: Any) -> Iterator[tuple[FrontEnd, ThreadRanks]]:
    """An engine over thread ranks, closed at the end."""
    config = resolve_settings({"model": str(model), "quiet": True} | settings, {}).config
    topology = config.parallel.topology()
    ranks = ThreadRanks(topology)
    leaders = range(0, topology.world_size, topology.context_parallel_size)
    engine = FrontEnd.connect(config, ranks, leaders, flat_settings(config))
    try:
        yield engine, ranks
    finally:
        engine.close()
