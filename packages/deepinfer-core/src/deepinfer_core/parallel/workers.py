"""`Workers`: local rank processes with the life cycle of their parent: start, talk, notice death, stop, leave nothing.

    parent                                   rank r: python -m MODULE --channel FD
    ├─ store (TCP on the loopback)  ◄──────  RANK, WORLD_SIZE, .. as torchrun sets them
    ├─ channel r (socket pair)      ◄─────►  messages; its end tells each side that the other is gone
    └─ log thread r                 ◄──────  stdout and stderr, line by line, "[rank r] " before each

Ranks start as fresh interpreters (nothing is forked) in sessions of their own: Ctrl-C reaches the parent alone, which
then decides. A parent that is killed closes the channels, and the ranks end by themselves (`channel.Inbox`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from deepinfer_core.config.env import worker_environment
from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.channel import Channel
from deepinfer_core.parallel.launch import LOOPBACK, Rendezvous, serve_store

__all__ = ["Worker", "Workers"]

_TAIL_LINES = 12
_REAP_S = 2.0


@dataclass(eq=False)
class Worker:
    """One rank's process, the channel to it and the last lines it wrote."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))

    def death(self) -> str | None:
        """How it ended, with its last words; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        if code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        else:
            how = f"ended with exit status {code}"
        words = f"; its last lines:\n  {chr(10).join(self.tail).replace(chr(10), chr(10) + '  ')}" if self.tail else ""
        return f"rank {self.rank} (process {self.process.pid}) {how}{words}"


class Workers:
    """Ranks 0 .. num_ranks - 1 on this machine. `module` is run by each with `--channel FD` and `arguments`.

    They are stopped with this object and when the interpreter exits. Raises ParallelError if one cannot be started.
    """

    def __init__(
        self,
        module: str,
        num_ranks: int,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        *,
        show_output: bool = True,
    ) -> None:
        self.store = serve_store()
        self._show_output = show_output
        self.workers: list[Worker] = []
        self._ended: list[Worker] = []  # seen, not yet reported by `receive`
        self._finalizer = weakref.finalize(self, _stop, self.workers, 0.0)
        self._selector = selectors.DefaultSelector()
        for rank in range(num_ranks):
            meeting = Rendezvous(rank, num_ranks, rank, num_ranks, LOOPBACK, self.store.port)
            try:
                worker = _start(module, meeting, arguments, variables or {})
            except OSError as error:
                self.stop(0.0)
                raise ParallelError(f"the process of rank {rank} cannot be started: {error}") from error
            self.workers.append(worker)
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)
            threading.Thread(
                target=_copy_output, args=(worker, show_output), name=f"deepinfer-log-{rank}", daemon=True
            ).start()

    def __len__(self) -> int:
        return len(self.workers)

    def send(self, rank: int, message: bytes) -> None:
        """To one rank. Raises ParallelError, with its last words, if it has ended."""
        worker = self.workers[rank]
        try:
            worker.channel.send(message)
        except ParallelError:
            self.check()
            raise

    def send_all(self, message: bytes) -> None:
        """To every rank."""
        for rank in range(len(self.workers)):
            self.send(rank, message)

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """(rank, message) of whoever has sent something, waiting up to `timeout_s` for the first.

        Raises ParallelError, once, when a rank has ended; what it sent before is returned first.
        """
        found: list[tuple[int, bytes]] = []
        deadline_s = time.monotonic() + timeout_s
        while not found:
            if self._ended:
                ended, self._ended = self._ended, []
                raise ParallelError(self._describe_end(ended), tuple(worker.rank for worker in ended))
            if not self._selector.get_map():
                raise ParallelError("every rank has ended")
            for key, _ in self._selector.select(max(0.0, deadline_s - time.monotonic())):
                worker: Worker = key.data
                found += [(worker.rank, message) for message in worker.channel.read()]
                if worker.channel.is_closed:
                    self._selector.unregister(worker.channel)
                    self._ended.append(worker)
            if not self._ended and time.monotonic() >= deadline_s:
                break
        return found

    def check(self) -> None:
        """Raises ParallelError if a rank has ended."""
        dead = [worker for worker in self.workers if worker.process.poll() is not None]
        if dead:
            raise ParallelError(self._describe_end(dead), tuple(worker.rank for worker in dead))

    def stop(self, timeout_s: float = 10.0) -> None:
        """Close the channels, which asks the ranks to end; those that still run after `timeout_s` are killed."""
        self._selector.close()
        _stop(self.workers, timeout_s)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(10.0 if error is None else 0.0)

    def _describe_end(self, ended: Sequence[Worker]) -> str:
        """The one that died first is often followed by others; all that are known are named."""
        for worker in ended:  # its channel is closed: the process is at its end
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_REAP_S)
        return "\n".join(worker.death() or f"rank {worker.rank} has closed its channel" for worker in ended)


def _start(module: str, meeting: Rendezvous, arguments: Sequence[str], variables: Mapping[str, str]) -> Worker:
    ours, theirs = socket.socketpair()
    threads = max(1, (os.cpu_count() or 1) // meeting.local_world_size)
    environment = worker_environment(
        {**meeting.variables(), **variables, "PYTHONUNBUFFERED": "1"},
        {
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "PYTHONFAULTHANDLER": "1",
        },
    )
    flags = ["-P", *["-O"] * sys.flags.optimize]  # -P: no module of the working folder is imported
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *flags, "-m", module, "--channel", str(theirs.fileno()), *arguments],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Worker(meeting.rank, process, Channel(ours, f"rank {meeting.rank} (process {process.pid})"))


def _copy_output(worker: Worker, show: bool) -> None:
    stream = worker.process.stdout
    if stream is None:
        return
    with stream, contextlib.suppress(ValueError, OSError):
        for line in stream:
            text = line.decode(errors="replace").rstrip()
            worker.tail.append(text)
            if show and text:
                print(f"[rank {worker.rank}] {text}", file=sys.stderr, flush=True)


def _stop(workers: list[Worker], timeout_s: float) -> None:
    """Ask, then kill; returns when all have ended."""
    for worker in workers:
        worker.channel.close()
    deadline_s = time.monotonic() + timeout_s
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline_s - time.monotonic()))
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.kill()  # also ends one that is stopped
    for worker in workers:
        worker.process.wait()
