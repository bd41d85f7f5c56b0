"""Where the ranks meet: what a launcher tells each process, and the store that all of them share.

torchrun, one node or many    agent serves the store      RANK, WORLD_SIZE, LOCAL_RANK, .. in the environment
a local `LLM`                 parent serves the store     the same, set by parallel/workers.py
Ray                           driver serves the store     the same, set by parallel/ray_launch.py
anything else that sets them  rank 0 serves the store     TORCHELASTIC_USE_AGENT_STORE unset
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from torch._C._distributed_c10d import TCPStore  # not exported to type checkers by the public name

from deepinfer_core.config.checks import shown
from deepinfer_core.config.env import read_launcher
from deepinfer_core.errors import ParallelError

__all__ = ["LOOPBACK", "Rendezvous", "own_address", "serve_store"]

LOOPBACK = "127.0.0.1"
_MAX_RANKS = 65_536


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What one rank knows before it meets the others."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str  # of the store
    port: int
    serves_store: bool = False

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Rendezvous | None:
        """As a launcher has set it (`variables`; None = the environment); None where nobody launched this process.

        Raises ParallelError for variables that are missing, no numbers, or contradict.
        """
        found = read_launcher() if variables is None else variables
        if "RANK" not in found and "WORLD_SIZE" not in found:
            return None
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in found]
        if missing:
            raise ParallelError(
                f"{', '.join(missing)} not set beside {', '.join(sorted(found))}; start with `deepinfer launch` or "
                "torchrun, or unset them all"
            )
        world_size = _number(found, "WORLD_SIZE", 1, _MAX_RANKS)
        rank = _number(found, "RANK", 0, world_size - 1)
        local_size = _number(found, "LOCAL_WORLD_SIZE", 1, world_size, default=world_size)
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=_number(found, "LOCAL_RANK", 0, local_size - 1, default=rank % local_size),
            local_world_size=local_size,
            host=found["MASTER_ADDR"],
            port=_number(found, "MASTER_PORT", 1, 65_535),
            serves_store=rank == 0 and found.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        )

    def variables(self) -> dict[str, str]:
        """As a launcher would set it for a rank whose store somebody else serves."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def connect(self, timeout_s: float) -> TCPStore:
        """The store of all ranks. Raises ParallelError if nobody serves it within `timeout_s`."""
        try:
            return TCPStore(
                self.host,
                self.port,
                is_master=self.serves_store,
                timeout=datetime.timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise ParallelError(
                f"rank {self.rank}: no store of the ranks answers at {self.host} port {self.port} within "
                f"{timeout_s:g} s; is the launcher running there, and is the port open?"
            ) from error


def serve_store(host: str = LOOPBACK, timeout_s: float = 60.0) -> TCPStore:
    """A store on a free port of `host` and of no other address; `store.port` says which."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store's from here on
    )


def own_address(meeting: Rendezvous) -> str:
    """Of the interface that leads to the store: the one that the other hosts can be expected to reach; the loopback
    where all ranks are on one host. Raises ParallelError without a route.
    """
    if meeting.local_world_size == meeting.world_size:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((meeting.host, meeting.port))  # sends nothing, chooses a route
            address = str(probe.getsockname()[0])
        except OSError as error:
            raise ParallelError(f"no route from here to {shown(meeting.host)}: {error}") from error
    if address.startswith("127."):  # the store is on this host: take the name that the others know it by
        address = socket.gethostbyname(socket.gethostname())
    return address


def _number(found: Mapping[str, str], name: str, low: int, high: int, default: int | None = None) -> int:
    if name not in found and default is not None:
        return default
    text = found[name]
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ParallelError(f"{name} is {shown(text)} in the environment; it must be a number from {low} to {high}")
    return int(text)
