"""Channels to ranks that a launcher has started: the front end listens, each rank calls and shows that it belongs here.

    rank 0: front end ── its rank, a child ── socket pair
                      ◄─ token, rank ─ rank 1, on any host ── TCP           address and token: from the store
                      ◄─ token, rank ─ rank 2

The front end listens on the one address that leads to the other hosts (the loopback where there are none), until all
have called, and takes nobody who does not know the token.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time

import msgspec
from torch._C._distributed_c10d import Store, TCPStore  # not exported to type checkers by the public name

from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.channel import Channel
from deepinfer_core.parallel.launch import Rendezvous, own_address
from deepinfer_core.parallel.workers import Worker, Workers, start_worker

__all__ = ["accept_ranks", "join_front_end", "launched_ranks"]

_KEY = "front_end"
_TOKEN_BYTES = 32
_RANK = struct.Struct("<I")
_HELLO_S = 5.0


class _Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str
    port: int
    token: str  # hexadecimal


def launched_ranks(
    module: str, store: TCPStore, meeting: Rendezvous, timeout_s: float, *, show_output: bool = True
) -> Workers:
    """All ranks, as the process of rank 0 sees them: its own as a child that runs `module`, the others over TCP.

    Raises ParallelError that names the ranks that have not called within `timeout_s`.
    """
    with socket.create_server((own_address(meeting), 0), backlog=meeting.world_size) as listener:
        channels = accept_ranks(listener, store, set(range(1, meeting.world_size)), timeout_s)
    own = start_worker(module, meeting, (), {}, show_output=show_output)
    others = [Worker(rank, channel, None) for rank, channel in sorted(channels.items())]
    return Workers([own, *others], store)


def join_front_end(store: Store, meeting: Rendezvous) -> Channel:
    """This rank's channel to the front end. Raises ParallelError if there is none within the store's timeout."""
    try:
        address = msgspec.json.decode(store.get(_KEY), type=_Address)
        connected = socket.create_connection((address.host, address.port), _HELLO_S)
        connected.sendall(bytes.fromhex(address.token) + _RANK.pack(meeting.rank))
    except (RuntimeError, OSError, ValueError) as error:
        raise ParallelError(
            f"rank {meeting.rank} cannot reach the front end, the process of rank 0: {error}"
        ) from error
    return Channel(connected, "the front end")


def accept_ranks(listener: socket.socket, store: Store, ranks: set[int], timeout_s: float) -> dict[int, Channel]:
    """Publish where the front end listens, and wait for all of `ranks` to call. Raises ParallelError that names those
    that have not within `timeout_s`.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    host, port = listener.getsockname()[:2]
    store.set(_KEY, msgspec.json.encode(_Address(host, port, token.hex())).decode())
    channels: dict[int, Channel] = {}
    deadline_s = time.monotonic() + timeout_s
    while missing := sorted(ranks - channels.keys()):
        listener.settimeout(max(0.01, deadline_s - time.monotonic()))
        try:
            connected, caller = listener.accept()
        except TimeoutError:
            for channel in channels.values():
                channel.close()
            raise ParallelError(
                f"ranks {missing} have not called within {timeout_s:g} s; look at the launcher's output on their hosts",
                tuple(missing),
            ) from None
        rank = _hello(connected, token)
        if rank is None or rank not in missing:
            connected.close()
            continue
        channels[rank] = Channel(connected, f"rank {rank} at {caller[0]}")
    return channels


def _hello(connected: socket.socket, token: bytes) -> int | None:
    """The rank that calls; None for a stranger."""
    connected.settimeout(_HELLO_S)
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < _TOKEN_BYTES + _RANK.size and (part := connected.recv(_TOKEN_BYTES + _RANK.size - len(data))):
            data += part
    if len(data) < _TOKEN_BYTES + _RANK.size or not hmac.compare_digest(data[:_TOKEN_BYTES], token):
        return None
    return int(_RANK.unpack(data[_TOKEN_BYTES:])[0])
