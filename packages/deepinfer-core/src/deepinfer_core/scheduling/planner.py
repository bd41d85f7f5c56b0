"""`Planner`: what the next step computes. Decode first, prefill fills the rest, newcomers come in while there is room.

    rows of a step   | anchors of all decoding requests | drafts | chunks of running prompts | chunks of newcomers |
                     |<------------------------------ max_num_batched_tokens ------------------------------------->|

Drafts leave a quarter of the step, rounded up, to prompts that are waiting for rows, so that neither starves the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_core.config.scheduler import BLOCK_TOKENS, SchedulerConfig
from deepinfer_core.errors import EngineError
from deepinfer_core.scheduling.guard import PromptRows
from deepinfer_core.scheduling.lifecycle import Lifecycle
from deepinfer_core.scheduling.plan import Admission, FloatArray, Int32Array, Int64Array, UInt32Mask
from deepinfer_core.scheduling.request import ConstrainedRows, FinishReason
from deepinfer_core.scheduling.rows import DecodeSegments, PrefillSegment
from deepinfer_core.scheduling.slots import Phase
from deepinfer_core.scheduling.speculation import SpeculationPlanner

__all__ = ["Planner", "StepSegments"]

_PROMPT_SHARE = 4  # of the rows of a step, one in so many is kept from drafts while prompts wait
# Scalars of the table's type: numpy takes twice as long to compare with an IntEnum.
_PREFILL, _DECODE = np.uint8(Phase.PREFILL), np.uint8(Phase.DECODE)


@dataclass(frozen=True, slots=True)
class StepSegments:
    """The segments of a step and who came in for it."""

    decode: DecodeSegments
    prefill: list[PrefillSegment]
    admissions: tuple[Admission, ...]

    @property
    def is_empty(self) -> bool:
        return len(self.decode.slots) == 0 and not self.prefill


class Planner:
    """Chooses segments from the state of `Lifecycle`, taking slots and blocks as needed."""

    def __init__(self, config: SchedulerConfig, lifecycle: Lifecycle, speculation: SpeculationPlanner) -> None:
        self._life = lifecycle
        self._speculation = speculation
        self._max_rows = config.max_num_batched_tokens
        self._prompts_wait = False  # they took all rows that the last step had for them
        self._max_chunk = config.max_prefill_chunk_tokens or config.max_num_batched_tokens

    def next_segments(self) -> StepSegments:
        """Segments of the next step."""
        suspect = self._life.quarantine.next_suspect()
        if suspect is not None:
            admission = self._life.admit_suspect(suspect)
            segment = None if admission is None else self._chunk(admission.slot, self._max_rows)
            if admission is None or segment is None:
                return StepSegments(_no_decode(), [], ())
            return StepSegments(_no_decode(), [segment], (admission,))
        decode = self._decode()
        num_rows = len(decode.slots) + (int(decode.lengths.sum()) if self._life.table.num_drafts else 0)
        prefill, admissions = self._prefill(self._max_rows - num_rows)
        self._prompts_wait = num_rows + sum(segment.num_rows for segment in prefill) == self._max_rows
        return StepSegments(decode, prefill, admissions)

    # ---- decode -----------------------------------------------------------------------------------------------------

    def _decode(self) -> DecodeSegments:
        table = self._life.table
        slots = self._ready_slots()
        anchor = table.length[slots] + table.in_flight_max[slots]
        anchor -= 1
        lengths, survival = self._drafts(slots, anchor)
        kept = self._hold_memory(slots, anchor, lengths)
        if kept is not None:
            slots, anchor, lengths = slots[kept], anchor[kept], lengths[kept]
            survival = np.take(survival, kept, axis=1)
        decode = DecodeSegments(slots, anchor, lengths, self._proposals(slots), survival)
        return self._constrain(decode) if table.num_constrained else decode

    def _drafts(self, slots: Int64Array, anchor: Int64Array) -> tuple[Int64Array, FloatArray]:
        """How many drafts of each of `slots` [D] to verify, and what is known of all of them [drafts, D]."""
        table = self._life.table
        if table.num_drafts == 0:
            return np.zeros(len(slots), np.int64), np.zeros((0, len(slots)), np.float32)
        held = table.held_drafts[slots]
        reserved = min(self._waiting_prompt_rows(), -(-(self._max_rows - len(slots)) // _PROMPT_SHARE))
        prompts = PromptRows(reserved, self._prompts_wait)
        if not held.any():
            nothing = np.zeros((table.num_drafts, len(slots)), np.float32)  # nobody will ask what was known of drafts
            return self._speculation.no_lengths(len(slots), prompts), nothing
        caps = np.minimum(held, table.limit[slots] - 2 - anchor)
        # np.take along the long axis is four times as fast as indexing with [:, slots]
        survival = np.take(table.survival, slots, axis=1)
        stale = np.take(table.stale_survival, slots, axis=1) if self._speculation.needs_stale else survival
        room = self._max_rows - len(slots) - reserved
        return self._speculation.lengths(survival, stale, caps, prompts, room), survival

    def _ready_slots(self) -> Int64Array:
        """Slots that can draw one more token for certain: no launched step can already have ended them by length."""
        table = self._life.table
        ready = table.length + table.in_flight_max < table.limit
        ready &= table.phase == _DECODE
        if table.num_constrained:
            ready &= ~(table.constrained & (table.in_flight_max > 0))
        alone = self._life.quarantine.alone
        if alone is not None:
            ready &= table.number == alone.number
        return ready.nonzero()[0]

    def _proposals(self, slots: Int64Array) -> Int32Array:
        """Drafts to propose after this step: no more than could still be verified before the limit."""
        table = self._life.table
        if table.num_drafts == 0:
            return np.zeros(len(slots), np.int32)
        usable = table.limit[slots] - 2 - table.length[slots] - table.in_flight_min[slots]
        np.minimum(usable, self._speculation.proposals(len(slots)), out=usable)
        return np.maximum(usable, 0, out=usable).astype(np.int32)

    def _hold_memory(self, slots: Int64Array, anchor: Int64Array, lengths: Int64Array) -> Int64Array | None:
        """See to it that every row has a block; `lengths` is cut where memory is short.

        Returns the indices of requests that keep their slots, None for all.
        """
        table = self._life.table
        short = (anchor + lengths >= table.num_blocks[slots] * BLOCK_TOKENS).nonzero()[0]
        if len(short) == 0:
            return None
        releases = len(self._life.releases)
        columns = (short, slots[short], table.num_blocks[slots[short]], anchor[short], lengths[short])
        for i, slot, have, position, num_drafts in zip(*(column.tolist() for column in columns), strict=True):
            if table.requests[slot] is not None:  # it may have been preempted for one before it
                lengths[i] = self._grow(slot, have, position, num_drafts)
        if len(self._life.releases) == releases:
            return None
        return (table.phase[slots] == _DECODE).nonzero()[0]

    def _grow(self, slot: int, have: int, anchor: int, num_drafts: int) -> int:
        """More than the `have` blocks of `slot`: for the anchor and, if there are any left, its drafts.

        Returns how many drafts have a place.

        Takes memory from the least urgent request, which may be this one.
        """
        life, pool = self._life, self._life.ledger.pool
        wanted = (anchor + num_drafts) // BLOCK_TOKENS + 1
        if wanted - have > pool.num_available:
            wanted = max(have, anchor // BLOCK_TOKENS + 1)
            num_drafts = min(num_drafts, wanted * BLOCK_TOKENS - 1 - anchor)
        while wanted - have > pool.num_available:
            victim = life.table.least_urgent()
            life.preempt(victim)
            if victim == slot:
                return 0
        try:
            life.ledger.grow(slot, wanted - have)
        except Exception as error:
            life.finish(slot, FinishReason.ERROR, error=f"no cache block could be allocated: {error}")
        return num_drafts

    # ---- constraints ------------------------------------------------------------------------------------------------

    def _constrain(self, decode: DecodeSegments) -> DecodeSegments:
        """Ask constrained requests for their drafts and masks; one whose constraint fails drops out."""
        table = self._life.table
        answers = {
            slot: self._constrained_rows(slot, int(decode.lengths[i]))
            for i, slot in enumerate(decode.slots.tolist())
            if table.constrained[slot]
        }
        kept = np.array([i for i, slot in enumerate(decode.slots.tolist()) if answers.get(slot, True)], np.int64)
        slots, lengths = decode.slots[kept], decode.lengths[kept]
        given: dict[int, list[int]] = {}
        masks: dict[tuple[int, int], UInt32Mask] = {}
        for i, slot in enumerate(slots.tolist()):
            answer = answers.get(slot)
            if answer is None:
                continue
            drafts = list(answer.drafts)
            lengths[i] = len(drafts)
            if drafts != table.request(slot).drafts[: len(drafts)]:
                given[i] = drafts
            masks.update({(i, row): mask for row, mask in enumerate(answer.masks) if mask is not None})
        proposals, survival = decode.proposals[kept], np.take(decode.survival, kept, axis=1)
        return DecodeSegments(slots, decode.anchor[kept], lengths, proposals, survival, given, masks)

    def _constrained_rows(self, slot: int, room: int) -> ConstrainedRows | None:
        """What the constraint of `slot` makes of its drafts. None: it failed, and the request ended with its error."""
        request = self._life.table.request(slot)
        try:
            if request.constraint is None:
                raise EngineError("the request has none")
            answer = request.constraint.rows(request.drafts[:room], room)
            if len(answer.drafts) > room or len(answer.masks) != len(answer.drafts) + 1:
                raise EngineError(f"it made {len(answer.drafts)} drafts, {len(answer.masks)} masks; room is {room}")
        except Exception as error:
            self._life.finish(slot, FinishReason.ERROR, error=f"the output constraint failed: {error}")
            return None
        return answer

    # ---- prefill ----------------------------------------------------------------------------------------------------

    def _prefilling(self) -> list[int]:
        """Slots with prompt rows to go, most urgent first."""
        table = self._life.table
        slots = (table.phase == _PREFILL).nonzero()[0]
        if len(slots) == 0:
            return []
        alone = self._life.quarantine.alone
        if alone is not None:
            slots = slots[table.number[slots] == alone.number]
        return slots[np.argsort(table.urgency[slots])].tolist()

    def _waiting_prompt_rows(self) -> int:
        """Prompt rows that could run in this step, at most a full step."""
        if self._life.quarantine.alone is None and self._life.may_admit():
            return self._max_rows
        table = self._life.table
        slots = self._prefilling()
        return int((table.length[slots] - table.next_position[slots]).sum()) if slots else 0

    def _prefill(self, rows: int) -> tuple[list[PrefillSegment], tuple[Admission, ...]]:
        segments: list[PrefillSegment] = []
        for slot in self._prefilling():
            if rows == 0:
                break
            segment = self._chunk(slot, rows)
            if segment is not None:
                segments.append(segment)
                rows -= segment.num_rows
        admissions: list[Admission] = []
        while rows and self._life.quarantine.alone is None:
            admission = self._life.admit_next()
            if admission is None:
                break
            segment = self._chunk(admission.slot, rows)
            if segment is not None:
                admissions.append(admission)
                segments.append(segment)
                rows -= segment.num_rows
        return segments, tuple(admissions)

    def _chunk(self, slot: int, rows: int) -> PrefillSegment | None:
        """The next rows of a prompt. None: they were the last, and the constraint of the token to draw failed."""
        table = self._life.table
        first = int(table.next_position[slot])
        left = int(table.length[slot]) - first
        count = min(left, rows, self._max_chunk)
        if count < left:
            return PrefillSegment(slot, first, count, samples=False)
        mask = None
        if table.constrained[slot]:
            answer = self._constrained_rows(slot, 0)
            if answer is None:
                return None
            mask = answer.masks[0]
        usable = int(table.limit[slot]) - 2 - first - left  # as in _proposals; the token to draw is the next anchor
        proposals = max(0, min(usable, self._speculation.first_proposals))
        return PrefillSegment(slot, first, count, samples=True, proposals=proposals, mask=mask)


def _no_decode() -> DecodeSegments:
    none = np.zeros(0, np.int64)
    return DecodeSegments(none, none, none, none.astype(np.int32), np.zeros((0, 0), np.float32))
