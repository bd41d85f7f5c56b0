"""Local ranks: started, talked to, missed when they die, and gone when their parent is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.channel import Channel, Inbox, Outbox
from deepinfer_core.parallel.workers import Workers

PATH = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture
def echoes() -> Iterator[Workers]:
    with Workers.local("echo_program", 2, variables=PATH, show_output=False) as workers:
        yield workers


def receive(workers: Workers, count: int) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    end_s = time.monotonic() + 30
    while len(found) < count and time.monotonic() < end_s:
        found |= dict(workers.receive(1.0))
    return found


def has_ended(process_id: int, within_s: float = 10.0) -> bool:
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        try:
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_every_rank_knows_its_number_and_gets_its_own_messages(echoes: Workers) -> None:
    echoes.send_all(b"rank")
    assert receive(echoes, 2) == {0: b"0 of 2", 1: b"1 of 2"}
    echoes.send(1, b"x" * 3_000_000)  # larger than any buffer between the two
    assert receive(echoes, 1) == {1: b"x" * 3_000_000}


def test_a_rank_that_ends_is_reported_once_with_its_last_words(echoes: Workers) -> None:
    echoes.send(1, b"die")
    with pytest.raises(
        ParallelError, match=r"(?s)rank 1 \(process \d+\) ended with exit status 7; .*the last words"
    ) as e:
        receive(echoes, 1)
    assert e.value.late_ranks == (1,)
    echoes.send(0, b"rank")
    assert receive(echoes, 1) == {0: b"0 of 2"}
    with pytest.raises(ParallelError, match=r"rank 1 .* ended with exit status 7"):
        echoes.send(1, b"rank")


def test_a_killed_rank_is_named_with_its_signal(echoes: Workers) -> None:
    echoes.send(0, b"kill")
    with pytest.raises(ParallelError, match=r"rank 0 .* was killed by signal 9 \(SIGKILL\)"):
        receive(echoes, 1)


def test_stopping_leaves_no_process_behind_not_even_a_stopped_one(echoes: Workers) -> None:
    process_ids = [worker.process.pid for worker in echoes.workers if worker.process]
    os.kill(process_ids[1], signal.SIGSTOP)
    echoes.stop(0.5)
    assert all(has_ended(process_id) for process_id in process_ids)
    echoes.stop()  # again: nothing happens


@pytest.mark.parametrize("last_message", ["rank", "sleep"])
def test_ranks_end_when_their_parent_is_killed(last_message: str) -> None:
    """Also one that is stuck."""
    program = f"""
        from deepinfer_core.parallel.workers import Workers
        workers = Workers.local("echo_program", 1, variables={PATH!r}, show_output=False)
        workers.send(0, b"rank")
        workers.receive(30.0)
        workers.send(0, {last_message.encode()!r})
        print(workers.workers[0].process.pid, flush=True)
        input()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        process_id = int(parent.stdout.readline())
        parent.kill()
    assert has_ended(process_id)


def test_ctrl_c_reaches_the_parent_alone(echoes: Workers) -> None:
    assert all(os.getpgid(worker.process.pid) != os.getpgid(0) for worker in echoes.workers if worker.process)


def test_the_store_of_local_ranks_listens_on_the_loopback_alone(echoes: Workers) -> None:
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    addresses = {
        row[1] for row in listening if row[3] == "0A" and int(row[1].partition(":")[2], 16) == echoes.store.port
    }
    assert addresses == {f"0100007F:{echoes.store.port:04X}"}


def test_messages_keep_their_borders_and_a_killed_peer_is_noticed() -> None:
    ours, theirs = (Channel(end, "the other end") for end in socket.socketpair())
    sizes = [0, 1, 70_000, 3]
    threading.Thread(target=lambda: [ours.send(b"m" * size) for size in sizes] and ours.close()).start()
    found: list[int] = []
    while not theirs.is_closed:
        found += [len(message) for message in theirs.read()]
    assert found == sizes
    with pytest.raises(ParallelError, match="the other end has ended"):
        theirs.send(b"x" * 10_000_000)
    theirs.close()


def test_an_inbox_hands_out_what_came_and_ends_with_its_peer() -> None:
    ours, theirs = (Channel(end, "the other end") for end in socket.socketpair())
    inbox = Inbox(theirs, exit_after_s=None)
    assert inbox.take() == []
    ours.send(b"a")
    assert inbox.take(10.0) == [b"a"]
    ours.close()
    inbox.take(10.0)
    assert inbox.is_closed
    inbox.close()


def test_an_outbox_waits_for_no_reader_and_loses_nothing() -> None:
    ours, theirs = (Channel(end, "the other end") for end in socket.socketpair())
    theirs._socket.settimeout(0.05)  # a minute elsewhere
    inbox, outbox = Inbox(theirs, exit_after_s=None), Outbox(theirs)
    sent = [bytes([number]) * 100_000 for number in range(50)]
    for message in sent:  # more than the sockets hold, and nobody reads
        outbox.send(message)
    outbox._thread.join(0.3)
    assert outbox._thread.is_alive()
    found: list[bytes] = []
    closing = threading.Thread(target=outbox.close)
    closing.start()
    while len(found) < len(sent):
        found += ours.read()
    assert found == sent
    closing.join(10)
    assert not closing.is_alive()
    ours.close()
    inbox.close()


def test_an_outbox_ends_with_its_reader() -> None:
    ours, theirs = (Channel(end, "the other end") for end in socket.socketpair())
    inbox, outbox = Inbox(theirs, exit_after_s=None), Outbox(theirs)
    outbox.send(b"m" * 10_000_000)
    ours.close()
    outbox.close()
    inbox.close()
    outbox._thread.join(10)
    with pytest.raises(ParallelError, match="the other end has ended"):
        outbox.send(b"m")


@pytest.mark.bad_input
def test_bytes_that_are_no_message_are_refused() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"\xff" * 16)
    with ours, pytest.raises(ParallelError, match="announces a message of 18446744073709551615 bytes"):
        Channel(theirs, "the other end").read()
