"""What benchmarks of the engine share: prompts, turns, the machine's name, the file of results."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import deepinfer_core

__all__ = ["OPENINGS", "machine", "median_ratio", "seconds_of", "token_ids", "turns", "write_results"]

# Openings of the kinds of text that the bundled model was trained on; answers to them are text, not noise.
OPENINGS = (
    "Once upon a time",
    "The old man looked at the sea and",
    "In the morning the king said to",
    "She opened the door and",
    "One day a fox named Finn",
    "There was a clever girl who",
    "And it came to pass that",
    "To install the package, first",
)


def token_ids(count: int, num_token_ids: int, seed: int) -> list[int]:
    """Random ids above the special ones; no two seeds share a prefix worth caching."""
    rng = random.Random(seed)
    return [rng.randrange(200, num_token_ids) for _ in range(count)]


def seconds_of(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def turns[Result](systems: Mapping[str, Callable[[int], Result]], rounds: int) -> dict[str, list[Result]]:
    """Every system once a round, in turn; the order is reversed every other round. Systems are told the round.

    What disturbs the machine for longer than a turn disturbs all of them, so ratios within a round stay fair.
    """
    found: dict[str, list[Result]] = {name: [] for name in systems}
    for number in range(rounds):
        order = list(systems) if number % 2 == 0 else list(systems)[::-1]
        for name in order:
            found[name].append(systems[name](number))
    return found


def median_ratio(over: list[float], under: list[float]) -> dict[str, float]:
    """Median, least and largest of over / under within each round."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "largest": max(ratios)}


def machine() -> dict[str, Any]:
    """Where the figures were taken."""
    cpu = platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepinfer_core": deepinfer_core.__version__,
    }


def write_results(output: Path | None, results: Mapping[str, Any]) -> None:
    """Write them beside the machine, and print them: a reader that has gone away costs no results."""
    text = json.dumps({"machine": machine(), **results}, indent=1) + "\n"
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    print(text)
