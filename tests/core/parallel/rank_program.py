"""What a rank process of these tests runs: joins the world, then does what its parent asks for, one task a message.

A message is JSON: [task, arguments]; the answer is JSON: ["ok", result] or ["error", class, text, late ranks].
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from typing import Any

import torch

from deepinfer_core.config.topology import Topology
from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.channel import Channel, Inbox
from deepinfer_core.parallel.launch import Rendezvous
from deepinfer_core.parallel.world import World


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--sizes", type=json.loads, required=True)
    parser.add_argument("--deadline-s", type=float, default=20.0)
    args = parser.parse_args()
    channel = Channel.from_descriptor(args.channel, "the test")
    inbox = Inbox(channel, exit_after_s=2.0)
    meeting = Rendezvous.from_environment()
    assert meeting is not None
    topology = Topology(**args.sizes)
    with World(meeting.connect(20.0), meeting.rank, topology, torch.device("cpu"), args.deadline_s) as world:
        channel.send(b'["ok", "ready"]')
        while not inbox.is_closed:
            for message in inbox.take(1.0):
                task, arguments = json.loads(message)
                try:
                    answer: list[Any] = ["ok", globals()[f"task_{task}"](world, **arguments)]
                except ParallelError as error:
                    answer = ["error", type(error).__name__, str(error), list(error.late_ranks)]
                channel.send(json.dumps(answer).encode())
        inbox.close()


def task_collectives(world: World, axis: str) -> dict[str, Any]:
    """One of each along an axis, of values that the parent can work out."""
    comm = world.along(axis)  # type: ignore[arg-type]  # a test gives one of the axes
    rank, size = world.rank, comm.size
    counts = [member % 3 for member in range(size)]
    send = [(comm.rank + member) % 3 for member in range(size)]
    rows = torch.arange(sum(send), dtype=torch.float64)[:, None] + 100 * rank
    return {
        "ranks": list(comm.ranks),
        "all_gather": comm.all_gather(torch.tensor([[rank]], dtype=torch.bfloat16), "gather").flatten().tolist(),
        "rows": comm.all_gather_rows(
            torch.full((counts[comm.rank], 2), rank, dtype=torch.int32), counts, "gather rows"
        ).tolist(),
        "exchanged": comm.all_to_all_rows(rows, send, send, "exchange").flatten().tolist(),
        "max": comm.all_reduce_max(torch.tensor([rank, -rank]), "max").tolist(),
        "sum": comm.all_reduce_sum(torch.tensor([rank], dtype=torch.int32), "sum").tolist(),
        "bytes": comm.broadcast_bytes(b"from %d" % rank, size - 1, "broadcast").decode(),
        "empty": len(comm.broadcast_bytes(b"", 0, "broadcast nothing")),
        "texts": [data.decode() for data in comm.all_gather_bytes(b"x" * (rank % 2), "texts")],
        "nothing": list(comm.all_to_all_rows(rows[:0], [0] * size, [0] * size, "exchange nothing").shape),
    }


def task_step(world: World, step: int, seconds: dict[str, float]) -> int:
    """A step of three collectives in two groups; ranks named in `seconds` compute that long in between."""
    world.begin_step(step)
    world.control.barrier("notice")
    time.sleep(seconds.get(str(world.rank), 0.0))
    world.along("expert").barrier("dispatch")
    world.control.barrier("verdict")
    return step


def task_steps_until(world: World, doomed: int, num_collectives: int, end: str) -> None:
    """Collectives without end; rank `doomed` meets its end after so many of them."""
    for count in range(100_000):
        if world.rank == doomed and count == num_collectives:
            _meet_end(world, end)
        world.begin_step(count // 2)
        comm = world.along("expert") if count % 2 else world.control
        comm.all_to_all_rows(torch.zeros(comm.size, 3), [1] * comm.size, [1] * comm.size, "exchange")


def _meet_end(world: World, end: str) -> None:
    if end == "fail":
        raise ValueError("a failure of its own")
    if end == "leave":
        world.close()
        raise SystemExit(0)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[end])


def task_mismatch(world: World) -> None:
    """Rank 0 thinks that another group is next."""
    (world.along("expert") if world.rank == 0 else world.control).barrier("one of two")


if __name__ == "__main__":
    main()
