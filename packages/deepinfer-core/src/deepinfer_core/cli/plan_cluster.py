"""`deepinfer plan --cluster FILE`: a simulated cluster of prefill and decode pools, as JSON, tables or a plot."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from deepinfer_core.checkpoint.resolve import resolve_model
from deepinfer_core.cli.console import table_of
from deepinfer_core.cli.results import check_outputs, new_figure, save_figure
from deepinfer_core.cluster.model_work import RELEASE, ModelWork
from deepinfer_core.cluster.plan_file import read_plan
from deepinfer_core.cluster.report import as_json, plan_cluster
from deepinfer_core.config.model import ModelConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["run"]

_READING = {"position": "75 % of a position", "drafts": "75 % of all drafts"}


def run(args: argparse.Namespace, console: Console) -> int:
    """Simulate and print; 0 if the cluster keeps up with its traffic under every reading, else 1."""
    work = RELEASE
    if args.model is not None:
        work = ModelWork.of(ModelConfig.from_folder(resolve_model(args.model, weights=False)))
    plan = read_plan(Path(args.cluster))
    # Before the simulation: who lacks matplotlib learns it at once.
    picture = None if args.plot is None else (new_figure(11, 4.5), Path(args.plot))
    check_outputs(picture and picture[1])
    report = plan_cluster(plan, work)
    if picture is not None:
        _plot(report, *picture)
    if args.json:
        print(json.dumps(as_json(report), indent=1))
    else:
        for shown in _tables(report):
            console.print(shown)
    return 0 if all(reading["run"]["keeps_up"] for reading in report["readings"].values()) else 1


# ---- tables ----------------------------------------------------------------------------------------------------------


def _tables(report: Mapping[str, Any]) -> list[Table]:
    """The report as tables: the run, the published points, the sweep if there is one, the inputs."""
    readings: Mapping[str, Any] = report["readings"]
    shown = [_run_table(readings), _points_table(readings)]
    if any(reading["sweep"] for reading in readings.values()):
        shown.append(_sweep_table(readings))
    return [*shown, _inputs_table(report)]


def _run_table(readings: Mapping[str, Any]) -> Table:
    runs = [reading["run"] for reading in readings.values()]
    rows = [(label, *map(show, runs)) for label, show in _RUN_ROWS]
    for i, traffic in enumerate(runs[0]["classes"]):
        rows.append((f"first token, {traffic['kind']}", *(_times(run["classes"][i]["first_token_s"]) for run in runs)))
    title = "The cluster, under each reading of the published acceptance"
    return table_of(title, ("figure", *(_READING[name] for name in readings)), rows)


def _points_table(readings: Mapping[str, Any]) -> Table:
    rows: list[tuple[str, ...]] = []
    for points in zip(*(reading["points"] for reading in readings.values()), strict=True):
        role = "fitted" if points[0]["fitted"] else "held out"
        published = f"{_number(points[0]['published'])} {points[0]['unit']}"
        modelled = (f"{_number(point['modelled'])} ({point['error']:+.1%})" for point in points)
        rows.append((points[0]["name"], role, published, *modelled))
    columns = ("point", "role", "published", *(_READING[name] for name in readings))
    return table_of("Published points and the cost model", columns, rows)


def _sweep_table(readings: Mapping[str, Any]) -> Table:
    columns = (
        "changed",
        "reading",
        "requests/s",
        "output tokens/s",
        "user tokens/s",
        "first token",
        "keeps up",
        "limit",
    )
    rows: list[tuple[str, ...]] = []
    for name, reading in readings.items():
        for point in reading["sweep"]:
            run = point["run"]
            changed = ", ".join(f"{key} {value:g}" for key, value in point.items() if key != "run")
            rates = run["requests_per_s"], run["output_tokens_per_s"], run["user_tokens_per_s"]["p50"]
            times, limit = _times(run["first_token_s"]), run["capacity"]["bottleneck"]
            rows.append((changed, _READING[name], *map(_number, rates), times, _yes(run["keeps_up"]), limit))
    return table_of("Sweep", columns, rows)


def _inputs_table(report: Mapping[str, Any]) -> Table:
    figures = [*report["inputs"].items(), *report["assumptions"].items()]
    for reading, found in report["readings"].items():
        figures += [(f"{name} ({reading})", figure) for name, figure in found["calibration"].items()]
    rows = [(name, _number(figure["value"]), figure["mark"], figure["source"]) for name, figure in figures]
    return table_of("Inputs", ("input", "value", "known how", "source"), rows)


def _row(label: str, *keys: str, unit: str = "") -> tuple[str, Any]:
    def show(run: Mapping[str, Any]) -> str:
        return ", ".join(_number(run[key]) for key in keys) + unit

    return label, show


_RUN_ROWS: list[tuple[str, Any]] = [
    _row("requests/s", "requests_per_s"),
    _row("input tokens/s, hits included", "input_tokens_per_s"),
    ("hits", lambda run: f"{run['hit_share']:.1%} of input tokens"),
    _row("computed tokens/s, a prefill device", "computed_tokens_per_s", "computed_tokens_per_s_a_prefill_device"),
    _row("output tokens/s, a decode device", "output_tokens_per_s", "output_tokens_per_s_a_decode_device"),
    ("first token: 50, 90, 99 %", lambda run: _times(run["first_token_s"])),
    ("user tokens/s: 50, 90, 99 % have", lambda run: ", ".join(map(_number, run["user_tokens_per_s"].values()))),
    ("wait for prefill: 50, 90, 99 %", lambda run: _times(run["prefill_wait_s"])),
    ("wait for decode: 50, 90, 99 %", lambda run: _times(run["decode_wait_s"])),
    _row("waiting, mean: prefill, decode", "waiting_for_prefill", "waiting_for_decode"),
    ("keeps up", lambda run: _yes(run["keeps_up"])),
    _row("requests a decode rank", "requests_a_decode_rank"),
    ("decode step", lambda run: f"{1e3 * run['step_s']:.1f} ms"),
    _row("drafts verified, tokens a step", "drafts_a_step", "tokens_a_step"),
    _row("expert balance: mean, worst phase", "expert_balance", "expert_balance_worst"),
    _row("request balance of decode ranks", "request_balance"),
    ("prefill could do", lambda run: f"{_number(run['capacity']['prefill_requests_per_s'])} requests/s"),
    ("decode could do", lambda run: f"{_number(run['capacity']['decode_requests_per_s'])} requests/s"),
    ("balanced split", lambda run: f"{run['capacity']['balanced_prefill_share']:.0%} of the devices prefill"),
]


def _times(seconds: Mapping[str, float]) -> str:
    return ", ".join("-" if math.isnan(value) else f"{1e3 * value:,.0f}" for value in seconds.values()) + " ms"


def _number(value: Any) -> str:
    if isinstance(value, (bool, str)) or not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.4g}"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


# ---- plot ------------------------------------------------------------------------------------------------------------

_PUBLISHED_DECODE = ((300.0, 2_400.0), (100.0, 25_600.0))  # (tokens/s a user, tokens/s a device), 8 and 256 requests
_PUBLISHED_PREFILL = ((4_096, 60_000.0), (65_536, 90_000.0))  # (tokens a rank, tokens/s a device)


def _plot(report: Mapping[str, Any], figure: Figure, path: Path) -> None:
    """Throughput over per-user speed, and prefill throughput over the size of a step."""
    decode, prefill = figure.subplots(1, 2)
    for name, reading in report["readings"].items():
        curve = reading["decode_curve"]
        label = f"model, {_READING[name]}"
        decode.plot(_of(curve, "user_tokens_per_s"), _of(curve, "device_tokens_per_s"), marker=".", label=label)
        runs = [reading["run"], *(point["run"] for point in reading["sweep"])]
        speeds = [run["user_tokens_per_s"]["p50"] for run in runs]
        rates = [run["output_tokens_per_s_a_decode_device"] for run in runs]
        decode.scatter(speeds, rates, marker="s", label=f"simulated, {_READING[name]}")
        curve = reading["prefill_curve"]
        prefill.plot(_of(curve, "rows_a_rank"), _of(curve, "device_tokens_per_s"), marker=".", label=label)
    decode.scatter(*zip(*_PUBLISHED_DECODE, strict=True), marker="*", s=120, color="black", label="published, 3 drafts")
    prefill.scatter(*zip(*_PUBLISHED_PREFILL, strict=True), marker="*", s=120, color="black", label="published")
    decode.set(xlabel="tokens/s a user", ylabel="tokens/s a decode device", title="Decode, 131,072 tokens of context")
    prefill.set(xlabel="tokens a rank and step", ylabel="tokens/s a prefill device", title="Prefill", xscale="log")
    for axes in (decode, prefill):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save_figure(figure, path)


def _of(curve: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [point[key] for point in curve]
