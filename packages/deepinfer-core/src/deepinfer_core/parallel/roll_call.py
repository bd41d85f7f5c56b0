"""Nodes call in before torchrun starts: torchrun would wait for a missing one for minutes, and not say which it is.

    node 0    listens at HOST:PORT ─ waits for nodes 1 .. N-1 ─ "go" to all ─ gives the port back, for torchrun
    node n    calls, again and again ─ "node n of N" ─ waits for "go"

Small texts over plain sockets; nothing of torch is imported.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time

from deepinfer_core.config.checks import shown
from deepinfer_core.errors import ParallelError

__all__ = ["call_roll"]

_RETRY_S = 0.2
_HELLO_S = 5.0
_MAX_LINE = 100
_HELLO = re.compile(r"deepinfer node (\d{1,5}) of (\d{1,5})")


def call_roll(host: str, port: int, node: int, num_nodes: int, timeout_s: float) -> None:
    """Return when all nodes are there. Raises ParallelError that names those that are not within `timeout_s`."""
    if num_nodes == 1:
        return
    if node == 0:
        _receive_calls(host, port, num_nodes, timeout_s)
    else:
        _call(host, port, node, num_nodes, timeout_s)


def _receive_calls(host: str, port: int, num_nodes: int, timeout_s: float) -> None:
    try:
        listener = socket.create_server((host, port), backlog=num_nodes)
    except OSError as error:
        raise ParallelError(
            f"node 0 cannot listen at {host} port {port} ({error}); --master must be an address of this machine and a "
            "free port"
        ) from error
    present: dict[int, socket.socket] = {}
    deadline_s = time.monotonic() + timeout_s
    with listener, contextlib.ExitStack() as connections:
        while missing := sorted(set(range(1, num_nodes)) - present.keys()):
            listener.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                connected = connections.enter_context(listener.accept()[0])
            except TimeoutError:
                raise ParallelError(
                    f"nodes {missing} of {num_nodes} have not called at {host} port {port} within {timeout_s:g} s; "
                    "start the same command there with their --node-rank, and open the port",
                    tuple(missing),
                ) from None
            connected.settimeout(_HELLO_S)
            caller = _HELLO.fullmatch(_line(connected))
            if caller is None:  # a stranger
                connected.close()
                continue
            number, total = int(caller[1]), int(caller[2])
            if total != num_nodes or number not in missing:
                _answer(connected, f"node {number} of {total} is not expected; {missing} of {num_nodes} are")
                continue
            present[number] = connected
        for connected in present.values():
            _answer(connected, "go")


def _call(host: str, port: int, node: int, num_nodes: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), _HELLO_S) as connected:
            _answer(connected, f"deepinfer node {node} of {num_nodes}")
            connected.settimeout(max(0.01, deadline_s - time.monotonic()))
            answer = _line(connected)
            if answer == "go":
                return
            if answer:
                raise ParallelError(f"node 0 at {host} port {port} refuses: {shown(answer)}")
        if time.monotonic() >= deadline_s:
            raise ParallelError(
                f"node {node}: node 0 does not say at {host} port {port} within {timeout_s:g} s that all are there; "
                "its own output names the missing ones, if it runs",
                (0,),
            )
        time.sleep(_RETRY_S)


def _answer(connected: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):
        connected.sendall(text.encode() + b"\n")


def _line(connected: socket.socket) -> str:
    """Up to a newline; what came before the end, a timeout or 100 bytes."""
    data = b""
    with contextlib.suppress(OSError):
        while not data.endswith(b"\n") and len(data) < _MAX_LINE and (part := connected.recv(_MAX_LINE - len(data))):
            data += part
    return data.decode("utf-8", "replace").strip()
