"""Rows of a plan from its segments: the part of planning that is only arithmetic on arrays.

    segment i = rows first[i] .. first[i] + count[i] - 1

Decode segments come first, prefill segments after them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deepinfer_core.scheduling.plan import (
    Admission,
    Content,
    Int32Array,
    Int64Array,
    Release,
    RowKind,
    StepPlan,
    TokenSource,
    UInt32Mask,
    Writes,
)
from deepinfer_core.scheduling.slots import SlotTable

__all__ = ["DecodeSegments", "PrefillSegment", "build_plan"]

_BOTH = Writes.GLOBAL | Writes.WINDOW


@dataclass(frozen=True, slots=True)
class DecodeSegments:
    """D slots that verify drafts and draw a token each."""

    slots: Int64Array  # [D]
    anchor: Int64Array  # [D] largest position that the anchor can turn out to have
    lengths: Int64Array  # [D] drafts under verification
    proposals: Int32Array  # [D] drafts to propose afterwards
    given: dict[int, list[int]] = field(
        default_factory=dict[int, list[int]]
    )  # index in D -> drafts set by a constraint
    masks: dict[tuple[int, int], UInt32Mask] = field(default_factory=dict[tuple[int, int], UInt32Mask])
    # masks: (index in D, row in the segment) -> allowed tokens


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Rows of known tokens of one slot; `samples`: the last known token is among them, so a token is drawn."""

    slot: int
    first: int
    count: int
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
) -> StepPlan:
    """The plan of one step. Arrays are fresh: later changes of `table` don't reach them."""
    num_decode = len(decode.slots)
    slots = np.concatenate((decode.slots, np.array([s.slot for s in prefill], np.int64)))
    first = np.concatenate((decode.anchor, np.array([s.first for s in prefill], np.int64)))
    counts = np.concatenate((decode.lengths + 1, np.array([s.count for s in prefill], np.int64)))
    start = np.zeros(len(slots) + 1, np.int64)
    np.cumsum(counts, out=start[1:])
    num_rows = int(start[-1])
    num_decode_rows = int(start[num_decode])
    index = np.arange(num_rows) - np.repeat(start[:-1], counts)  # row within its segment

    row_token = index.copy()  # a held row names its place in the held block
    row_source = np.full(num_rows, TokenSource.HELD, np.uint8)
    row_kind = np.where(index == 0, np.uint8(RowKind.DECODE), np.uint8(RowKind.DRAFT))
    row_content = np.full(num_rows, Content.TEXT, np.uint8)
    row_writes = np.full(num_rows, _BOTH, np.uint8)
    row_sample = np.ones(num_rows, np.bool_)
    row_sample[num_decode_rows:] = False
    masks = {int(start[i]) + row: mask for (i, row), mask in decode.masks.items()}
    for i, drafts in decode.given.items():
        rows = slice(int(start[i]) + 1, int(start[i + 1]))
        row_token[rows] = drafts
        row_source[rows] = TokenSource.GIVEN

    row_source[num_decode_rows:] = TokenSource.GIVEN
    row_kind[num_decode_rows:] = RowKind.PREFILL
    for i, segment in enumerate(prefill, start=num_decode):
        begin, end = int(start[i]), int(start[i + 1])
        request = table.request(segment.slot)
        positions = slice(segment.first, segment.first + segment.count)
        row_token[begin:end] = request.tokens[positions]
        if request.content is not None:
            kinds = request.content[positions]
            row_content[begin : begin + len(kinds)] = kinds
        replayed = max(0, min(int(table.shared_tokens[segment.slot]) - segment.first, segment.count))
        row_kind[begin : begin + replayed] = RowKind.REPLAY
        row_writes[begin : begin + replayed] = Writes.WINDOW
        if request.all_rows_wanted:  # every prompt row scores the prompt's next token
            row_sample[begin:end] = np.arange(segment.first, segment.first + segment.count) < request.prompt_tokens - 1
        row_sample[end - 1] |= segment.samples
        if segment.mask is not None:
            masks[end - 1] = segment.mask

    num_columns = int(table.num_blocks[slots].max(initial=0))
    return StepPlan(
        step=step,
        row_position=np.repeat(first, counts) + index,
        row_token=row_token,
        row_source=row_source,
        row_kind=row_kind,
        row_content=row_content,
        row_writes=row_writes,
        row_sample=row_sample,
        segment_start=start.astype(np.int32),
        segment_slot=slots.astype(np.int32),
        segment_generation=table.generation[slots],
        segment_window_from=table.window_from[slots],
        segment_decoder_from=table.decoder_from[slots],
        segment_num_drafts=np.concatenate((decode.proposals, np.array([s.proposals for s in prefill], np.int32))),
        block_tables=table.block_table[slots, :num_columns],
        admissions=admissions,
        releases=releases,
        grammar_masks=masks,
    )
