"""`Watch`: every rank gives signs of life; a collective that does not end names the rank it waits for.

    main thread      enter ─ collective ─ leave ─ compute ─ enter ─ collective ...        counts, no messages
    watch thread     publish sign ........... publish sign ........... publish sign       every `beat_s`, to a TCPStore
    in trouble       a wait longer than `suspect_s` reads the signs of all ranks and ends
                       at once         where one has failed or ended
                       at the deadline otherwise; a rank whose beat stands still is stopped, dead or cut off

Reading costs nothing while all is well. The store lives outside the ranks (torchrun's agent, the parent of local
workers), so that it outlives them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store, Work  # torch.distributed has both, and exports neither to type checkers

from deepinfer_core.config.checks import check_number
from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.signs import Culprit, Sign, decode_sign, encode_sign, find_culprits

__all__ = ["MIN_DEADLINE_S", "Entry", "Watch"]

MIN_DEADLINE_S = 1.0
_MAX_DEADLINE_S = 86_400.0
_BEAT_S = 0.25
_SUSPECT_S = 1.0
_SILENT_BEATS = 6  # publications missed before a rank counts as silent


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective that this rank has entered."""

    group: str
    number: int  # counted from 1, per group
    label: str
    step: int
    start_s: float


class Watch:
    """The signs of this rank and what it knows about the others'. `store` is shared by all `size` ranks.

    Construct it on every rank, then meet (the world's first barrier) before any collective is entered.
    `on_failure` is called once, from the thread that found a failure of work on a device; it may end that work.
    """

    def __init__(
        self, store: Store, rank: int, size: int, deadline_s: float, on_failure: Callable[[], None] | None = None
    ) -> None:
        self.deadline_s = check_number(
            "collective_deadline_s", deadline_s, MIN_DEADLINE_S, _MAX_DEADLINE_S, ParallelError
        )
        self.slice_s = _BEAT_S
        self.rank, self.size = rank, size
        self._store = store
        self._host, self._process_id = socket.gethostname(), os.getpid()
        self._on_failure = on_failure
        self._groups: dict[str, tuple[int, ...]] = {}
        self._background: set[str] = set()
        self._entered: dict[str, int] = {}
        self._inside: str | None = None
        self._label = ""
        self._step = 0
        self._beat = 0
        self._failure: ParallelError | None = None
        self._ended = False
        self._followed: deque[tuple[Entry, Work]] = deque()
        self._last_beat: dict[int, tuple[int, float]] = {}  # rank -> its newest beat, when it was first seen here
        self._publishing = threading.Lock()
        self._stop = threading.Event()
        self.publish()
        self._thread = threading.Thread(target=self._run, name="deepinfer-watch", daemon=True)
        self._thread.start()

    # ---- what the rank does ------------------------------------------------------------------------------------------

    def register(self, group: str, ranks: Sequence[int], *, in_background: bool = False) -> None:
        """Make a group known, also one that this rank is no member of: chains of waiting cross groups. What waits in
        the background holds no step up.
        """
        self._groups[group] = tuple(ranks)
        if in_background:
            self._background.add(group)
        self._entered[group] = 0

    def begin_step(self, step: int) -> None:
        """The step that errors and signs name from here on."""
        self._step = step

    def enter(self, group: str, label: str) -> Entry:
        """Before a collective. Raises the failure of an earlier one."""
        if self._failure is not None:
            raise ParallelError(f"{label} cannot run after a failure: {self._failure}", self._failure.late_ranks)
        self._entered[group] += 1
        if group not in self._background:
            self._inside, self._label = group, label
        return Entry(group, self._entered[group], label, self._step, time.monotonic())

    def leave(self, entry: Entry) -> None:
        """After a collective that ended."""
        if entry.group not in self._background:
            self._inside = None

    def follow(self, entry: Entry, work: Work) -> None:
        """A collective queued on a device: the watch thread sees to its end."""
        self._inside = None
        self._followed.append((entry, work))

    def fail(self, reason: str, late_ranks: Sequence[int] = ()) -> None:
        """Tell the others that this rank cannot go on; `late_ranks`: whose fault it is, if another's."""
        if self._failure is None:
            self._failure = ParallelError(reason, tuple(late_ranks))
            self.publish()

    def close(self) -> None:
        """Tell the others that this rank has ended, and end the thread."""
        if not self._stop.is_set():
            self._ended = True
            self._stop.set()
            self._thread.join()
            self.publish()

    # ---- trouble -----------------------------------------------------------------------------------------------------

    def check(self, entry: Entry) -> None:
        """While a collective does not end: raises ParallelError once that is hopeless or over the deadline."""
        waited_s = time.monotonic() - entry.start_s
        if waited_s < min(_SUSPECT_S, self.deadline_s / 4):
            return
        culprits = self._culprits(entry)
        if waited_s >= self.deadline_s or any(culprit.is_certain for culprit in culprits):
            raise self._failed(entry, culprits, "")

    def broken(self, entry: Entry, error: Exception) -> ParallelError:
        """The error to raise where the transport reports one; takes a few beats to find out who is gone."""
        culprits: tuple[Culprit, ...] = ()
        for _ in range(2 * _SILENT_BEATS):
            culprits = tuple(c for c in self._culprits(entry) if c.is_certain or c.rank in self._silent())
            if culprits:
                break
            time.sleep(_BEAT_S)
        return self._failed(entry, culprits, str(error).partition(". ")[0] or type(error).__name__)

    def _failed(self, entry: Entry, culprits: tuple[Culprit, ...], transport: str) -> ParallelError:
        if culprits:
            cause = "; ".join(culprit.text for culprit in culprits)
        elif transport:
            cause = f"the transport failed: {transport}"
        else:
            cause = "every rank has entered, yet it does not end: sizes that differ between ranks, or the network"
        waited_s = time.monotonic() - entry.start_s
        message = (
            f"step {entry.step}, {entry.label} (collective {entry.number} of group {entry.group}) ended after "
            f"{waited_s:.1f} s of at most {self.deadline_s:g} s: {cause}"
        )
        self.fail(message, [culprit.rank for culprit in culprits])
        return ParallelError(message, tuple(culprit.rank for culprit in culprits))

    def _culprits(self, entry: Entry) -> tuple[Culprit, ...]:
        signs = self.read_signs()
        return find_culprits(signs, self._silent(), self._groups, entry.group, entry.number, self.rank)

    def read_signs(self) -> dict[int, Sign]:
        """The newest sign of every rank. Raises ParallelError where the store does not answer."""
        try:
            found = self._store.multi_get([str(rank) for rank in range(self.size)])
        except RuntimeError as error:
            raise ParallelError(
                "the process that keeps the ranks' signs of life does not answer: it ended, was stopped or is cut off"
            ) from error
        signs = {rank: decode_sign(bytes(data)) for rank, data in enumerate(found)}
        now_s = time.monotonic()
        for rank, sign in signs.items():
            if rank not in self._last_beat or self._last_beat[rank][0] != sign.beat:
                self._last_beat[rank] = (sign.beat, now_s)
        return signs

    def _silent(self) -> dict[int, float]:
        """Seconds without a new sign, of the ranks that have missed several."""
        now_s = time.monotonic()
        waits = {rank: now_s - seen_s for rank, (_, seen_s) in self._last_beat.items() if rank != self.rank}
        return {rank: wait_s for rank, wait_s in waits.items() if wait_s > _SILENT_BEATS * _BEAT_S}

    # ---- the thread --------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Give a sign now."""
        failure = self._failure
        with self._publishing:
            self._beat += 1
            sign = Sign(
                rank=self.rank,
                host=self._host,
                process_id=self._process_id,
                beat=self._beat,
                step=self._step,
                state="failed" if failure is not None else "ended" if self._ended else "running",
                entered=dict(self._entered),
                inside=self._inside,
                label=self._label,
                blames=() if failure is None else failure.late_ranks,
                reason="" if failure is None else str(failure),
            )
            self._store.set(str(self.rank), encode_sign(sign))

    def _run(self) -> None:
        while not self._stop.wait(_BEAT_S):
            try:
                self.publish()
                self._check_followed()
            except RuntimeError as error:  # the store is gone: those who wait for this rank will notice
                self._failure = self._failure or ParallelError(f"the store of signs is gone: {error}")
                return

    def _check_followed(self) -> None:
        while self._followed:
            entry, work = self._followed[0]
            try:
                if work.is_completed():
                    self._followed.popleft()
                    continue
                self.check(entry)
            except ParallelError:
                self._give_up()
            except RuntimeError as error:
                self.broken(entry, error)
                self._give_up()
            return

    def _give_up(self) -> None:
        self._followed.clear()
        if self._on_failure is not None:
            self._on_failure()
