"""How the benchmarks of kernels take times and write them down.

event_time      one call between two events: what the host sends with a call is part of it
graph_time      one call of a CUDA graph of several: the device's work alone
write_report    JSON: the date, the device and versions of the measurement, and its results
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tilelang
import torch

__all__ = ["event_time", "graph_time", "write_report"]


def event_time(call: Callable[[], Any], samples: int, unmeasured: int = 1) -> float:
    """Seconds of one call, median of so many behind some that are not measured."""
    seconds: list[float] = []
    for _ in range(unmeasured + samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(seconds[unmeasured:])


def graph_time(calls: Sequence[Callable[[], Any]], in_graph: int = 10, replays: int = 20) -> float:
    """Seconds of one call, median over replays of a graph of so many calls, which take `calls` in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(in_graph):
            calls[i % len(calls)]()
    return event_time(graph.replay, replays, unmeasured=3) / in_graph


def write_report(path: Path, **results: Any) -> None:
    """Write JSON; folders are made."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "tilelang": tilelang.__version__, "driver": driver},
    } | results
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
