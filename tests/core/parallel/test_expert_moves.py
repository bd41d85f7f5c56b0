"""Experts move between ranks while requests run: no token changes, every record is checked, nothing stops silently."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_core.config.engine import ExpertBalanceConfig, flat_settings, resolve_settings
from deepinfer_core.errors import ParallelError
from deepinfer_core.outputs import CompletionOutput
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.expert_balancer import ExpertBalancer
from deepinfer_core.parallel.expert_moves import ExpertMover
from deepinfer_core.parallel.experts import SharedExperts
from deepinfer_core.parallel.placement_tables import placement_tables
from deepinfer_core.parallel.workers import Workers
from deepinfer_core.requests import AnswerBook
from deepinfer_core.runtime.front_end import FrontEnd
from deepinfer_core.runtime.rank_runner import RankRunner
from deepinfer_core.scheduling.expert_balance import BalanceDecision, BalancePolicy
from deepinfer_core.scheduling.expert_placement import ExpertTopology, Placement, plan
from tests.core.engine.traces import Job, Oracle
from tests.core.harness import FIXTURES
from tests.core.parallel.in_process import Meeting, ThreadCommunicator, on_ranks
from tests.core.parallel.restless_rank import RestlessPolicy
from tests.core.parallel.thread_ranks import ThreadRanks, front_end

MODEL = FIXTURES / "tiny-a"
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
SETTINGS: dict[str, Any] = {
    "max_model_len": 400,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 100,
    "num_blocks": 14,
    "draft_schedule": "fixed",
    "data_parallel_size": 2,
    "expert_parallel_size": 2,
    "num_extra_experts": 2,
    "expert_rearrangement_interval": 12,
    "expert_count_window": 6,
}


JOBS = [
    Job(document=i % 2, shared=(0, 140)[i % 2], own=5 + i, style=style, seed=i, max_tokens=30)
    for i, style in enumerate(["sampled", "greedy", "forked", "penalised", "sampled", "regex"])
]


def balancer_of(ranks: ThreadRanks, rank: int) -> ExpertBalancer:
    runner = ranks.engines[rank].runner
    assert isinstance(runner, RankRunner)
    assert runner.balancer is not None
    return runner.balancer


def answer(engine: FrontEnd, oracle: Oracle, jobs: Sequence[Job]) -> list[list[CompletionOutput]]:
    book = AnswerBook(engine.scheduler, engine.fingerprint)
    requests = [oracle.prepare(job) for job in jobs]
    for request in requests:
        book.submit(request)
    while book.all_numbers():
        book.distribute(engine.loop.step())
    return [request.output.outputs for request in requests]


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    made = Oracle(MODEL, 400)
    yield made
    made.close()


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FrontEnd, ThreadRanks]]:
    monkeypatch.setattr("deepinfer_core.runtime.rank_part.BalancePolicy", RestlessPolicy)
    with front_end(MODEL, **SETTINGS) as made:
        yield made


def test_tokens_do_not_change_while_experts_move(restless: tuple[FrontEnd, ThreadRanks], oracle: Oracle) -> None:
    engine, ranks = restless
    assert answer(engine, oracle, JOBS) == [oracle.answers(job, "compact") for job in JOBS]
    stats = [balancer_of(ranks, rank).statistics() for rank in range(2)]
    assert all(one["expert_windows"] == stats[0]["expert_windows"] for one in stats)
    assert int(str(stats[0]["expert_windows"])) >= 3
    assert all(int(str(one["experts_moved_here"])) >= 10 for one in stats)
    assert all(one["expert_records_damaged"] == one["expert_plans_late"] == 0 for one in stats)


@pytest.mark.slow
def test_tokens_do_not_change_while_experts_move_between_processes(oracle: Oracle) -> None:
    config = resolve_settings({"model": str(MODEL), "quiet": True} | SETTINGS, {}).config
    variables = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    ranks = Workers.local("restless_rank", 2, variables=variables, show_output=False)
    engine = FrontEnd.connect(config, ranks, range(2), flat_settings(config))
    try:
        assert answer(engine, oracle, JOBS) == [oracle.answers(job, "compact") for job in JOBS]
        stats: Any = engine.statistics()
        assert stats["rank_0"]["expert_plans_with_moves"] >= 2
        assert all(one["experts_moved_here"] >= 5 for one in stats.values())
        assert all(one["expert_records_damaged"] == 0 for one in stats.values())
    finally:
        engine.close()
    assert [worker.process.returncode for worker in ranks.workers if worker.process] == [0, 0]


# ---- the mover by itself: ranks as threads, weights that say which expert they are -----------------------------------

LAYERS, EXPERTS, SLOTS, RANKS = 3, 5, 8, 3


class Bench:
    """One rank's weights and balancer over `comm`; steps come from the test."""

    def __init__(self, comm: Communicator, policy: BalancePolicy | None = None, interval: int = 300) -> None:
        self.comm = comm
        self.placement = first_placement()
        start, stop = self.placement.slot_start[comm.rank : comm.rank + 2]
        self.weights = {
            layer: tuple(
                torch.stack([expert_tensor(layer, expert, width) for expert in row[start:stop]]) for width in (3, 4)
            )
            for layer, row in enumerate(self.placement.expert_of_slot)
        }
        topology = ExpertTopology(num_devices=RANKS)
        tables = placement_tables([self.placement], comm.device)
        self.exchange = SharedExperts(comm, tables, num_slots=4)
        settings = ExpertBalanceConfig(
            expert_rearrangement_interval=interval, expert_count_window=2, num_extra_experts=3
        )
        self.balancer = ExpertBalancer(
            self.exchange, comm, self.placement, self.weights, settings, policy or RestlessPolicy(topology, 4)
        )
        self.step = 0

    def steps(self, count: int, ids: torch.Tensor | None = None) -> None:
        """As the runner makes them: what is swapped is agreed, here over a meeting of the same threads."""
        for _ in range(count):
            staged = torch.tensor([-self.balancer.num_staged])
            agreed = -int(self.lockstep.all_reduce_max(staged, "notice"))
            self.balancer.begin_step(self.step, agreed)
            if ids is not None:
                for layer in range(LAYERS):
                    self.balancer.routed(layer, ids)
                    self.balancer.experts_begin(layer)
                    time.sleep(2e-5)  # what is measured here must be more than nothing
                    self.balancer.experts_end(layer)
            self.step += 1

    lockstep: Communicator


def first_placement() -> Placement:
    topology = ExpertTopology(num_devices=RANKS)
    return plan(np.ones((LAYERS, EXPERTS)), None, topology, SLOTS).placement


def expert_tensor(layer: int, expert: int, width: int) -> torch.Tensor:
    return torch.full((2, width), 100.0 * layer + expert, dtype=torch.bfloat16) + torch.arange(width)


def on_benches(work: Callable[[Bench], Any], **named: Any) -> list[Any]:
    """`work` on every rank; movers and steps have meetings of their own, as they have groups of their own."""
    steps = Meeting(RANKS)

    def run(comm: Communicator) -> Any:
        bench = Bench(comm, **named)
        bench.lockstep = ThreadCommunicator(steps, comm.rank)
        try:
            return work(bench)
        except BaseException:
            steps.leave()
            raise
        finally:
            bench.balancer.close()

    return on_ranks(RANKS, run)


def run_until_moved(bench: Bench, windows: int) -> None:
    """Steps until all ranks have swapped the layers of so many windows; slower ones while something is to be moved."""
    mover, first_end = bench.balancer.mover, bench.step
    while bench.lockstep.all_reduce_max(torch.tensor([-mover.num_swapped]), "end") > -windows * LAYERS:
        bench.steps(1, torch.tensor([[0, 1], [2, 3]]))
        assert bench.step < first_end + 5_000
        if bench.step > 300 * (mover.num_swapped // LAYERS + 1):
            time.sleep(0.002)


def test_every_slot_holds_the_expert_that_the_tables_send_to_it() -> None:
    def work(bench: Bench) -> list[list[float]]:
        run_until_moved(bench, windows=3)
        tables = bench.exchange.tables
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                positions = torch.arange(16)
                owner, local = tables[layer].locate(torch.full((16, 1), expert), torch.zeros(16).long(), positions)
                for slot in local[owner == bench.comm.rank].tolist():
                    for tensor, width in zip(bench.weights[layer], (3, 4), strict=True):
                        assert torch.equal(tensor[slot], expert_tensor(layer, expert, width))
        return [table.slots.tolist() for table in tables.values()]

    RestlessPolicy.num_decisions = 0
    found = on_benches(work)
    assert found[0] == found[1] == found[2]
    assert found[0] != [table.slots.tolist() for table in placement_tables([first_placement()], CPU).values()]


def test_counts_are_those_of_real_rows_of_all_ranks() -> None:
    loads: list[np.ndarray] = []

    class Recording(RestlessPolicy):
        def decide(self, load: np.ndarray, placement: Placement, **named: Any) -> BalanceDecision:
            loads.append(load)
            return super().decide(load, placement, **named)

    def work(bench: Bench) -> None:
        own = torch.full((bench.comm.rank + 1, 2), bench.comm.rank)
        bench.steps(301, own)  # the window is steps 298 and 299
        run_until_moved(bench, windows=1)

    on_benches(work, policy=Recording(ExpertTopology(num_devices=RANKS), 4))
    want = [2 * 2 * 1, 2 * 2 * 2, 2 * 2 * 3, 0, 0]  # steps x choices x rows
    assert loads[0].tolist() == [want] * LAYERS


def test_a_damaged_record_ends_the_plan_on_all_ranks_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ExpertMover._record

    def damaged(self: ExpertMover, layer: int, slot: int) -> torch.Tensor:
        data = record(self, layer, slot).clone()
        if layer == 1 and self._moves.rank == 1:
            data[0] ^= 1
        return data

    def work(bench: Bench) -> tuple[dict[str, Any], list[torch.Tensor]]:
        run_until_moved(bench, windows=1)
        return bench.balancer.statistics(), [bench.exchange.tables[layer].slots for layer in range(LAYERS)]

    monkeypatch.setattr(ExpertMover, "_record", damaged)
    RestlessPolicy.num_decisions = 0
    found = on_benches(work)
    assert [stats["expert_plans_given_up"] for stats, _ in found] == [1] * RANKS
    assert sum(stats["expert_records_damaged"] for stats, _ in found) >= 1
    for layer in range(LAYERS):
        assert all(torch.equal(found[0][1][layer], slots[layer]) for _, slots in found)
    old = placement_tables([first_placement()], CPU)
    assert torch.equal(found[0][1][1], old[1].slots)  # the layer whose records were damaged
    assert torch.equal(found[0][1][2], old[2].slots)  # and what would have followed


def test_weights_that_change_in_their_slot_stop_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    swap = ExpertBalancer._swap

    def clumsy(self: ExpertBalancer, staged: Any) -> None:
        if len(staged.slots) and self._exchange.comm.rank == 2:
            staged.weights[0][0, 0] ^= 1
        swap(self, staged)

    def work(bench: Bench) -> str:
        try:
            run_until_moved(bench, windows=4)
        except ParallelError as error:
            bench.comm.meeting.leave()  # type: ignore[attr-defined] # these are ThreadCommunicators
            bench.lockstep.meeting.leave()  # type: ignore[attr-defined] # likewise
            return str(error)
        return "no error"

    monkeypatch.setattr(ExpertBalancer, "_swap", clumsy)
    texts = on_benches(work)
    assert any(
        re.search(r"layer \d: local slot \d of rank 2 holds other bytes than the expert", text) for text in texts
    )


def test_a_plan_that_does_not_finish_is_reported_and_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """The mover of one rank is held; the steps go on, and so does the balancer after it."""
    gate = threading.Event()

    class Held(RestlessPolicy):
        def decide(self, load: np.ndarray, placement: Placement, **named: Any) -> BalanceDecision:
            gate.wait(30)
            return super().decide(load, placement, **named)

    def work(bench: Bench) -> dict[str, Any]:
        bench.steps(13, torch.tensor([[0, 1]]))  # windows end at steps 4, 8 and 12
        late = bench.balancer.statistics()["expert_plans_late"]
        assert late == 2
        gate.set()
        for _ in range(200):  # the window after those has time enough, if a machine is slow the one after that ..
            bench.steps(1, torch.tensor([[0, 1]]))
            time.sleep(0.01)
        return bench.balancer.statistics()

    with caplog.at_level(logging.WARNING):
        found = on_benches(work, policy=Held(ExpertTopology(num_devices=RANKS), 4), interval=4)
    assert (
        "step 8: the rearrangement of experts that began at step 4 is not done, 3 of 3 layers are left" in caplog.text
    )
    assert all(stats["expert_plans_given_up"] >= 1 for stats in found)
    assert all(stats["expert_plans_with_moves"] >= 2 for stats in found)


# ---- the policy ------------------------------------------------------------------------------------------------------


def test_a_gain_below_its_cost_moves_nothing() -> None:
    topology = ExpertTopology(num_devices=4)
    load = np.random.default_rng(1).zipf(1.6, (2, 16)).astype(np.float64)
    here = plan(np.ones((2, 16)), None, topology, 20).placement
    cheap = BalancePolicy(topology, 10_000).decide(load, here, layer_seconds=1e-3, move_seconds=1e-3)
    dear = BalancePolicy(topology, 10_000).decide(load, here, layer_seconds=1e-6, move_seconds=10.0)
    assert cheap.moves
    assert (cheap.after > cheap.before).all()
    assert not dear.moves
    assert np.array_equal(dear.placement.expert_of_slot, here.expert_of_slot)
    assert np.array_equal(dear.after, dear.before)


def test_promises_that_are_not_kept_are_trusted_less() -> None:
    topology, rng = ExpertTopology(num_devices=4), np.random.default_rng(2)
    here = plan(np.ones((1, 32)), None, topology, 36).placement
    kept, broken = BalancePolicy(topology, 10_000), BalancePolicy(topology, 10_000)
    cost = {"layer_seconds": 1e-2, "move_seconds": 1e-6}
    load = rng.zipf(1.5, (1, 32)).astype(np.float64)
    there = kept.decide(load, here, **cost).placement
    kept.decide(load, there, **cost)  # the load stayed: all that was promised came
    assert kept.lasting_share == 1.0
    there = broken.decide(load, here, **cost).placement
    worst = np.zeros((1, 32))
    worst[0, there.expert_of_slot[0, : there.slot_start[1]]] = 1.0  # all on the first device
    broken.decide(worst, there, **cost)
    assert broken.lasting_share == 0.5
