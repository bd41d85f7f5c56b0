"""Rows of a plan from its segments: the part of planning that is only arithmetic on arrays.

    segment i = rows first[i] .. first[i] + count[i] - 1

Decode segments come first, prefill segments after them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deepinfer_core.scheduling.plan import (
    Admission,
    BoolArray,
    Content,
    FloatArray,
    Int32Array,
    Int64Array,
    Release,
    RowKind,
    StepPlan,
    TokenSource,
    UInt8Array,
    UInt32Mask,
    Writes,
)
from deepinfer_core.scheduling.slots import SlotTable

__all__ = ["DecodeSegments", "PrefillSegment", "build_plan"]

# What the rows of a decode segment are, the first one's kind aside: source, kind, content, writes, sample.
_DECODE_ROW = np.array(
    [[TokenSource.HELD], [RowKind.DRAFT], [Content.TEXT], [Writes.GLOBAL | Writes.WINDOW], [True]], np.uint8
)


@dataclass(frozen=True, slots=True)
class DecodeSegments:
    """D slots that verify drafts and draw a token each."""

    slots: Int64Array  # [D]
    anchor: Int64Array  # [D] largest position that the anchor can turn out to have
    lengths: Int64Array  # [D] drafts under verification
    proposals: Int32Array  # [D] drafts to propose afterwards
    survival: FloatArray  # [drafts, D] what was known of the drafts under verification
    given: dict[int, list[int]] = field(
        default_factory=dict[int, list[int]]
    )  # index in D -> drafts set by a constraint
    masks: dict[tuple[int, int], UInt32Mask] = field(default_factory=dict[tuple[int, int], UInt32Mask])
    # masks: (index in D, row in the segment) -> allowed tokens


class PrefillSegment(NamedTuple):
    """Rows of known tokens of one slot; `samples`: the last known token is among them, so a token is drawn."""

    slot: int
    first: int
    num_rows: int
    samples: bool
    proposals: int = 0
    mask: UInt32Mask | None = None  # of the drawn token


def build_plan(
    step: int,
    table: SlotTable,
    decode: DecodeSegments,
    prefill: list[PrefillSegment],
    admissions: tuple[Admission, ...],
    releases: tuple[Release, ...],
    *,
    stores_draft_context: bool = True,
) -> StepPlan:
    """The plan of one step. Arrays are fresh: later changes of `table` don't reach them.

    Without `stores_draft_context` the drafter's context of these slots starts anew behind the rows of the step.
    """
    num_decode = len(decode.slots)
    slots, first, counts, proposals = decode.slots, decode.anchor, decode.lengths + 1, decode.proposals
    if prefill:
        slots = np.concatenate((slots, np.array([s.slot for s in prefill], np.int64)))
        first = np.concatenate((first, np.array([s.first for s in prefill], np.int64)))
        counts = np.concatenate((counts, np.array([s.num_rows for s in prefill], np.int64)))
        proposals = np.concatenate((proposals, np.array([s.proposals for s in prefill], np.int32)))
    start = np.zeros(len(slots) + 1, np.int64)
    np.cumsum(counts, out=start[1:])
    index = np.arange(int(start[-1]), dtype=np.int64)
    index -= np.repeat(start[:-1], counts)  # row within its segment
    position = np.repeat(first, counts)
    position += index
    rows = _Rows.of_decode(index, start[:num_decode])
    masks = {int(start[i]) + row: mask for (i, row), mask in decode.masks.items()}
    for i, drafts in decode.given.items():
        rows.give_drafts(int(start[i]) + 1, drafts)
    for i, segment in enumerate(prefill, start=num_decode):
        rows.set_prefill(int(start[i]), segment, table)
        if segment.mask is not None:
            masks[int(start[i + 1]) - 1] = segment.mask
    if not stores_draft_context:
        table.draft_from[slots] = first + counts
    num_columns = int(table.num_blocks[slots].max(initial=0))
    return StepPlan(
        step=step,
        row_position=position,
        row_token=rows.token,
        row_source=rows.source,
        row_kind=rows.kind,
        row_content=rows.content,
        row_writes=rows.writes,
        row_sample=rows.sample,
        segment_start=start.astype(np.int32),
        segment_slot=slots.astype(np.int32),
        segment_generation=table.generation[slots],
        segment_window_from=table.window_from[slots],
        segment_decoder_from=table.decoder_from[slots],
        segment_num_drafts=proposals,
        block_tables=table.block_table[slots, :num_columns],
        admissions=admissions,
        releases=releases,
        grammar_masks=masks,
        segment_draft_from=table.draft_from[slots] if table.num_drafts else None,
        stores_draft_context=stores_draft_context,
    )


@dataclass(slots=True)
class _Rows:
    """The columns of a plan [R], set up for decode rows and changed where rows are something else."""

    token: Int64Array
    source: UInt8Array
    kind: UInt8Array
    content: UInt8Array
    writes: UInt8Array
    sample: BoolArray

    @classmethod
    def of_decode(cls, index: Int64Array, anchors: Int64Array) -> _Rows:
        """`index` [R] = row within its segment, which is its place in the held block; taken over. anchors: rows [D]."""
        columns = np.empty((len(_DECODE_ROW), len(index)), np.uint8)
        columns[:] = _DECODE_ROW
        source, kind, content, writes, sample = columns
        kind[anchors] = RowKind.DECODE
        return cls(index, source, kind, content, writes, sample.view(np.bool_))

    def give_drafts(self, begin: int, drafts: list[int]) -> None:
        """Drafts that a constraint chose stand in the plan themselves."""
        self.token[begin : begin + len(drafts)] = drafts
        self.source[begin : begin + len(drafts)] = TokenSource.GIVEN

    def set_prefill(self, begin: int, segment: PrefillSegment, table: SlotTable) -> None:
        """Rows of known tokens, the ones below the shared prefix as replay."""
        request = table.request(segment.slot)
        rows = slice(begin, begin + segment.num_rows)
        positions = slice(segment.first, segment.first + segment.num_rows)
        self.token[rows] = request.tokens[positions]
        self.source[rows] = TokenSource.GIVEN
        self.kind[rows] = RowKind.PREFILL
        if request.content is not None:
            kinds = request.content[positions]  # shorter where rows lie beyond the prompt
            self.content[begin : begin + len(kinds)] = kinds
        replayed = max(0, min(int(table.shared_tokens[segment.slot]) - segment.first, segment.num_rows))
        self.kind[begin : begin + replayed] = RowKind.REPLAY
        self.writes[begin : begin + replayed] = Writes.WINDOW
        self.sample[rows] = False
        if request.all_rows_wanted:  # every prompt row scores the prompt's next token
            scored = max(0, min(request.prompt_tokens - 1 - segment.first, segment.num_rows))
            self.sample[begin : begin + scored] = True
        self.sample[begin + segment.num_rows - 1] |= segment.samples
