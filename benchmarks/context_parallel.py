"""What does a second core bring to the first token of a long prompt? Context parallelism, the bundled model, gloo.

    .venv/bin/python benchmarks/context_parallel.py --output benchmarks/results/context_parallel.json

Two processes with one core each. The first one holds two engines: one alone on its core, one that shares the rows of
every prompt with the second process. They take turns; the speed-up is the median ratio within rounds. Answers are
compared, and the bytes counted that the first process hands to the second.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import median_ratio, seconds_of, token_ids, turns, write_results
from torch import Tensor

from deepinfer_core import SamplingParams
from deepinfer_core.config.engine import resolve_settings
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.launch import Rendezvous
from deepinfer_core.parallel.lockstep import Notice
from deepinfer_core.parallel.world import World
from deepinfer_core.runtime.assembly import AssembledEngine, assemble_engine
from deepinfer_core.runtime.rank_runner import RankRunner

RANKS = 2
LENGTHS = (1_024, 4_096, 8_000)
MODES = ("compact", "full")
END = Notice(is_closing=True)
COMMON: dict[str, Any] = {
    "model": "tiny",
    "quiet": True,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8_192,
    "prefix_replay": "off",  # later rounds must not be cheaper
    "num_drafts": 0,
}


def run_rank(meeting: Rendezvous, rounds: int) -> dict[str, Any]:
    """All measurements; empty on the second rank, which follows the first."""
    results: dict[str, Any] = {}
    settings = {mode: COMMON | {"decoder_prefill": mode, "context_parallel_size": RANKS} for mode in MODES}
    topology = resolve_settings(settings["full"], {}).config.parallel.topology()
    with World(meeting.connect(60.0), meeting.rank, topology, torch.device("cpu"), 120.0) as world:
        for mode in MODES:
            together = assemble_engine(resolve_settings(settings[mode], {}).config, world)
            runner = together.runner
            if not isinstance(runner, RankRunner):
                raise SystemExit("context_parallel_size 2 has given no group")
            if meeting.rank == 0:
                alone = assemble_engine(resolve_settings(COMMON | {"decoder_prefill": mode}, {}).config)
                for length in LENGTHS:
                    found = measure(alone, together, world.along("context"), length, rounds)
                    results[f"{mode}_{length}"] = found
                    print(mode, length, found, flush=True)
                runner.join(END)
                alone.close()
            else:
                while not runner.follow(END).closes:
                    pass
            together.close()
    return results


def measure(
    alone: AssembledEngine, together: AssembledEngine, group: Communicator, length: int, rounds: int
) -> dict[str, Any]:
    """Of prompts of one length."""
    first_token(alone, length, -1)  # the first step allocates
    sent = bytes_sent(group, lambda: first_token(together, length, -1))
    systems: dict[str, Callable[[int], tuple[float, int]]] = {
        "alone": lambda number: first_token(alone, length, number),
        "together": lambda number: first_token(together, length, number),
    }
    found = turns(systems, rounds)
    if [token for _, token in found["alone"]] != [token for _, token in found["together"]]:
        raise SystemExit(f"{length} tokens: the answers differ")
    seconds = {name: [value for value, _ in rows] for name, rows in found.items()}
    return {
        "speedup": median_ratio(seconds["alone"], seconds["together"]),
        "alone_s": sorted(seconds["alone"])[rounds // 2],
        "together_s": sorted(seconds["together"])[rounds // 2],
        "sent_bytes_per_token": sent / length,
    }


def first_token(engine: AssembledEngine, length: int, number: int) -> tuple[float, int]:
    """Seconds from a prompt to its first token, and the token."""
    prompt = token_ids(length, engine.tokenizer.num_tokens, number)
    tokens: list[int] = []

    def answer() -> None:
        engine.scheduler.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True), seed=number + 1)
        while engine.loop.has_work:
            for _, new in engine.loop.step():
                tokens.extend(new)

    return seconds_of(answer), tokens[0]


def bytes_sent(group: Communicator, work: Callable[[], object]) -> int:
    """Bytes that this rank hands to the other one during `work`."""
    gather, sent = group.all_gather, [0]

    def counted(tensor: Tensor, label: str) -> Tensor:
        sent.append(tensor.numel() * tensor.element_size())
        return gather(tensor, label)

    group.all_gather = counted
    work()
    group.all_gather = gather
    return sum(sent)


def launch(arguments: Sequence[str]) -> int:
    """This script again, as two ranks."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *torchrun, __file__, *arguments], env=environment, check=False
    ).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    meeting = Rendezvous.from_environment()
    if meeting is None:
        raise SystemExit(launch(sys.argv[1:]))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[meeting.local_rank % len(cores)]})  # the kernels take as many threads
    results = run_rank(meeting, args.rounds)
    if results:
        write_results(args.output, {"rounds": args.rounds, **results})


if __name__ == "__main__":
    main()
