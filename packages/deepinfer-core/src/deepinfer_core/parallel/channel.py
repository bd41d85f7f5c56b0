"""`Channel`: whole messages between a front end and a rank, over one connected socket; bytes in, bytes out.

    | length, 8 bytes little endian | message |    a message is at most 1 GiB; what it says is the caller's affair

A closed channel is how both sides learn that the other has ended, however it ended: the kernel closes the sockets of a
killed process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from queue import SimpleQueue

from deepinfer_core.errors import ParallelError

__all__ = ["Channel", "Inbox", "Outbox"]

_LENGTH = struct.Struct("<Q")
_MAX_MESSAGE_BYTES = 1 << 30
_READ_BYTES = 1 << 20
_SEND_TIMEOUT_S = 60.0
_LOOK_S = 0.1


class Channel:
    """One end; `peer` names the other one in errors. Sending is safe from several threads, receiving from one."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = connected
        self._socket.settimeout(_SEND_TIMEOUT_S)
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self.is_closed = False

    @classmethod
    def from_descriptor(cls, descriptor: int, peer: str) -> Channel:
        """The end that a parent process has handed down."""
        return cls(socket.socket(fileno=descriptor), peer)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: bytes, *, is_patient: bool = False) -> None:
        """Raises ParallelError if the other side has ended or, unless `is_patient`, reads nothing for a minute."""
        if len(message) > _MAX_MESSAGE_BYTES:
            raise ParallelError(f"a message of {len(message)} bytes; at most {_MAX_MESSAGE_BYTES} can be sent")
        left = memoryview(_LENGTH.pack(len(message)) + message)
        try:
            with self._sending:
                while left:
                    try:
                        left = left[self._socket.send(left) :]
                    except TimeoutError as error:
                        if not is_patient:
                            raise ParallelError(
                                f"{self.peer} has read nothing for {_SEND_TIMEOUT_S:g} s: is it stopped?"
                            ) from error
        except OSError as error:
            raise ParallelError(f"{self.peer} has ended") from error

    def read(self) -> list[bytes]:
        """Whole messages that are there, after waiting for at least some bytes; sets `is_closed` at the end.

        Raises ParallelError for what is no message.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            return []
        except OSError:  # reset by a peer that was killed with bytes unread
            data = b""
        if not data:
            self.is_closed = True
            return []
        self._buffer += data
        messages: list[bytes] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > _MAX_MESSAGE_BYTES:
                raise ParallelError(f"{self.peer} announces a message of {length} bytes; that is no message of ours")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return messages

    def drain(self, until_s: float) -> None:
        """Read and forget until the other side has ended, at most until the monotonic clock says `until_s`."""
        while not self.is_closed and (left_s := until_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            self.read()

    def end_sending(self) -> None:
        """The other side sees the end, and can still send."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Nothing is sent or read any more, also not by a thread that waits in `read`. The other side sees the end
        after it has read what was sent.
        """
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End, and give the socket back."""
        self.end()
        self.is_closed = True
        self._socket.close()


class Inbox:
    """Messages of a rank's front end, read by a thread, so that its end is noticed in the middle of a step.

    `exit_after_s`: when the front end is gone and the process still runs that much later, the thread ends it: a rank
    that is stuck on a device or in a collective must not outlive its parent. None = never.
    """

    def __init__(self, channel: Channel, exit_after_s: float | None = 10.0) -> None:
        self.channel = channel
        self._exit_after_s = exit_after_s
        self._messages: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deepinfer-inbox", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether the front end is gone; messages that it sent before may still be here."""
        return self.channel.is_closed

    def take(self, timeout_s: float = 0.0) -> list[bytes]:
        """All messages that are here; waits up to `timeout_s` for the first, or for the end of the front end."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._messages) or self.is_closed, timeout_s)
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def close(self) -> None:
        """This rank ends by itself: nothing needs to end it."""
        self._ended.set()
        self.channel.end()
        self._thread.join()
        self.channel.close()

    def _run(self) -> None:
        while not self.channel.is_closed:
            messages = self.channel.read()
            with self._changed:
                self._messages.extend(messages)
                self._changed.notify_all()
        if self._exit_after_s is not None and not self._ended.wait(self._exit_after_s):
            os._exit(70)  # EX_SOFTWARE; nothing above this frame can be trusted to return


class Outbox:
    """Messages to a front end that may read them whenever it likes: a thread sends them, in order. A rank that waited
    for a reader would keep all ranks waiting. What waits here is no more than the open requests can say.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: SimpleQueue[bytes | None] = SimpleQueue()
        self._failure: ParallelError | None = None
        self._thread = threading.Thread(target=self._run, name="deepinfer-outbox", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Returns at once. Raises ParallelError if an earlier message could not be sent."""
        if self._failure is not None:
            raise self._failure
        self._waiting.put(message)

    def close(self) -> None:
        """Returns when everything has been sent, or the other side (as `Inbox` notices) has ended."""
        self._waiting.put(None)
        while self._thread.is_alive() and not self._channel.is_closed:
            self._thread.join(_LOOK_S)

    def _run(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                self._channel.send(message, is_patient=True)
        except ParallelError as error:
            self._failure = error
