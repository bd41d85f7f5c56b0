"""Speed of one group of devices without traffic: the estimate of `deepinfer plan`.

    decode    requests a rank = ceil(sequences / devices); drafts and step seconds from the cost model
    prefill   one step of `step_rows` rows on every rank

Experts are spread over all devices, attention is not: the engine's own layout. A range comes from the two readings of
the published acceptance that the model was calibrated with. The efficiency was fitted on SM100 and is taken to be the
same elsewhere, so this says what a device should reach once its kernels are as good, not what it reaches today.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_core.cluster.drafting import DraftSettings, draft_table
from deepinfer_core.cluster.hardware import Device
from deepinfer_core.cluster.model_work import ModelWork
from deepinfer_core.cluster.published import READINGS, calibrate
from deepinfer_core.cluster.step_cost import StepCost
from deepinfer_core.config.checks import check_integer
from deepinfer_core.errors import ConfigError

__all__ = ["SpeedEstimate", "estimate_speed"]

type Range = tuple[float, float]  # least, most


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Each a range over the readings."""

    step_s: Range  # of decode
    tokens_a_step: Range  # of a sequence
    user_tokens_per_s: Range
    decode_tokens_per_s: Range  # of all devices
    prefill_tokens_per_s: Range  # of all devices, tokens that are no hits


def estimate_speed(
    work: ModelWork,
    device: Device,
    *,
    num_devices: int,
    num_sequences: int,
    context_tokens: int,
    num_drafts: int,
    step_rows: int,
) -> SpeedEstimate:
    """Decode with `num_sequences` sequences of `context_tokens`, prefill in steps of `step_rows` rows a rank."""
    requests = check_integer("sequences of one device", -(-num_sequences // num_devices), 1, 4_096, ConfigError)
    drafts = DraftSettings(length=min(num_drafts, 16))
    found: list[tuple[float, ...]] = []
    for reading in READINGS:
        cost = StepCost(work, device, num_devices, calibrate(reading))
        table = draft_table(cost, drafts, requests, context_tokens, 1.0)
        step_s, tokens = table.seconds[requests], table.tokens[requests]
        prefill_s = cost.prefill_seconds(step_rows, min(step_rows, work.window), context_tokens / 2)
        user_rate = tokens / step_s
        found.append((step_s, tokens, user_rate, num_sequences * user_rate, num_devices * step_rows / prefill_s))
    return SpeedEstimate(*((min(values), max(values)) for values in zip(*found, strict=True)))
