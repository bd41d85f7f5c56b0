"""The whole answer to a FILE: calibration and its check, a run for each reading of the acceptance, sweeps, curves.

    inputs, hardware, assumptions    every figure with its mark: measured, published or assumed
    readings.position | .drafts      calibration, points, run, sweep, decode curve, prefill curve

The curves are the step-cost model's own, without queues, in the form in which the original published its curves:
throughput of a device over the speed of a user, and over the tokens of a prefill step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from deepinfer_core.cluster.build import Cluster
from deepinfer_core.cluster.hardware import DEVICES
from deepinfer_core.cluster.model_work import RELEASE, ModelWork
from deepinfer_core.cluster.outcome import Outcome, simulate
from deepinfer_core.cluster.plan_file import ClusterPlan
from deepinfer_core.cluster.published import CONTEXT_TOKENS, READINGS, Reading, check_points, fitted_figures
from deepinfer_core.cluster.step_cost import ASSUMPTIONS
from deepinfer_core.errors import ConfigError

__all__ = ["as_json", "plan_cluster", "variants"]

_CURVE_REQUESTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_CURVE_ROWS = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)


def plan_cluster(plan: ClusterPlan, work: ModelWork = RELEASE) -> dict[str, Any]:
    """The report, ready for JSON but for not-a-numbers (`as_json`).

    Raises CapacityError for what does not fit and ConfigError for a sweep that is no plan, before anything is run.
    """
    sweep = list(variants(plan))
    return {
        "inputs": plan.inputs(),
        "hardware": {name: _figures(device.figures()) for name, device in DEVICES.items()},
        "assumptions": _figures(ASSUMPTIONS),
        "readings": {reading: _of_reading(plan, sweep, work, reading) for reading in READINGS},
    }


def as_json(value: Any) -> Any:
    """`value` with None for what is no number: JSON has none."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType] -- any JSON
    if isinstance(value, list):
        return [as_json(item) for item in value]  # pyright: ignore[reportUnknownVariableType] -- any JSON
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _of_reading(
    plan: ClusterPlan, sweep: list[tuple[dict[str, float], ClusterPlan]], work: ModelWork, reading: Reading
) -> dict[str, Any]:
    cluster = Cluster(plan, work, reading)
    further = [(changed, Cluster(variant, work, reading)) for changed, variant in sweep]
    return {
        "calibration": _figures(fitted_figures(reading)),
        "points": [point._asdict() | {"error": point.error} for point in check_points(reading)],
        "run": _shown(simulate(cluster)),
        "sweep": [changed | {"run": _shown(simulate(variant))} for changed, variant in further],
        "decode_curve": list(_decode_curve(cluster)),
        "prefill_curve": list(_prefill_curve(cluster)),
    }


def variants(plan: ClusterPlan) -> Iterator[tuple[dict[str, float], ClusterPlan]]:
    """The plans of the sweep, each with what is changed. Raises ConfigError for one that is no plan."""
    for load in plan.sweep.loads:
        cluster = dataclasses.replace(plan.cluster, load=load)
        yield {"load": load}, dataclasses.replace(plan, cluster=cluster)
    total = plan.prefill.devices + plan.decode.devices
    for count in plan.sweep.prefill_devices:
        try:
            prefill = dataclasses.replace(plan.prefill, devices=count)
            decode = dataclasses.replace(plan.decode, devices=total - count)
            variant = dataclasses.replace(plan, prefill=prefill, decode=decode)
        except ConfigError as error:
            raise ConfigError(f"sweep.prefill_devices {count} of {total} devices: {error}") from None
        yield {"prefill_devices": count, "decode_devices": total - count}, variant


def _decode_curve(cluster: Cluster) -> Iterator[dict[str, float]]:
    """At the context of the published curves, drafts as planned."""
    table = cluster.table_near(CONTEXT_TOKENS, 0)
    for requests in _CURVE_REQUESTS:
        if requests < len(table.seconds):
            user_rate = table.tokens[requests] / table.seconds[requests]
            yield {
                "requests_a_rank": requests,
                "user_tokens_per_s": user_rate,
                "device_tokens_per_s": requests * user_rate,
                "step_s": table.seconds[requests],
                "drafts": table.drafts[requests],
            }


def _prefill_curve(cluster: Cluster) -> Iterator[dict[str, float]]:
    for rows in _CURVE_ROWS:
        seconds = cluster.prefill_seconds(rows, cluster.plan.prefill.keep_tokens, CONTEXT_TOKENS)
        yield {"rows_a_rank": rows, "device_tokens_per_s": rows / seconds, "step_s": seconds}


def _shown(outcome: Outcome) -> dict[str, Any]:
    shown = dataclasses.asdict(outcome)
    shown["capacity"]["bottleneck"] = outcome.capacity.bottleneck
    return shown


def _figures(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: figure._asdict() for name, figure in figures.items()}
