"""Real rank processes for tests, started by the product's own `Workers`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Self

from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.workers import Workers


class RankProcesses:
    """Ranks that run tests/core/parallel/rank_program.py; ready when constructed."""

    def __init__(self, num_ranks: int, deadline_s: float = 20.0, **sizes: int) -> None:
        self.deaths: list[str] = []
        sizes = {"data_parallel_size": num_ranks, "expert_parallel_size": num_ranks} | sizes
        self.workers = Workers.local(
            "rank_program",
            num_ranks,
            ["--sizes", json.dumps(sizes), "--deadline-s", str(deadline_s)],
            {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
            show_output=False,
        )
        assert self.answers() == [["ok", "ready"]] * num_ranks

    def ask(self, task: str, **arguments: Any) -> None:
        self.workers.send_all(json.dumps([task, arguments]).encode())

    def answers(self, ranks: list[int] | None = None, timeout_s: float = 60.0) -> list[list[Any]]:
        """One answer of each of `ranks` (None = all), in their order; the end of other ranks is nothing special."""
        wanted = list(range(len(self.workers))) if ranks is None else ranks
        found: dict[int, list[Any]] = {}
        end_s = time.monotonic() + timeout_s
        while set(found) != set(wanted):
            assert time.monotonic() < end_s, f"no answer of ranks {set(wanted) - set(found)}"
            try:
                received = self.workers.receive(1.0)
            except ParallelError as error:
                if set(error.late_ranks) & set(wanted):
                    raise
                self.deaths.append(str(error))
                continue
            found |= {rank: json.loads(message) for rank, message in received}
        return [found[rank] for rank in wanted]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.workers.stop(2.0)
