"""`deepinfer bench --workload`: requests come as a file says; how fast is the engine, and how fast for each user?

    load x 1, 2, 4 ..   every request is sent at arrival_s / load, whether or not earlier ones are done
    throughput          output tokens of all requests / time from the first arrival to the last end
    per-user speed      (output tokens - 1) / (last token - first token) of one answer

Each load has an engine of its own, so no point profits from the cache that another filled. The results are JSON; the
plot is made from the JSON alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from deepinfer_core.cli.results import new_figure, save_figure
from deepinfer_core.cli.workload import Arrival
from deepinfer_core.engine import Engine
from deepinfer_core.errors import RequestError
from deepinfer_core.outputs import AnswerMetrics

__all__ = ["measure_load", "plot"]

_SHARES = {"p10": 0.10, "p50": 0.50, "p90": 0.90, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class _Served:
    """What became of one request."""

    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    metrics: AnswerMetrics | None


def measure_load(
    settings: dict[str, Any], workload: Sequence[Arrival], load: float, *, progress: bool = False
) -> dict[str, Any]:
    """Serve the workload `load` times as fast as it was written; the figures of this point, flat but for percentiles.

    Raises RequestError if no request of the workload could be answered.
    """
    return asyncio.run(_measure(settings, workload, load, progress))


async def _measure(
    settings: dict[str, Any], workload: Sequence[Arrival], load: float, progress: bool
) -> dict[str, Any]:
    async with Engine(**settings) as engine:
        await _serve(engine, Arrival(0.0, "The", output_tokens=2), 0.0, 0)  # the first step allocates
        before, start = engine.statistics(), time.perf_counter()
        tasks = [_serve(engine, one, start + one.arrival_s / load, seed) for seed, one in enumerate(workload)]
        with tqdm(total=len(tasks), desc=f"Load x {load:g}", unit="request", disable=not progress) as bar:
            served = await asyncio.gather(*(_counted(task, bar) for task in tasks))
        seconds = time.perf_counter() - start - workload[0].arrival_s / load
        after = engine.statistics()
    times = [one.metrics for one in served if one.metrics is not None and one.finish_reason in ("stop", "length")]
    if not times:
        raise RequestError(f"none of {len(workload)} requests was answered: {served[0].finish_reason}")
    output_tokens = sum(one.output_tokens for one in served)
    gaps = [one.inter_token_s for one in times if one.inter_token_s]
    return {
        "load": load,
        "requests": len(served),
        "answered": len(times),
        "seconds": seconds,
        "prompt_tokens": sum(one.prompt_tokens for one in served),
        "hit_tokens": sum(one.hit_tokens for one in times),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / seconds,
        "user_tokens_per_s": percentiles([1 / gap for gap in gaps]),
        "first_token_ms": percentiles([one.first_token_s * 1e3 for one in times]),
        "queue_ms": percentiles([one.queue_s * 1e3 for one in times]),
        "inter_token_ms": percentiles([gap * 1e3 for gap in gaps]),
        "steps": _count(after, "steps") - _count(before, "steps"),
        "preemptions": _count(after, "preemptions") - _count(before, "preemptions"),
        "peak_used_blocks": after["peak_used_blocks"],
        "acceptance_by_position": after["acceptance_by_position"],
    }


async def _counted(task: Coroutine[Any, Any, _Served], bar: tqdm[NoReturn]) -> _Served:
    served = await task
    bar.update()
    return served


async def _serve(engine: Engine, one: Arrival, at_s: float, seed: int) -> _Served:
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
    prompt = one.prompt_for(engine.tokenizer.num_tokens)
    stream = engine.add_request(prompt, one.sampling_params(seed))
    async for _ in stream:
        pass
    answers = stream.output.outputs
    prompt_tokens, output_tokens = len(stream.output.prompt_token_ids), sum(len(one.token_ids) for one in answers)
    return _Served(prompt_tokens, output_tokens, answers[0].finish_reason or "abort", answers[0].metrics)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Nearest ranks; None where there are no values."""
    ranked = sorted(values)
    return {name: ranked[round(share * (len(ranked) - 1))] if ranked else None for name, share in _SHARES.items()}


def plot(results: dict[str, Any], path: Path) -> None:
    """Throughput over per-user speed, a point a load. ConfigError without matplotlib, or if it cannot be written."""
    points = [one for one in results["loads"] if one["user_tokens_per_s"]["p50"] is not None]
    points.sort(key=lambda one: one["load"])
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    speeds = [[one["user_tokens_per_s"][name] for one in points] for name in ("p10", "p50", "p90")]
    throughput = [one["output_tokens_per_s"] for one in points]
    axes.plot(speeds[1], throughput, "o-", label="median user")
    axes.hlines(throughput, speeds[0], speeds[2], alpha=0.4, label="10th to 90th percentile of users")
    for one, x, y in zip(points, speeds[1], throughput, strict=True):
        axes.annotate(f"load x {one['load']:g}", (x, y), textcoords="offset points", xytext=(6, 6))
    axes.set(xlabel="tokens/s for one user", ylabel="output tokens/s of all", title=results["workload"])
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.12 * max(throughput, default=1.0))
    axes.legend()
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def _count(found: dict[str, object], name: str) -> int:
    value = found[name]
    return value if isinstance(value, int) else 0
