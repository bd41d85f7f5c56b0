"""Experts move between devices while rows are exchanged: are the weights right, and what do the steps feel of it?

    torchrun --standalone --nproc-per-node 2 benchmarks/gpu/expert_moves.py --output moves.json

A step is a notice, and for each layer a dispatch of random rows, a product with the experts' first matrix, a combine.
Experts carry their number in every value, so that at the end each slot tells whether it holds what the tables say.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from deepinfer_core.config.engine import ExpertBalanceConfig
from deepinfer_core.config.topology import Topology
from deepinfer_core.parallel.expert_balancer import ExpertBalancer
from deepinfer_core.parallel.experts import RowOrigin, SharedExperts
from deepinfer_core.parallel.launch import Rendezvous
from deepinfer_core.parallel.lockstep import Lockstep, Notice
from deepinfer_core.parallel.placement_tables import placement_tables
from deepinfer_core.parallel.world import World
from deepinfer_core.scheduling.expert_balance import BalancePolicy
from deepinfer_core.scheduling.expert_placement import ExpertTopology, plan

LAYERS, EXPERTS, EXTRA, CHOSEN, DIM, WIDTH = 6, 32, 8, 4, 2048, 512


def run(world: World, num_steps: int, interval: int) -> dict[str, object]:
    """The figures of this rank."""
    comm, device = world.along("expert"), world.device
    topology = ExpertTopology(num_devices=world.size)
    placement = plan([[1.0] * EXPERTS] * LAYERS, None, topology, EXPERTS + EXTRA).placement
    start, stop = placement.slot_start[comm.rank : comm.rank + 2]
    weights = {
        layer: (
            torch.tensor(row[start:stop], dtype=torch.bfloat16, device=device)[:, None, None]
            .expand(-1, DIM, 2 * WIDTH)
            .contiguous(),
        )
        for layer, row in enumerate(placement.expert_of_slot)
    }
    exchange = SharedExperts(comm, placement_tables([placement], device), num_slots=8)
    settings = ExpertBalanceConfig(expert_rearrangement_interval=interval, expert_count_window=20)
    balancer = ExpertBalancer(exchange, world.moves, placement, weights, settings, BalancePolicy(topology, 10_000))
    lockstep = Lockstep(world.control, world.begin_step)
    draw = torch.Generator(device).manual_seed(world.rank)
    busy = torch.zeros(num_steps, dtype=torch.bool)
    times: list[float] = []
    for step in range(num_steps):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        agreed = lockstep.agree(Notice(num_rows=64, has_work=True, num_staged=balancer.num_staged))
        swapped = balancer.mover.num_swapped
        balancer.begin_step(agreed.step, agreed.num_staged)
        busy[step] = balancer.mover.num_swapped > swapped
        exchange.begin(range(LAYERS))
        for layer in range(LAYERS):
            # A load that is uneven, and uneven elsewhere after every second interval.
            favoured = (torch.arange(EXPERTS, device=device) + 5 * (step // (2 * interval)) + layer) % EXPERTS
            chance = (1.0 / (1 + favoured)).expand(64, -1)
            ids = torch.multinomial(chance, CHOSEN, generator=draw).sort(1).values
            rows = torch.ones(64, DIM, dtype=torch.bfloat16, device=device)
            origin = RowOrigin(torch.zeros(64, dtype=torch.int64, device=device), torch.arange(64, device=device))
            sent = exchange.dispatch(layer, rows, ids, torch.ones(64, CHOSEN, device=device), origin)
            first = weights[layer][0][sent.local_ids[:, 0], 0, :1].expand(-1, DIM)  # the number of its expert
            pairs = exchange.combine(sent, first.unsqueeze(1).contiguous())
            if not torch.equal(pairs[:, :, 0].long(), ids):
                raise SystemExit(f"rank {world.rank}, step {step}, layer {layer}: a pair came from another expert")
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
    balancer.close()
    quiet = [t for t, is_busy in zip(times, busy.tolist(), strict=True) if not is_busy][num_steps // 10 :]
    moving = [t for t, is_busy in zip(times, busy.tolist(), strict=True) if is_busy]
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": str(torch.__version__),
        "expert_megabytes": weights[0][0][0].nbytes / 1e6,
        "step_ms_quiet": 1e3 * statistics.median(quiet),
        "step_ms_with_a_swap": 1e3 * statistics.median(moving) if moving else None,
        "statistics": balancer.statistics(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--interval", type=int, default=100)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    meeting = Rendezvous.from_environment()
    if meeting is None:
        parser.error("start it with torchrun")
    device = torch.device("cuda", meeting.local_rank)
    torch.cuda.set_device(device)
    topology = Topology(data_parallel_size=meeting.world_size, expert_parallel_size=meeting.world_size)
    with World(meeting.connect(60.0), meeting.rank, topology, device, 30.0) as world:
        results = run(world, args.steps, args.interval)
        print(f"rank {meeting.rank}: {json.dumps(results)}")
        if meeting.rank == 0 and args.output is not None:
            args.output.write_text(json.dumps(results, indent=1) + "\n")
        world.control.barrier("end")


if __name__ == "__main__":
    main()
