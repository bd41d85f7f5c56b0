"""Before loading, whatever keeps ranks from working together is named: by rank and host, within seconds."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed import HashStore

from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.launch import Rendezvous, serve_store
from deepinfer_core.parallel.preflight import RankReport, find_problems, local_report, meet

GIB = 1 << 30


def report(rank: int, **fields: Any) -> RankReport:
    values: dict[str, Any] = {
        "world_size": 3,
        "host": f"host{rank}",
        "process_id": 1,
        "device": "cuda:0",
        "device_name": "H200",
        "versions": {"torch": "2.14.0", "deepinfer-core": "1.0"},
        "settings": "s",
        "fingerprint": "f",
        "free_bytes": 100 * GIB,
        "needed_bytes": 90 * GIB,
    }
    return RankReport(rank=rank, **(values | fields))


def with_third(**fields: Any) -> list[RankReport]:
    return [report(0), report(1), report(2, **fields)]


def test_ranks_that_agree_have_no_problems() -> None:
    assert find_problems([report(rank) for rank in range(3)]) == []


@pytest.mark.parametrize(
    ("reports", "problem"),
    [
        (
            with_third(versions={"torch": "2.11.0", "deepinfer-core": "1.0"}),
            "rank 2 on host2 has another version of torch",
        ),
        (with_third(versions={"torch": "2.14.0"}), "another version of deepinfer-core: not known, the others 1.0"),
        (with_third(fingerprint="g"), "rank 2 on host2 has another weights: g, the others f; copy one checkpoint"),
        (with_third(settings="t"), "rank 2 on host2 has another settings"),
        (with_third(world_size=4), "rank 2 on host2 has another number of ranks: 4, the others 3"),
        (with_third(device_name="B200"), "rank 2 on host2 has another kind of device: B200"),
        (with_third(free_bytes=80 * GIB), "rank 2 on host2: 80.00 GiB are free on cuda:0 and 90.00 GiB are needed"),
        (with_third(host="host1"), "rank 2 on host1 and rank 1 both take cuda:0"),
        ([report(0), report(1, fingerprint="g")], "rank 1 on host1 has another weights: g, the others f"),
    ],
)
def test_a_difference_is_named(reports: list[RankReport], problem: str) -> None:
    (found,) = (text for text in find_problems(reports) if problem in text)
    assert found


def test_ranks_on_one_cpu_share_its_memory() -> None:
    reports = [report(rank, host="h", device="cpu", free_bytes=100 * GIB, needed_bytes=40 * GIB) for rank in range(3)]
    assert find_problems(reports[:2]) == []
    (problem,) = find_problems(reports)
    assert "ranks 0, 1, 2 on h: 100.00 GiB are free on cpu and 120.00 GiB are needed" in problem


def meet_all(reports: Sequence[RankReport], deadline_s: float) -> list[Any]:
    """Each in a thread of its own; what each returns or raises."""
    store = HashStore()
    store.set_timeout(datetime.timedelta(seconds=10))
    found: list[Any] = [None] * len(reports)

    def run(index: int) -> None:
        one = reports[index]
        meeting = Rendezvous(one.rank, one.world_size, one.rank, one.world_size, "127.0.0.1", 1)
        try:
            found[index] = meet(store, one, meeting, deadline_s)
        except ParallelError as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(reports))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_that_meet_know_each_other() -> None:
    found = meet_all([report(rank) for rank in range(3)], 10.0)
    for reports in found:
        assert [one.rank for one in reports] == [0, 1, 2]
        assert all(one.port > 0 and one.address == "127.0.0.1" for one in reports)


def test_a_missing_rank_is_named_by_all_that_are_there() -> None:
    start_s = time.monotonic()
    for error in meet_all([report(0), report(2)], 1.0):
        assert isinstance(error, ParallelError)
        assert error.late_ranks == (1,)
        assert "rank 1 of 3 did not appear within 1 s (ranks 0, 2 did)" in str(error)
    assert time.monotonic() - start_s < 4.0


def test_all_ranks_come_to_the_same_verdict() -> None:
    errors = meet_all(with_third(fingerprint="g", free_bytes=GIB), 10.0)
    assert len({str(error) for error in errors}) == 1
    assert "another weights" in str(errors[0])
    assert "1.00 GiB are free" in str(errors[0])


def test_a_rank_that_cannot_be_reached_is_named() -> None:
    store = HashStore()
    other = report(1, world_size=2, address="127.0.0.1", port=1)  # nobody listens there
    store.set("preflight/report/1", msgspec.json.encode(other).decode())
    store.set("preflight/connections/1", "[]")
    with pytest.raises(ParallelError, match=r"rank 0 on host0 cannot reach rank 1 on host1 at 127\.0\.0\.1 port 1 "):
        meet(store, report(0, world_size=2), Rendezvous(0, 2, 0, 2, "127.0.0.1", 1), 5.0)


@pytest.mark.bad_input
def test_a_report_of_another_version_is_no_crash() -> None:
    store = HashStore()
    store.set("preflight/report/1", '{"rank": 1, "surprise": true}')
    with pytest.raises(ParallelError, match="a rank's report cannot be read, it runs another version"):
        meet(store, report(0, world_size=2), Rendezvous(0, 2, 0, 2, "127.0.0.1", 1), 5.0)


def test_the_report_of_this_process_is_about_it() -> None:
    meeting = Rendezvous(0, 1, 0, 1, "127.0.0.1", 1)
    mine = local_report(
        meeting, torch.device("cpu"), settings="s", fingerprint="f", free_bytes=2 * GIB, needed_bytes=GIB
    )
    assert mine.versions["torch"] == torch.__version__
    (reports,) = meet_all([mine], 5.0)
    assert [one.process_id for one in reports] == [mine.process_id]


def test_the_environment_of_a_launcher_becomes_a_rendezvous() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    meeting = Rendezvous.from_environment(variables | {"MASTER_PORT": "29500"})
    assert meeting == Rendezvous(3, 8, 1, 2, "a", 29500)
    assert Rendezvous.from_environment(meeting.variables()) == meeting
    first = Rendezvous.from_environment({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert first is not None
    assert first.serves_store  # nobody else does
    assert Rendezvous.from_environment({"MASTER_ADDR": "a", "LOCAL_RANK": "0"}) is None


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "RANK is '8' in the environment; it must be a number from 0 to 7"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0'"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE is '9'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR not set beside"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(changes: dict[str, str | None], message: str) -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "29500"} | changes
    with pytest.raises(ParallelError, match=message):
        Rendezvous.from_environment({name: text for name, text in variables.items() if text is not None})


@pytest.mark.bad_input
def test_a_store_that_nobody_serves_is_named() -> None:
    port = serve_store().port  # collected at once: the port is free again
    with pytest.raises(ParallelError, match=rf"rank 1: no store .* at 127\.0\.0\.1 port {port} within 1 s"):
        Rendezvous(1, 2, 1, 2, "127.0.0.1", port).connect(1.0)
