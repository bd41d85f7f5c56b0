"""Seconds of one lockstep step of an expert-parallel group.

    step = exposed + max(transport, work)

    exposed      layers · latency · 1/2                     launches and kernels that wait for one another
    transport    layers · latency · 1/2 + bytes / links     dispatch and combine, behind the other half-batch's work
    work         weight bytes / (m · memory rate)  +  matrix flops / (e · fp8 peak)
                 + max(attention flops / (e · fp8 peak), KV bytes / (m · memory rate))

                        |            ___/      work decides: a line
    seconds             |________---           transport decides: flat, drafts are nearly free
                        +------------------    rows

Experts compute in tiles of 128 rows, and the busiest rank, which has 1 / balance of the mean, decides. Two numbers are
fitted (`published.calibrate`): the latency of a layer and the efficiency e, the share of the fp8 peak that is reached.
Everything else comes from the model's sizes and the device's peaks. Nothing else overlaps here; what overlaps in real
kernels is in e.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer_core.cluster.figures import Figure
from deepinfer_core.cluster.hardware import Device
from deepinfer_core.cluster.model_work import HalfWork, ModelWork

__all__ = ["ASSUMPTIONS", "Calibration", "StepCost"]

type FloatArray = NDArray[np.float64]

_EXPOSED_SHARE = 0.5
_MEMORY_EFFICIENCY = 0.8
_TILE_ROWS = 128

ASSUMPTIONS = {
    "exposed_share_of_latency": Figure(
        _EXPOSED_SHARE, "assumed", "launches against transport; docs/cluster.md varies it"
    ),
    "memory_efficiency": Figure(_MEMORY_EFFICIENCY, "assumed", "share of the memory rate that streaming kernels reach"),
    "expert_tile_rows": Figure(_TILE_ROWS, "published", "row alignment of DeepGEMM's grouped products"),
}


class Calibration(NamedTuple):
    """The two fitted numbers."""

    layer_latency_s: float
    efficiency: float  # reached share of the fp8 peak, in (0, 1]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Steps of one group: `num_devices` ranks, each with its own rows and attention, experts spread over all."""

    work: ModelWork
    device: Device
    num_devices: int
    calibration: Calibration

    def decode_seconds(
        self, requests: FloatArray, drafts: FloatArray, context_tokens: float, balance: float = 1.0
    ) -> FloatArray:
        """A decoding step with so many requests a rank [N] and drafts a request [N], drafting included.

        context_tokens: mean over the requests; balance: mean / busiest rank of the expert load.
        """
        w = self.work
        rows, draft_rows = requests * (1 + drafts), requests * drafts
        matrix_s = self._dense_s(rows, w.encoder.dense_params + w.decoder.dense_params + w.head_params)
        matrix_s += self._experts_s(rows, w.layers, balance)
        matrix_s += self._draft_s(draft_rows, balance)
        scores = sum(self._row_attention_flops(half, context_tokens) for half in (w.encoder, w.decoder))
        attention_s = np.maximum(
            rows * scores / self._flop_rate, self._kv_bytes(requests, rows, context_tokens) / self._byte_rate
        )
        weights = w.dense_bytes + self._expert_weight_bytes(rows)
        work_s = weights / self._byte_rate + matrix_s + attention_s
        sent = self._exchanged_bytes(rows, w.layers) + self._exchanged_bytes(draft_rows, w.draft.stages)
        return self._exposed_s + np.maximum(self._transport_s(sent / balance), work_s)

    def prefill_seconds(self, rows: float, kept_rows: float, context_tokens: float, balance: float = 1.0) -> float:
        """A prefill step of `rows` rows on the fullest rank, of which `kept_rows` also run through the decoder half.

        context_tokens: mean position of the rows. One of the kept rows draws; its head is left out.
        """
        w = self.work
        matrix_s = self._dense_s(rows, w.encoder.dense_params) + self._dense_s(kept_rows, w.decoder.dense_params)
        matrix_s += self._experts_s(rows, w.encoder.layers, balance)
        scores = rows * self._row_attention_flops(w.encoder, context_tokens)
        sent = self._exchanged_bytes(rows, w.encoder.layers)
        if kept_rows:
            matrix_s += self._experts_s(kept_rows, w.decoder.layers, balance)
            scores += kept_rows * self._row_attention_flops(w.decoder, context_tokens)
            sent += self._exchanged_bytes(kept_rows, w.decoder.layers)
        weights = w.dense_bytes + float(self._expert_weight_bytes(np.array(rows)))
        work_s = weights / self._byte_rate + matrix_s + scores / self._flop_rate
        return self._exposed_s + max(self._transport_s(sent / balance), work_s)

    # ---- rates -------------------------------------------------------------------------------------------------------

    @property
    def _flop_rate(self) -> float:
        return self.calibration.efficiency * self.device.fp8.value

    @property
    def _byte_rate(self) -> float:
        return _MEMORY_EFFICIENCY * self.device.memory_rate.value

    @property
    def _latency_s(self) -> float:
        return (self.work.layers + self.work.draft.stages) * self.calibration.layer_latency_s

    @property
    def _exposed_s(self) -> float:
        return _EXPOSED_SHARE * self._latency_s

    def _transport_s[T: (float, FloatArray)](self, sent_bytes: T) -> T:
        if self.num_devices == 1:
            return sent_bytes * 0.0
        latency_s = (1 - _EXPOSED_SHARE) * self._latency_s
        return latency_s + sent_bytes / self.device.exchange_rate(self.num_devices)

    # ---- work --------------------------------------------------------------------------------------------------------

    def _dense_s[T: (float, FloatArray)](self, rows: T, params: int) -> T:
        return rows * (2 * params / self._flop_rate)

    def _experts_s[T: (float, FloatArray)](self, rows: T, layers: int, balance: float) -> T:
        w = self.work
        return self._tiled_s(rows / balance, layers, w.num_experts, w.experts_per_row)

    def _draft_s(self, rows: FloatArray, balance: float) -> FloatArray:
        d = self.work.draft
        experts = self._tiled_s(rows / balance, d.stages, d.num_experts, d.experts_per_row) * (rows > 0)
        return experts + self._dense_s(rows, d.dense_params + self.work.head_params)

    def _tiled_s[T: (float, FloatArray)](self, rows: T, layers: int, num_experts: int, per_row: int) -> T:
        """Experts of one rank; a last tile is half empty on average."""
        local_experts = num_experts / self.num_devices
        expert_rows = rows * (self.num_devices * per_row / num_experts) + (_TILE_ROWS - 1) / 2
        return expert_rows * (2 * layers * local_experts * self.work.expert_params / self._flop_rate)

    def _expert_weight_bytes(self, rows: FloatArray) -> FloatArray:
        """Bytes of the routed experts of one rank that its group's rows are expected to touch."""
        w = self.work
        all_experts = w.layers * w.num_experts / self.num_devices * w.expert_bytes
        of_one_row = math.log1p(-w.experts_per_row / w.num_experts)
        return -np.expm1(rows * (self.num_devices * of_one_row)) * all_experts

    def _row_attention_flops(self, half: HalfWork, context_tokens: float) -> float:
        w = self.work
        keys = half.layers * w.window + (half.layers - half.window_layers) * min(w.selected, context_tokens)
        scored = half.scan_per_token * context_tokens + half.candidate_scans * min(w.candidates, context_tokens)
        return keys * w.key_flops + scored * w.score_flops

    def _kv_bytes(self, requests: FloatArray, rows: FloatArray, context_tokens: float) -> FloatArray:
        """Read by one decoding step of one rank: a request's rows share its index keys and windows."""
        w = self.work
        scan = (w.encoder.scan_per_token + w.decoder.scan_per_token) * context_tokens * w.index_bytes
        selecting = w.layers - w.encoder.window_layers - w.decoder.window_layers
        picked = selecting * min(w.selected, context_tokens) * w.entry_bytes
        candidates = w.decoder.candidate_scans * min(w.candidates, context_tokens) * w.index_bytes
        return requests * (scan + w.layers * w.window * w.window_bytes) + rows * (picked + candidates)

    def _exchanged_bytes[T: (float, FloatArray)](self, rows: T, layers: int) -> T:
        """A row goes once to each other device that holds one of its experts."""
        others = (self.num_devices - 1) * (1 - (1 - 1 / self.num_devices) ** self.work.experts_per_row)
        return rows * (layers * others * self.work.exchange_bytes)
