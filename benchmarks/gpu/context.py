"""Context parallelism between GPUs of one host over NCCL: the bundled model, reference kernels, packed caches.

    python3 benchmarks/gpu/context.py --out FILE           two GPUs; on a machine without, --device cpu runs over gloo

Every rank runs a prompt alone and with the others, then compares: logits, and the bytes of every cache. cuBLAS picks
its kernels by the number of rows, so equal bits are not expected here, as they are on a CPU: the share of equal records
and the largest difference say how far the ranks' arithmetic parts. Times are those of the slowest rank, median of five.
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

import numpy as np
import torch

from deepinfer_core.cache import CacheLayout, ModelState
from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.topology import Topology
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.model import Backbone, ForwardOutput, build_batch, build_params
from deepinfer_core.parallel.channel import Channel
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.launch import Rendezvous
from deepinfer_core.parallel.workers import Workers
from deepinfer_core.parallel.world import World
from deepinfer_core.scheduling.plan import RowKind, StepPlan, TokenSource, Writes

MODEL = Path(__file__).parents[2] / "packages/deepinfer-core/src/deepinfer_core/models/tiny"
DEADLINE_S = 60.0
KEEP = 140


def prompt_plan(length: int, decoder_from: int) -> StepPlan:
    """One prompt, whole, in one step."""
    random = np.random.default_rng(length)
    return StepPlan(
        step=0,
        row_position=np.arange(length),
        row_token=random.integers(200, 2_000, length),
        row_source=np.full(length, TokenSource.GIVEN, np.uint8),
        row_kind=np.full(length, RowKind.PREFILL, np.uint8),
        row_content=np.zeros(length, np.uint8),
        row_writes=np.full(length, Writes.GLOBAL | Writes.WINDOW, np.uint8),
        row_sample=np.arange(length) == length - 1,
        segment_start=np.array([0, length], np.int32),
        segment_slot=np.zeros(1, np.int32),
        segment_generation=np.zeros(1, np.int32),
        segment_window_from=np.zeros(1, np.int64),
        segment_decoder_from=np.array([decoder_from]),
        segment_num_drafts=np.zeros(1, np.int32),
        block_tables=np.arange(-(-length // 128), dtype=np.int32)[None],
    )


class Prompt:
    """One prompt on one rank, alone or with a group."""

    def __init__(self, backbone: Backbone, length: int, decoder_from: int, dtype: torch.dtype) -> None:
        self.backbone = backbone
        self.plan = prompt_plan(length, decoder_from)
        self.layout = CacheLayout(backbone.config, 1, -(-length // 128), length, 2, form="packed")
        self.device, self.dtype = backbone.params.embed.device, dtype

    @torch.inference_mode()
    def run(self, group: Communicator | None) -> tuple[ForwardOutput, ModelState, float]:
        """What came out, the caches, and the seconds that it took."""
        state = ModelState.allocate(self.layout, device=self.device, dtype=self.dtype)
        self._wait()
        start = time.perf_counter()
        batch = build_batch(self.plan, state, self.backbone.params, self.backbone.kernels, group=group)
        out = self.backbone.forward(batch, state)
        self._wait()
        return out, state, time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize()


def measure(prompt: Prompt, group: Communicator, rounds: int) -> dict[str, Any]:
    """Both ways in turn, and how their results differ on this rank."""
    seconds: dict[str, list[float]] = {"alone": [], "together": []}
    (alone, own, _), (together, shared, _) = prompt.run(None), prompt.run(group)
    for _ in range(rounds):
        for name, comm in (("alone", None), ("together", group)):
            group.barrier("a round")
            _, _, taken = prompt.run(comm)
            slowest = group.all_reduce_max(torch.tensor([taken], dtype=torch.float64, device=group.device), "time")
            seconds[name].append(float(slowest[0]))
    if alone.logits is None or together.logits is None:
        raise SystemExit("a prompt gave no logits")
    layout, ratios = prompt.layout, prompt.layout.config.compress_ratios
    pairs = [(a, b, layout.window.trash_row) for a, b in zip(own.window, shared.window, strict=True)]
    for layer in own.entries:
        used = layout.entry_trash_row(ratios[layer])
        pairs.append((own.entries[layer], shared.entries[layer], used))
        pairs.append((own.index_keys[layer], shared.index_keys[layer], used))
    equal = torch.cat([(a[:used] == b[:used]).all(1) for a, b, used in pairs])
    return {
        "alone_s": statistics.median(seconds["alone"]),
        "together_s": statistics.median(seconds["together"]),
        "rows_of_a_layer": together.rows_per_layer[0],
        "equal_records": float(equal.float().mean()),
        "largest_logit_difference": float((alone.logits - together.logits).abs().max()),
        "same_token": bool(alone.logits.argmax() == together.logits.argmax()),
    }


def run_rank(channel: Channel, kind: str, lengths: list[int], rounds: int) -> None:
    meeting = Rendezvous.from_environment()
    if meeting is None:
        raise SystemExit("a rank is started by the benchmark itself")
    device = torch.device("cpu")
    if kind != "cpu":
        device = torch.device(kind, meeting.local_rank)
        torch.cuda.set_device(device)
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    config = ModelConfig.from_folder(MODEL)
    weights = load_model_weights(MODEL, config, dtype=dtype, device=device, progress=False)
    backbone = Backbone(config, build_params(weights, config), REFERENCE)
    found: dict[str, Any] = {}
    topology = Topology(context_parallel_size=meeting.world_size)
    with World(meeting.connect(DEADLINE_S), meeting.rank, topology, device, DEADLINE_S) as world:
        for length in lengths:
            for mode, decoder_from in (("compact", length - KEEP), ("full", 0)):
                prompt = Prompt(backbone, length, decoder_from, dtype)
                found[f"{mode}_{length}"] = measure(prompt, world.along("context"), rounds)
        of_all = world.control.all_gather_bytes(json.dumps(found).encode(), "results")
        if meeting.rank == 0:
            channel.send(json.dumps([json.loads(one) for one in of_all]).encode())
        world.control.barrier("end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_024, 4_096, 8_000])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--channel", type=int, help=argparse.SUPPRESS)  # this is a rank
    args = parser.parse_args()
    if args.channel is not None:
        run_rank(Channel.from_descriptor(args.channel, "the benchmark"), args.device, args.lengths, args.rounds)
        return
    here = str(Path(__file__).parent)
    variables = {"PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}
    arguments = ["--device", args.device, "--rounds", str(args.rounds), "--lengths", *map(str, args.lengths)]
    messages: list[tuple[int, bytes]] = []
    with Workers.local("context", args.ranks, arguments, variables) as ranks:
        while not messages:
            messages = ranks.receive(DEADLINE_S)
    found: list[dict[str, Any]] = json.loads(messages[0][1])
    results = {"device": args.device, "ranks": args.ranks, "torch": torch.__version__}
    if args.device == "cuda":
        results["gpu"] = torch.cuda.get_device_name(0)
    for name in found[0]:
        results[name] = [of_rank[name] for of_rank in found]
    text = json.dumps(results, indent=1) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
