"""`Workers`: rank processes as their front end sees them: start, talk, notice death, stop, leave nothing behind.

    parent                                   rank r: python -m MODULE --channel FD
    ├─ store (TCP on the loopback)  ◄──────  RANK, WORLD_SIZE, .. as torchrun sets them
    ├─ channel r (socket pair)      ◄─────►  messages; its end tells each side that the other is gone
    └─ log thread r                 ◄──────  stdout and stderr, line by line, "[rank r] " before each

Ranks start as fresh interpreters (nothing is forked) in sessions of their own: Ctrl-C reaches the parent alone, which
then decides. A parent that is killed closes the channels, and the ranks end by themselves (`channel.Inbox`). Ranks that
a launcher has started are talked to in the same way (`parallel/launched.py`).
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from torch._C._distributed_c10d import TCPStore  # not exported to type checkers by the public name

from deepinfer_core.config.env import worker_environment
from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.channel import Channel
from deepinfer_core.parallel.launch import LOOPBACK, Rendezvous, serve_store

__all__ = ["Worker", "Workers", "start_worker"]

_TAIL_LINES = 12
_REAP_S = 2.0


@dataclass(eq=False)
class Worker:
    """One rank: the channel to it, and of a process of ours its last lines; `process` None = a launcher's."""

    rank: int
    channel: Channel
    process: subprocess.Popen[bytes] | None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))

    def death(self) -> str | None:
        """How it ended, with its last words; None while it runs."""
        if self.process is None:
            ended = self.channel.is_closed
            return f"{self.channel.peer} has ended; the launcher's output there says why" if ended else None
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
    """The ranks 0, 1, .. of one engine. They are stopped with this object and when the interpreter exits."""

    def __init__(self, workers: Sequence[Worker], store: TCPStore, on_stop: Callable[[], None] | None = None) -> None:
        """`on_stop`: a launcher's own way to end what is left."""
        self.workers = list(workers)
        self.store = store  # kept alive for the ranks where this process serves it
        self._ended: list[Worker] = []  # seen, not yet reported by `receive`
        self._stop = weakref.finalize(self, _stop, self.workers, 0.0, on_stop)
        self._selector = selectors.DefaultSelector()
        for worker in self.workers:
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    @classmethod
    def local(
        cls,
        module: str,
        num_ranks: int,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        *,
        show_output: bool = True,
    ) -> Workers:
        """Start `python -m module --channel FD arguments` for each rank on this machine, the `variables` set.

        Raises ParallelError if one cannot be started.
        """
        store = serve_store()
        workers: list[Worker] = []
        for rank in range(num_ranks):
            meeting = Rendezvous(rank, num_ranks, rank, num_ranks, LOOPBACK, store.port)
            try:
                workers.append(start_worker(module, meeting, arguments, variables or {}, show_output=show_output))
            except ParallelError:
                _stop(workers, 0.0)
                raise
        return cls(workers, store)

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
        dead = [worker for worker in self.workers if worker.death() is not None]
        if dead:
            raise ParallelError(self._describe_end(dead), tuple(worker.rank for worker in dead))

    def stop(self, timeout_s: float = 10.0) -> None:
        """Close the channels, which asks the ranks to end; those that still run after `timeout_s` are killed."""
        self._selector.close()
        if (arguments := self._stop.detach()) is not None:
            _, _, (workers, _, on_stop), _ = arguments
            _stop(workers, timeout_s, on_stop)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(10.0 if error is None else 0.0)

    def _describe_end(self, ended: Sequence[Worker]) -> str:
        """The one that died first is often followed by others; all that are known are named."""
        for worker in ended:
            if worker.process is not None:  # its channel is closed: it is at its end
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(_REAP_S)
        return "\n".join(worker.death() or f"rank {worker.rank} has closed its channel" for worker in ended)


def start_worker(
    module: str, meeting: Rendezvous, arguments: Sequence[str], variables: Mapping[str, str], *, show_output: bool
) -> Worker:
    """One rank as a child of this process. Raises ParallelError if it cannot be started."""
    ours, theirs = socket.socketpair()
    threads = max(1, (os.cpu_count() or 1) // meeting.local_world_size)
    alone = meeting.local_world_size == meeting.world_size
    defaults = {"OMP_NUM_THREADS": str(threads), "PYTHONFAULTHANDLER": "1"}
    if alone:  # nothing leaves this machine
        defaults["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    flags = ["-P", *["-O"] * sys.flags.optimize]  # -P: no module of the working folder is imported
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *flags, "-m", module, "--channel", str(theirs.fileno()), *arguments],
                env=worker_environment({**meeting.variables(), **variables, "PYTHONUNBUFFERED": "1"}, defaults),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        ours.close()
        raise ParallelError(f"the process of rank {meeting.rank} cannot be started: {error}") from error
    worker = Worker(meeting.rank, Channel(ours, f"rank {meeting.rank} (process {process.pid})"), process)
    threading.Thread(
        target=_copy_output, args=(worker, process, show_output), name=f"deepinfer-log-{meeting.rank}", daemon=True
    ).start()
    return worker


def _copy_output(worker: Worker, process: subprocess.Popen[bytes], show: bool) -> None:
    if process.stdout is None:
        return
    with process.stdout as stream, contextlib.suppress(ValueError, OSError):
        for line in stream:
            text = line.decode(errors="replace").rstrip()
            worker.tail.append(text)
            if show and text:
                print(f"[rank {worker.rank}] {text}", file=sys.stderr, flush=True)


def _stop(workers: Sequence[Worker], timeout_s: float, on_stop: Callable[[], None] | None = None) -> None:
    """Ask, then kill; returns when all processes of ours have ended."""
    for worker in workers:
        worker.channel.end_sending()
    deadline_s = time.monotonic() + timeout_s
    processes = [worker.process for worker in workers if worker.process is not None]
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - time.monotonic()))
    for worker in workers:
        if worker.process is None:
            worker.channel.drain(deadline_s)  # a launcher's: its end is the end of the channel
        worker.channel.close()
    for process in processes:
        if process.poll() is None:
            process.kill()  # also ends one that is stopped
    for process in processes:
        process.wait()
    if on_stop is not None:
        on_stop()
