"""`Flight`: what a launched plan will change, known before its result is.

    decode slot    in flight += 1 .. 1 + drafts
    prompt chunk   next_position moves on; after the last one the slot decodes, and 1 token is in flight

Landing takes the tokens in flight back, for slots that still have the tenant of the launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_core.scheduling.plan import FloatArray, Int32Array, Int64Array, StepPlan
from deepinfer_core.scheduling.planner import StepSegments
from deepinfer_core.scheduling.slots import Phase, SlotTable

__all__ = ["Flight", "land", "launch"]


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan that is launched and not committed."""

    plan: StepPlan
    slots: Int64Array  # [M] slots that draw tokens
    generation: Int32Array  # [M]
    lengths: Int64Array  # [M] drafts under verification
    decode_slots: Int64Array  # [D] the slots among them that can have any, ascending
    survival: FloatArray  # [drafts, D] what was known of those drafts
    computed: tuple[tuple[int, int, int], ...]  # (slot, generation, prompt rows below this position are computed)

    def planned_survival(self, slots: Int64Array) -> FloatArray:
        """[drafts, N] what was known of the drafts of `slots` [N], which had some under verification."""
        column = np.searchsorted(self.decode_slots, slots)
        return np.take(self.survival, np.minimum(column, len(self.decode_slots) - 1), axis=1)


def launch(table: SlotTable, plan: StepPlan, segments: StepSegments) -> Flight:
    """Note in `table` that `plan`, built from `segments`, is on its way."""
    decode = segments.decode
    slots, lengths = decode.slots, decode.lengths
    if table.num_drafts:
        table.held_drafts[slots] = decode.proposals
    for admission in segments.admissions:
        table.announced[admission.slot] = True
    for segment in segments.prefill:
        table.next_position[segment.slot] = segment.first + segment.num_rows
    sampling = [segment for segment in segments.prefill if segment.samples]
    if sampling:
        new = np.array([segment.slot for segment in sampling], np.int64)
        table.phase[new] = Phase.DECODE
        table.held_drafts[new] = [segment.proposals for segment in sampling]
        slots = np.concatenate((slots, new))
        lengths = np.concatenate((lengths, np.zeros(len(new), np.int64)))
    table.in_flight_min[slots] += 1
    table.in_flight_max[slots] += lengths + 1
    computed = tuple((s.slot, int(table.generation[s.slot]), s.first + s.num_rows) for s in segments.prefill)
    return Flight(plan, slots, table.generation[slots], lengths, decode.slots, decode.survival, computed)


def land(table: SlotTable, flight: Flight) -> None:
    """Take the counts of `flight` back."""
    slots, lengths = flight.slots, flight.lengths
    same = table.generation[slots] == flight.generation
    if not same.all():
        slots, lengths = slots[same], lengths[same]
    table.in_flight_min[slots] -= 1
    table.in_flight_max[slots] -= lengths + 1
