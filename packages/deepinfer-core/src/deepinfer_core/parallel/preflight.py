"""Before anything is loaded: every rank says what it is and has, and every difference that matters is named.

    rank r   report ─► store ◄─ reports of all     missing, versions, settings, checkpoint, devices, memory
             connect to a port of every other rank  firewalls, addresses that only their own host knows

All ranks read the same reports and come to the same verdict, in seconds: a rank that has not reported by the deadline
is named, and so are those that have.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch._C._distributed_c10d import Store  # not exported to type checkers by the public name

from deepinfer_core import __version__
from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.launch import Rendezvous, own_address

__all__ = ["RankReport", "find_problems", "local_report", "meet"]

_POLL_S = 0.1
_CONNECT_S = 3.0
_MAX_NAMED = 8


class RankReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank says before it loads."""

    rank: int
    world_size: int
    host: str
    process_id: int
    device: str  # "cpu", or "cuda:3" and what is the device's alone
    device_name: str
    versions: dict[str, str]  # what must be the same everywhere, by name
    settings: str  # hash of the engine's settings
    fingerprint: str  # of the weights
    free_bytes: int  # of the device's memory
    needed_bytes: int  # of this rank's weights and smallest cache
    address: str = ""  # where this rank can be reached by the others
    port: int = 0

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.rank} on {self.host}"


def local_report(
    meeting: Rendezvous,
    device: torch.device,
    *,
    settings: str,
    fingerprint: str,
    free_bytes: int,
    needed_bytes: int,
) -> RankReport:
    """The report of this process."""
    name, device_id = platform.machine(), str(device)
    if device.type == "cuda":  # its number may be another in every process
        properties = torch.cuda.get_device_properties(device)
        name, device_id = properties.name, f"{device} {properties.uuid}"
    return RankReport(
        rank=meeting.rank,
        world_size=meeting.world_size,
        host=socket.gethostname(),
        process_id=os.getpid(),
        device=device_id,
        device_name=name,
        versions={
            "deepinfer-core": __version__,
            "torch": str(torch.__version__),
            "Python": platform.python_version(),
        },
        settings=settings,
        fingerprint=fingerprint,
        free_bytes=free_bytes,
        needed_bytes=needed_bytes,
    )


def meet(store: Store, report: RankReport, meeting: Rendezvous, deadline_s: float) -> list[RankReport]:
    """Exchange reports and try every connection; the reports of all ranks, by rank.

    Raises ParallelError that names every missing rank, difference, shortage and connection that failed.
    """
    address = own_address(meeting)
    with _Listener(address) as listener:
        report = msgspec.structs.replace(report, address=address, port=listener.port)
        store.set(f"preflight/report/{report.rank}", msgspec.json.encode(report).decode())
        reports = _collect(store, "report", report.world_size, deadline_s, RankReport)
        problems = find_problems(reports)
        if not problems:
            unreachable = _connect_to_all(report, reports)
            store.set(f"preflight/connections/{report.rank}", msgspec.json.encode(unreachable).decode())
            verdicts = _collect(store, "connections", report.world_size, deadline_s, list[str])
            problems = [problem for verdict in verdicts for problem in verdict]
    if problems:
        more = f"\n- and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        listed = "".join(f"\n- {problem}" for problem in problems[:_MAX_NAMED])
        raise ParallelError(f"the ranks cannot work together:{listed}{more}")
    return reports


def find_problems(reports: Sequence[RankReport]) -> list[str]:
    """One sentence for everything in the reports that keeps these ranks from working together. Pure."""
    return [
        *_difference(
            {r.name: str(r.world_size) for r in reports}, "number of ranks", "start all with the same command"
        ),
        *(
            problem
            for name in reports[0].versions
            for problem in _difference(
                {r.name: r.versions.get(name, "not known") for r in reports},
                f"version of {name}",
                "install the same everywhere",
            )
        ),
        *_difference({r.name: r.settings for r in reports}, "settings", "give every rank the same"),
        *_difference({r.name: r.fingerprint for r in reports}, "weights", "copy one checkpoint to all hosts"),
        *_difference({r.name: r.device_name for r in reports}, "kind of device", "ranks must be alike"),
        *_shared_devices(reports),
        *_shortages(reports),
    ]


def _difference(values: Mapping[str, str], what: str, way_out: str) -> list[str]:
    """The ranks that differ from the majority; of two equal halves, from rank 0's."""
    counted = Counter(values.values())
    usual, _ = counted.most_common(1)[0]  # the first met of those that are equally common
    odd = {name: value for name, value in values.items() if value != usual}
    return [f"{name} has another {what}: {value}, the others {usual}; {way_out}" for name, value in odd.items()]


def _shared_devices(reports: Sequence[RankReport]) -> list[str]:
    owner: dict[tuple[str, str], RankReport] = {}
    problems: list[str] = []
    for report in reports:
        if report.device == "cpu":
            continue
        other = owner.setdefault((report.host, report.device), report)
        if other is not report:
            problems.append(
                f"{report.name} and rank {other.rank} both take {report.device}: start one rank a device "
                "(--nproc-per-node)"
            )
    return problems


def _shortages(reports: Sequence[RankReport]) -> list[str]:
    """Ranks on one host's CPU share its memory; every other device has its own."""
    sharing: dict[tuple[str, str], list[RankReport]] = {}
    for report in reports:
        sharing.setdefault((report.host, report.device), []).append(report)
    problems: list[str] = []
    for (host, device), together in sharing.items():
        free, needed = min(r.free_bytes for r in together), sum(r.needed_bytes for r in together)
        if free < needed:
            who = together[0].name if len(together) == 1 else f"{_ranks([r.rank for r in together])} on {host}"
            problems.append(
                f"{who}: {free / 2**30:.2f} GiB are free on {device} and {needed / 2**30:.2f} GiB are needed; free "
                "some, spread the experts over more ranks, or give the cache less"
            )
    return problems


def _collect[T](store: Store, kind: str, size: int, deadline_s: float, shape: type[T]) -> list[T]:
    """What all ranks have put down. Raises ParallelError that names those who have not by the deadline."""
    end_s = time.monotonic() + deadline_s
    keys = [f"preflight/{kind}/{rank}" for rank in range(size)]
    waiting = keys
    while waiting := [key for key in waiting if not store.check([key])]:
        if time.monotonic() > end_s:
            missing = {int(key.rpartition("/")[2]) for key in waiting}
            present = [rank for rank in range(size) if rank not in missing]
            raise ParallelError(
                f"{_ranks(sorted(missing))} of {size} did not appear within {deadline_s:g} s ({_ranks(present)} did); "
                "look at the output of the launcher on their hosts",
                tuple(sorted(missing)),
            )
        time.sleep(_POLL_S)
    try:
        return [msgspec.json.decode(bytes(data), type=shape) for data in store.multi_get(keys)]
    except msgspec.DecodeError as error:
        raise ParallelError(f"a rank's {kind} cannot be read, it runs another version: {error}") from error


def _ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:_MAX_NAMED])) + (" .." if len(ranks) > _MAX_NAMED else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


# ---- connections -----------------------------------------------------------------------------------------------------


class _Listener:
    """Accepts and closes connections at a free port of one address, in a thread, while the `with` lasts."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), backlog=4096)
        self._socket.settimeout(_POLL_S)
        self.port = int(self._socket.getsockname()[1])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deepinfer-preflight", daemon=True)

    def __enter__(self) -> _Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(OSError):  # nobody came, or left again at once
                self._socket.accept()[0].close()


def _connect_to_all(report: RankReport, reports: Sequence[RankReport]) -> list[str]:
    problems: list[str] = []
    for other in reports:
        if other.rank == report.rank:
            continue
        try:
            socket.create_connection((other.address, other.port), _CONNECT_S).close()
        except OSError as error:
            problems.append(
                f"{report.name} cannot reach {other.name} at {other.address} port {other.port} ({error}): open the "
                "ports between these hosts, or choose the interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
            )
    return problems
