"""How level are experts placed, in what time, with how many moves? Ours beside the algorithm of deepseek-ai/EPLB.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/expert_placement.py --output results.json

40 layers of 384 experts on 64 devices with 32 and 64 spare slots, planning on one thread.

    anew      loads follow Zipf's law with an exponent of 0.5 to 1.1, in another order in every layer
    drifting  the logarithm of every load takes a random step of standard deviation `drift` from window to window, and
              is scaled back to the spread it had; both plan on one window, and are judged on it and on the next one

The peer is the published algorithm, written down here from its description: spare replicas one by one to the largest
load a replica, then largest replica first to the lightest device with room, without looking at what lies where. It
needs the same number of slots on every device, so it has no result for 32 spare ones. Balancedness is mean / busiest
device under an even split between replicas, averaged over layers and windows: `kept` of the old placement on the window
that is planned for, `now` of the new one, `next` of the new one on the next window; `next_split` with tokens split by
the load of the window that was planned for, `next_resplit` by that of the next one. `moved` is the share of the slots
that fetch an expert which their device did not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_core.scheduling.expert_load import TokenSplit, split_tokens
from deepinfer_core.scheduling.expert_placement import ExpertTopology, Placement, balancedness, plan

NUM_LAYERS, NUM_EXPERTS = 40, 384
TOPOLOGY = ExpertTopology(num_devices=64, num_nodes=8)
type Planner = Callable[[np.ndarray, Placement | None], Placement]


def published(load: np.ndarray, num_slots: int) -> Placement:
    """The peer: greedy replica counts, then greedy packing."""
    num_devices = TOPOLOGY.num_devices
    size = num_slots // num_devices
    table = np.empty((len(load), num_slots), np.int64)
    for layer, weights in enumerate(load):
        replicas = np.ones(len(weights))
        expert_of_replica = list(range(len(weights)))
        for _ in range(num_slots - len(weights)):
            heaviest = int((weights / replicas).argmax())
            replicas[heaviest] += 1
            expert_of_replica.append(heaviest)
        share = (weights / replicas)[expert_of_replica]
        device_load, filled = np.zeros(num_devices), np.zeros(num_devices, np.int64)
        for replica in np.argsort(-share, kind="stable"):
            device = int(np.where(filled < size, device_load, np.inf).argmin())
            table[layer, device * size + filled[device]] = expert_of_replica[replica]
            device_load[device] += share[replica]
            filled[device] += 1
    return Placement(table, TOPOLOGY.slot_start(num_slots), load.shape[1])


def zipf(exponent: float, rng: np.random.Generator) -> np.ndarray:
    """[L, E]"""
    ranks = np.arange(1, NUM_EXPERTS + 1) ** -exponent
    return np.array([rng.permutation(ranks) for _ in range(NUM_LAYERS)])


def drift(load: np.ndarray, deviation: float, rng: np.random.Generator) -> np.ndarray:
    """The next window's load [L, E]: another order, the same spread."""
    log = np.log(load)
    moved = log + deviation * rng.normal(size=log.shape)
    moved -= moved.mean(axis=1, keepdims=True)
    return np.exp(moved * (log.std(axis=1, keepdims=True) / moved.std(axis=1, keepdims=True)))


def moved_share(before: Placement, after: Placement) -> float:
    """Slots that hold an expert which their device did not hold before, as a share of all."""
    copies = np.zeros((2, NUM_LAYERS, TOPOLOGY.num_devices, NUM_EXPERTS), np.int32)
    for i, placement in enumerate((before, after)):
        index = np.arange(NUM_LAYERS)[:, None], placement.device_of_slot, placement.expert_of_slot
        np.add.at(copies[i], index, 1)
    return float(np.maximum(copies[1] - copies[0], 0).sum() / after.expert_of_slot.size)


def split_balancedness(load: np.ndarray, placement: Placement, split: TokenSplit) -> float:
    device_load = np.zeros((len(load), TOPOLOGY.num_devices))
    layer, expert, replica = np.nonzero(split.slots >= 0)
    device = placement.device_of_slot[split.slots[layer, expert, replica]]
    np.add.at(device_load, (layer, device), load[layer, expert] * split.shares()[layer, expert, replica])
    return float((device_load.mean(axis=1) / device_load.max(axis=1)).mean())


def timed(planner: Planner, load: np.ndarray, previous: Placement | None) -> tuple[Placement, float, float]:
    """The placement, CPU seconds and wall seconds."""
    wall, cpu = time.perf_counter(), time.thread_time()
    placement = planner(load, previous)
    return placement, time.thread_time() - cpu, time.perf_counter() - wall


def planners(num_slots: int) -> dict[str, Planner]:
    systems: dict[str, Planner] = {"ours": lambda load, before: plan(load, before, TOPOLOGY, num_slots).placement}
    if num_slots % TOPOLOGY.num_devices == 0:
        systems["published"] = lambda load, _: published(load, num_slots)
    return systems


def measure_anew(num_slots: int, exponent: float) -> list[dict[str, Any]]:
    load = zipf(exponent, np.random.default_rng(0))
    results: list[dict[str, Any]] = []
    for system, planner in planners(num_slots).items():
        placement, cpu_s, wall_s = timed(planner, load, None)
        level = balancedness(load, placement)
        case = {"case": "anew", "spare": num_slots - NUM_EXPERTS, "zipf": exponent, "system": system}
        results.append(
            case | {"now": float(level.mean()), "worst": float(level.min()), "cpu_s": cpu_s, "wall_s": wall_s}
        )
    return results


def measure_drifting(num_slots: int, exponent: float, deviation: float, num_windows: int) -> list[dict[str, Any]]:
    """Every system follows the same windows; its first placement is its plan for the first one."""
    rng = np.random.default_rng(1)
    windows = [zipf(exponent, rng)]
    while len(windows) < num_windows + 2:
        windows.append(drift(windows[-1], deviation, rng))
    results: list[dict[str, Any]] = []
    for system, planner in planners(num_slots).items():
        placement, rows = planner(windows[0], None), []
        for now, following in itertools.pairwise(windows[1:]):
            before = placement
            placement, cpu_s, wall_s = timed(planner, now, before)
            row = {
                "kept": balancedness(now, before).mean(),
                "now": balancedness(now, placement).mean(),
                "next": balancedness(following, placement).mean(),
                "moved": moved_share(before, placement),
                "cpu_s": cpu_s,
                "wall_s": wall_s,
            }
            if system == "ours":
                row["next_split"] = split_balancedness(following, placement, split_tokens(now, placement))
                row["next_resplit"] = split_balancedness(following, placement, split_tokens(following, placement))
            rows.append(row)
        case = {"case": "drifting", "spare": num_slots - NUM_EXPERTS, "zipf": exponent, "drift": deviation}
        means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        results.append(case | {"system": system} | means)
    return results


def machine() -> dict[str, Any]:
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    load = os.getloadavg()[0]
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": load,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spare", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--windows", type=int, default=4, help="windows that a drifting load is followed for")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for spare in args.spare:
        for exponent in (0.5, 0.8, 1.1):
            results += measure_anew(NUM_EXPERTS + spare, exponent)
        for exponent, deviation in ((0.5, 0.3), (0.8, 0.3), (0.8, 0.5), (1.1, 0.4)):
            results += measure_drifting(NUM_EXPERTS + spare, exponent, deviation, args.windows)
    for result in results:
        print("  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()))
    if args.output:
        args.output.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
