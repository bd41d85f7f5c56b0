"""`deepinfer bench --eplb`: the model's routing of real text, recorded, then played with and without the balancer.

    text ─► prompts ─► the model, one process ─► tokens of each expert, step by step ─► JSON
                                                     │  8 devices, spare slots, windows (scheduling/expert_replay.py)
                                                     └─► busiest / mean over time, with and without ─► JSON, table, PNG

The text is Python's own language reference and parts of its library's source (English, code, tables), which every
machine has; --eplb-text takes any file. Where the recorded load is so even that nothing could be gained, it is skewed
by Zipf's law with a slow drift, and every output says so. Intervals are a hundredth of production's 10,000 steps, and
so is what a move costs.
"""

from __future__ import annotations

import argparse
import inspect
import pydoc_data.topics
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_core.cli.console import console, table_of
from deepinfer_core.cli.options import settings_from
from deepinfer_core.cli.results import check_outputs, check_plot, new_figure, save_figure, write_json
from deepinfer_core.config.checks import check_integer, check_number
from deepinfer_core.errors import ConfigError, RequestError
from deepinfer_core.scheduling.expert_placement import ExpertTopology
from deepinfer_core.scheduling.expert_replay import ReplayCosts, ReplayedBalance, replay_routing, skewed

__all__ = ["add_eplb_flags", "plot_balance", "run_eplb"]

_EVEN = 1.15  # busiest / mean below which a recorded load is skewed


def add_eplb_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the balancer's replay; --output and --plot are shared with workloads."""
    group = parser.add_argument_group("recorded routing under the expert balancer")
    group.add_argument("--eplb", action="store_true", help="busiest / mean over time, with and without the balancer")
    group.add_argument("--eplb-text", type=Path, help="text to route (Python's language reference and sources)")
    group.add_argument("--eplb-steps", type=int, default=600, help="steps of 512 tokens (600)")
    group.add_argument("--eplb-devices", type=int, default=8, help="devices that share the experts (8)")
    group.add_argument("--eplb-window", type=int, default=25, help="steps of a window (25)")
    group.add_argument("--eplb-interval", type=int, default=100, help="steps between rearrangements (100)")
    group.add_argument(
        "--eplb-skew", type=float, help="Zipf exponent of a skew (0 = none; chosen where it is too even)"
    )


def run_eplb(args: argparse.Namespace) -> int:
    """Record, replay, print."""
    devices = check_integer("--eplb-devices", args.eplb_devices, 2, 1_024, ConfigError)
    window = check_integer("--eplb-window", args.eplb_window, 1, 1_000_000, ConfigError)
    interval = check_integer("--eplb-interval", args.eplb_interval, 1, 1_000_000, ConfigError)
    steps = check_integer("--eplb-steps", args.eplb_steps, 2, 1_000_000, ConfigError)
    first = interval + ReplayCosts().steps_to_move  # the first step with experts that were moved, counted from 0
    if steps <= first:
        raise ConfigError(
            f"--eplb-steps is {steps} and --eplb-interval {interval}: no expert has moved before step {first + 1}; "
            f"give at least {first + 1} steps, or a shorter interval"
        )
    skew = args.eplb_skew if args.eplb_skew is None else check_number("--eplb-skew", args.eplb_skew, 0, 5, ConfigError)
    check_outputs(args.output)
    check_plot(args.plot)
    settings = settings_from(args)
    from deepinfer_core.runtime.routing_record import record_routing  # loads torch

    counts = record_routing(_text(args.eplb_text), steps, settings)
    num_experts = counts.shape[2]
    extra = settings.get("num_extra_experts") or devices * max(1, num_experts // 4 // devices)
    topology = ExpertTopology(num_devices=devices)
    played = replay_routing(counts, topology, num_experts + extra, window, interval, ReplayCosts())
    recorded_mean = float(played.without.mean())
    if skew is None:
        skew = 0.6 if recorded_mean < _EVEN else 0.0
    if skew:
        counts = skewed(counts, skew, drift_steps=max(1, interval // 2))
        played = replay_routing(counts, topology, num_experts + extra, window, interval, ReplayCosts())
    results = _results(played, skew, recorded_mean, devices, extra, window, interval)
    if args.output is not None:
        write_json(args.output, results, indent=None)
    if args.plot is not None:
        plot_balance(results, args.plot)
    _show(results)
    return 0


def _text(path: Path | None) -> str:
    if path is None:
        reference = "\n\n".join(pydoc_data.topics.topics.values())
        middle = len(reference) // 2
        parts = [reference[:middle], inspect.getsource(argparse), reference[middle:], inspect.getsource(inspect)]
        return "\n".join(parts)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read as UTF-8 text ({error})") from error


def _results(
    played: ReplayedBalance, skew: float, recorded_mean: float, devices: int, extra: int, window: int, interval: int
) -> dict[str, Any]:
    settled = slice(min(interval + ReplayCosts().steps_to_move + 1, len(played.without) - 1), None)
    return {
        "devices": devices,
        "extra_slots": extra,
        "window": window,
        "interval": interval,
        "load": f"recorded, skewed by Zipf {skew:g} with drift" if skew else "recorded",
        "recorded_busiest_over_mean": recorded_mean,
        "busiest_over_mean_without": float(played.without[settled].mean()),
        "busiest_over_mean_with": float(played.with_balancer[settled].mean()),
        "rearrangements": [[one.step, one.moves, one.lasting_share] for one in played.rearrangements],
        "without": [round(value, 4) for value in played.without.tolist()],
        "with": [round(value, 4) for value in played.with_balancer.tolist()],
    }


def _show(results: dict[str, Any]) -> None:
    rows = [
        ("load", str(results["load"])),
        ("busiest / mean as recorded, no balancer", f"{results['recorded_busiest_over_mean']:.3f}"),
        ("busiest / mean without, after the first interval", f"{results['busiest_over_mean_without']:.3f}"),
        ("busiest / mean with the balancer", f"{results['busiest_over_mean_with']:.3f}"),
        ("rearrangements", str(len(results["rearrangements"]))),
        ("experts moved", str(sum(moves for _, moves, _ in results["rearrangements"]))),
    ]
    title = f"experts on {results['devices']} devices, {results['extra_slots']} extra slots"
    console().print(table_of(title, ("figure", "value"), rows))


def plot_balance(results: dict[str, Any], path: Path) -> None:
    """busiest / mean over the steps, a line without and one with. ConfigError without matplotlib, or unwritable."""
    figure = new_figure(8, 4)
    axes = figure.subplots()
    for name, label in (("without", "first placement"), ("with", "with the balancer")):
        axes.plot(_smoothed(results[name]), label=label)
    for step, _, _ in results["rearrangements"]:
        axes.axvline(step, color="0.85", linewidth=0.8, zorder=0)
    axes.set_xlabel("step (grey: experts moved)")
    axes.set_ylabel("busiest device / mean, mean of 20 steps")
    axes.set_title(f"{results['devices']} devices, {results['extra_slots']} extra slots; load {results['load']}")
    axes.legend()
    save_figure(figure, path)


def _smoothed(values: list[float], width: int = 20) -> np.ndarray:
    """Means of `width` steps up to each; fewer at the start."""
    total = np.cumsum([0.0, *values])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - width)
    return (total[end] - total[start]) / (end - start)
