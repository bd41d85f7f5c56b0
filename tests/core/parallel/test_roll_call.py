"""Nodes that are missing, wrong or strange are named before anything starts."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.roll_call import call_roll

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def call_all(nodes: dict[int, int], timeout_s: float, port: int) -> dict[int, Any]:
    """node -> the number of nodes that it believes in; what each got: None, or its error."""
    found: dict[int, Any] = {}

    def call(node: int, num_nodes: int) -> None:
        try:
            call_roll(HOST, port, node, num_nodes, timeout_s)
            found[node] = None
        except ParallelError as error:
            found[node] = error

    threads = [threading.Thread(target=call, args=item) for item in nodes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_nodes_go_when_all_are_there_and_the_port_is_free_again() -> None:
    port = free_port()
    assert call_all(dict.fromkeys(range(4), 4), 10.0, port) == dict.fromkeys(range(4))
    socket.create_server((HOST, port)).close()


def test_missing_nodes_are_named() -> None:
    start_s = time.monotonic()
    found = call_all({0: 4, 2: 4}, 1.0, free_port())
    assert found[0].late_ranks == (1, 3)
    assert "nodes [1, 3] of 4 have not called at 127.0.0.1 port" in str(found[0])
    assert "node 2: node 0 does not say" in str(found[2])
    assert time.monotonic() - start_s < 4.0


def test_node_0_may_be_the_last_to_come() -> None:
    port = free_port()
    early = threading.Thread(target=call_roll, args=(HOST, port, 1, 2, 10.0))
    early.start()
    call_roll(HOST, port, 0, 2, 10.0)
    early.join(10)
    assert not early.is_alive()


@pytest.mark.bad_input
def test_a_node_of_another_command_is_refused_and_strangers_are_ignored() -> None:
    port = free_port()
    stranger = threading.Thread(target=_knock, args=(port,))
    stranger.start()
    found = call_all({0: 2, 1: 3}, 1.5, port)
    stranger.join()
    assert "refuses: 'node 1 of 3 is not expected; [1] of 2 are'" in str(found[1])
    assert "nodes [1] of 2 have not called" in str(found[0])


def _knock(port: int) -> None:
    for _ in range(20):
        try:
            with socket.create_connection((HOST, port), 1.0) as connected:
                connected.sendall(b"GET / HTTP/1.1\r\n\r\n")
            return
        except OSError:
            time.sleep(0.05)


@pytest.mark.bad_input
def test_an_address_of_another_machine_is_refused_on_node_0() -> None:
    with pytest.raises(ParallelError, match=r"node 0 cannot listen at 192\.0\.2\.1 port 29500"):
        call_roll("192.0.2.1", 29500, 0, 2, 1.0)
