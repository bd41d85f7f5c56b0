"""What does it cost a layer that its experts lie on other ranks? Dispatch and combine alone, at the release's width.

    .venv/bin/python benchmarks/expert_exchange.py --output benchmarks/results/expert_exchange.json
    python3 benchmarks/expert_exchange.py --device cuda --ranks 2            one GPU a rank, NCCL

Every rank sends its rows to 384 experts, 6 a row, spread over all ranks, and takes the outputs back; the experts
themselves do nothing here. Beforehand it is checked that the exchange gives the bits of one process, with experts that
do compute, and that Engram rows come from their owners unchanged. Time is that of the slowest rank, the median of all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measuring import write_results

from deepinfer_core.checkpoint.engram_store import EngramTable
from deepinfer_core.checkpoint.sharding import share
from deepinfer_core.config.topology import Topology
from deepinfer_core.errors import ParallelError
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.parallel.channel import Channel
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.experts import LocalExperts, RowOrigin, SharedExperts
from deepinfer_core.parallel.launch import Rendezvous
from deepinfer_core.parallel.owned import LocalEngram, SharedEngram
from deepinfer_core.parallel.placement_tables import held_experts, placement_tables
from deepinfer_core.parallel.workers import Workers
from deepinfer_core.parallel.world import World
from deepinfer_core.scheduling.expert_placement import ExpertTopology, plan

HIDDEN, CHOSEN, EXPERTS = 5_120, 6, 384
ROWS = (1, 16, 64, 256, 1_024)
DEADLINE_S = 60.0


def check_experts(comm: Communicator, dtype: torch.dtype) -> None:
    """Small experts with replicas; the outputs of every pair have the bits that one process gives them."""
    random = torch.Generator().manual_seed(0)
    w13 = torch.randn(16, 64, 64, generator=random).to(comm.device, dtype)
    w2 = torch.randn(16, 32, 64, generator=random).to(comm.device, dtype)
    placement = plan(
        torch.rand(1, 16, generator=random).numpy(), None, ExpertTopology(num_devices=comm.size), 20
    ).placement
    exchange = SharedExperts(comm, placement_tables([placement], comm.device), 4)
    held = held_experts([placement], comm.rank)[0]
    own = torch.Generator().manual_seed(1 + comm.rank)
    rows = 40 + comm.rank
    x = torch.randn(rows, 64, generator=own).to(comm.device, dtype)
    ids = torch.stack([torch.randperm(16, generator=own)[:4].sort().values for _ in range(rows)]).to(comm.device)
    weights = torch.rand(rows, 4, generator=own).to(comm.device)
    origin = RowOrigin(torch.zeros_like(ids[:, 0]), torch.arange(rows, device=comm.device))

    def pairs(where: SharedExperts | LocalExperts, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        sent = where.dispatch(0, x, ids, weights, origin)
        tiles = REFERENCE.plan_experts(sent.local_ids, len(w13))
        return where.combine(sent, REFERENCE.run_experts(sent.rows, sent.weights, tiles, w13, w2, 10.0))

    exchange.begin([0])
    if not torch.equal(pairs(exchange, w13[held], w2[held]), pairs(LocalExperts(), w13, w2)):
        raise SystemExit("the exchange does not give the bits of one process")


def check_engram(comm: Communicator) -> None:
    """Two tables over all ranks; rows come from their owners with the same bits."""
    random = torch.Generator().manual_seed(2)
    whole: dict[int, EngramTable] = {}
    held: dict[int, EngramTable] = {}
    for layer, num_rows in ((1, 1_000), (14, 777)):
        codes = torch.randint(0, 120, (num_rows, 256), generator=random, dtype=torch.uint8)
        scales = torch.randint(110, 140, (num_rows, 8), generator=random, dtype=torch.uint8)
        for tables, rows in ((whole, range(num_rows)), (held, share(num_rows, comm.rank, comm.size))):
            part = slice(rows.start, rows.stop)
            tables[layer] = EngramTable(codes[part], scales[part], num_rows, rows.start, torch.float32, comm.device)
    wanted = {layer: torch.arange(comm.rank, 700, 3 + comm.rank, device=comm.device) for layer in whole}
    shared, local = SharedEngram(comm, held), LocalEngram(whole)
    shared.begin()
    shared.fetch(wanted)
    local.fetch(wanted)
    if not all(torch.equal(shared.take(layer), local.take(layer)) for layer in whole):
        raise SystemExit("Engram rows do not come as they are stored")


def exchange_seconds(comm: Communicator, rows: int, rounds: int, dtype: torch.dtype) -> float:
    """Median seconds of a layer's dispatch and combine."""
    placement = plan(torch.ones(1, EXPERTS).numpy(), None, ExpertTopology(num_devices=comm.size), EXPERTS).placement
    exchange = SharedExperts(comm, placement_tables([placement], comm.device), 1)
    own = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(rows, HIDDEN, generator=own).to(comm.device, dtype)
    ids = torch.stack([torch.randperm(EXPERTS, generator=own)[:CHOSEN].sort().values for _ in range(rows)])
    ids, weights = ids.to(comm.device), torch.rand(rows, CHOSEN, generator=own).to(comm.device)
    origin = RowOrigin(torch.zeros_like(ids[:, 0]), torch.arange(rows, device=comm.device))
    seconds: list[float] = []
    for _ in range(rounds + 3):
        comm.barrier("a round")
        start = time.perf_counter()
        exchange.begin([0])
        sent = exchange.dispatch(0, x, ids, weights, origin)
        exchange.combine(sent, sent.rows[:, None])
        if comm.device.type != "cpu":
            torch.cuda.synchronize()
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=comm.device)
        seconds.append(float(comm.all_reduce_max(taken, "time")[0]))
    return statistics.median(seconds[3:])


def run_rank(channel: Channel, kind: str, rounds: int) -> None:
    """One rank: check, measure, report."""
    meeting = Rendezvous.from_environment()
    if meeting is None:
        raise SystemExit("a rank is started by the benchmark itself")
    device = torch.device("cpu")
    if kind != "cpu":
        device = torch.device(kind, meeting.local_rank)
        torch.cuda.set_device(device)
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    size = meeting.world_size
    topology = Topology(data_parallel_size=size, expert_parallel_size=size, engram_parallel_size=size)
    with World(meeting.connect(DEADLINE_S), meeting.rank, topology, device, DEADLINE_S) as world:
        check_experts(world.along("expert"), dtype)
        check_engram(world.along("engram"))
        found = {rows: exchange_seconds(world.along("expert"), rows, rounds, dtype) for rows in ROWS}
    channel.send(json.dumps(found).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--channel", type=int, help=argparse.SUPPRESS)  # this is a rank
    args = parser.parse_args()
    if args.channel is not None:
        torch.set_num_threads(1)
        run_rank(Channel.from_descriptor(args.channel, "the benchmark"), args.device, args.rounds)
        return
    here = str(Path(__file__).parent)
    variables = {"PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}
    arguments = ["--device", args.device, "--rounds", str(args.rounds)]
    found: dict[int, dict[str, float]] = {}
    with Workers.local("expert_exchange", args.ranks, arguments, variables) as ranks:
        while len(found) < args.ranks:
            try:
                found |= {rank: json.loads(message) for rank, message in ranks.receive(DEADLINE_S)}
            except ParallelError as error:  # a rank that has reported may end before the others have
                if set(error.late_ranks) - found.keys():
                    raise
    element = 4 if args.device == "cpu" else 2
    results: dict[str, Any] = {"device": args.device, "ranks": args.ranks, "experts": EXPERTS, "chosen": CHOSEN}
    results["bits"] = "those of one process"
    for text, seconds in found[0].items():
        sent = int(text) * (min(CHOSEN, args.ranks) * (HIDDEN * element + 8 * CHOSEN) + CHOSEN * HIDDEN * element)
        results[f"rows_{text}"] = {"milliseconds": 1e3 * seconds, "bytes_at_most": sent}
        print(
            f"{text:>6} rows a rank: {1e3 * seconds:8.3f} ms a layer, at most {sent / 1e6:.2f} MB sent and taken back"
        )
    if args.output is not None:
        write_results(args.output, results)


if __name__ == "__main__":
    sys.exit(main())
