"""A plan as integer columns of one length, so that a device takes a step in one copy.

    slot, position, token, offset, segment, held ..  [P]     one value a row, padding rows at the end
    commit, decoder_commit, pair_commit, ..          [n]     rows whose keys go into a ring
    table                                        [1 + S, B]  block numbers; row 0 is that of padding rows: none

`StepShape` is what fixes the size of every tensor and every branch of the device's work: two steps of one shape run the
same kernels on other numbers. A *fixed* shape is made for a captured graph: it has room for any step that fits into it,
and rows, commits and table columns that the step at hand lacks are padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.cache.layout import CacheLayout
from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.scheduling.plan import Content, StepPlan, TokenSource, Writes

if TYPE_CHECKING:
    from deepinfer_core.model.step_split import StepSplit

__all__ = [
    "NOTHING_VISIBLE",
    "NO_ROW",
    "StepArrays",
    "StepShape",
    "committed_rows",
    "fits_fixed_shape",
    "kept_rows",
    "pack_step",
    "staged",
    "upload",
]

NOTHING_VISIBLE = 2**62  # as a lower bound of what a row sees
NO_ROW = -1  # padding of a list of rows

type Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class StepShape:
    """Sizes and branches of one step; hashable, so that graphs can be kept by it."""

    num_rows: int  # R rows that the experts get: the real ones, all of a fixed shape
    padded_rows: int  # P
    table_columns: int  # B
    most_visible: int  # upper bound of the largest position + 1
    num_kept: int  # rows that go through the decoder half
    has_own_decoder: bool  # the decoder half sees other keys, or is done by fewer rows
    has_held: bool
    has_images: bool
    is_fixed: bool = False

    @classmethod
    def fixed(cls, rows: int, table_columns: int) -> StepShape:
        """Room for steps of up to `rows` rows, all sampled, with block tables of up to `table_columns`."""
        most = table_columns * BLOCK_TOKENS
        return cls(rows, rows, table_columns, most, rows, True, True, False, is_fixed=True)


@dataclass(frozen=True, eq=False)
class StepArrays:
    """The columns of one step on the host, by name; the table, whose height no shape fixes, is the last."""

    shape: StepShape
    columns: Mapping[str, Int64]

    @property
    def size(self) -> int:
        """Values of all columns."""
        return sum(column.size for column in self.columns.values())

    @property
    def largest_size(self) -> int:
        """Values that a step of this shape can have: a table row for each row of the step."""
        return self.size + (1 + self.shape.padded_rows) * self.shape.table_columns - self.columns["table"].size

    def write_to(self, target: Int64) -> None:
        """Lay the columns one after the other into target [size]."""
        start = 0
        for column in self.columns.values():
            target[start : start + column.size] = column.ravel()
            start += column.size

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The columns as views of what `write_to` filled."""
        found: dict[str, Tensor] = {}
        start = 0
        for name, column in self.columns.items():
            stop = None if name == "table" else start + column.size  # the table takes all that is left
            found[name] = flat[start:stop].view(-1, *column.shape[1:])
            start += column.size
        return found


def staged(arrays: StepArrays, device: torch.device) -> Tensor:
    """All columns in host memory that `device` can copy from while the host goes on; see `StepArrays.views`."""
    # torch keeps a pinned block until the copy out of it is done, then uses it again.
    host = torch.empty(arrays.size, dtype=torch.int64, pin_memory=device.type == "cuda")
    arrays.write_to(host.numpy())
    return host


def upload(arrays: StepArrays, device: torch.device) -> Tensor:
    """All columns on `device`, in one copy that nobody waits for."""
    return staged(arrays, device).to(device, non_blocking=True)


def fits_fixed_shape(plan: StepPlan, layout: CacheLayout) -> bool:
    """Whether the step is of the kind that fixed shapes are made for: every row is sampled, no row is an image, and a
    segment's rows fit into its rings.
    """
    lengths = np.diff(plan.segment_start)
    capacity = min(layout.window.capacity, layout.pairs.capacity, layout.history.capacity)
    return bool(
        plan.num_rows
        and plan.row_sample.all()
        and not plan.row_content.any()
        and lengths.max() <= capacity
        and len(kept_rows(plan, layout, mask_decoder=False)) == plan.num_rows
    )


def pack_step(
    plan: StepPlan,
    layout: CacheLayout,
    row_multiple: int,
    *,
    mask_decoder: bool = False,
    fixed: StepShape | None = None,
    split: StepSplit | None = None,
) -> StepArrays:
    """The columns of `plan`; `fixed`: laid out for that shape, which the plan must fit into.

    `split`: this process computes a part of the rows; the columns are still those of all rows, and say which.
    """
    kept = kept_rows(plan, layout, mask_decoder=mask_decoder)
    shape = _shape(plan, kept, row_multiple) if fixed is None else fixed
    columns = dict(_columns(plan, layout, shape, kept, row_multiple, split))
    return StepArrays(shape, columns)


def _shape(plan: StepPlan, kept: Int64, row_multiple: int) -> StepShape:
    most_visible = int(plan.row_position.max(initial=0)) + 1
    return StepShape(
        num_rows=plan.num_rows,
        padded_rows=_up_to(max(plan.num_rows, plan.padded_rows, 1), row_multiple),
        table_columns=min(plan.block_tables.shape[1], most_visible // BLOCK_TOKENS + 1),
        most_visible=most_visible,
        num_kept=len(kept),
        has_own_decoder=len(kept) < plan.num_rows or bool((plan.segment_decoder_from > 0).any()),
        has_held=bool((plan.row_source == TokenSource.HELD).any()),
        has_images=bool((plan.row_content == Content.IMAGE).any()),
    )


def kept_rows(plan: StepPlan, layout: CacheLayout, *, mask_decoder: bool) -> Int64:
    """Rows that go through the decoder half."""
    config = layout.config
    if mask_decoder or config.decoder_start >= config.num_hidden_layers:  # without KV source there is no decoder half
        return np.arange(plan.num_rows)
    segment = np.repeat(np.arange(plan.num_segments), np.diff(plan.segment_start))
    held = plan.row_source == TokenSource.HELD
    return np.flatnonzero(held | (plan.row_position >= plan.segment_decoder_from[segment]))


def _columns(
    plan: StepPlan, layout: CacheLayout, shape: StepShape, kept: Int64, row_multiple: int, split: StepSplit | None
) -> Iterator[tuple[str, Int64]]:
    segment = np.repeat(np.arange(plan.num_segments), np.diff(plan.segment_start))  # [R]
    first_row = plan.segment_start[:-1][segment]

    def rows(values: NDArray[Any], fill: int = 0) -> Int64:
        return _filled(values, shape.padded_rows, fill)

    yield "slot", rows(plan.segment_slot[segment])
    yield "position", rows(plan.row_position)
    yield "token", rows(plan.row_token)
    yield "offset", rows(np.arange(plan.num_rows) - first_row)  # place in its segment
    yield "segment", rows(segment + 1)  # row of the table
    # A row sees nothing below these; padding rows see nothing at all.
    yield "window_from", rows(np.maximum(plan.segment_window_from, 0)[segment], NOTHING_VISIBLE)
    if shape.has_own_decoder:
        yield "decoder_from", rows(np.maximum(plan.segment_decoder_from, 0)[segment], NOTHING_VISIBLE)
    yield "writes_global", rows((plan.row_writes & Writes.GLOBAL) != 0)
    if shape.has_held:
        held = plan.row_source == TokenSource.HELD
        yield "held", rows(held)
        yield "held_segment", rows(held[first_row])
    if shape.has_images:
        yield "image", rows(plan.row_content == Content.IMAGE)

    def listed(values: Int64) -> Int64:
        return _filled(values, shape.padded_rows, NO_ROW) if shape.is_fixed else values

    everything = np.arange(plan.num_rows)
    yield "commit", listed(committed_rows(plan, everything, layout.window.capacity))
    yield "pair_commit", listed(committed_rows(plan, everything, layout.pairs.capacity))
    yield "history_commit", listed(committed_rows(plan, everything, layout.history.capacity))
    if split is not None:
        yield from _picked("mine", everything, split.encoder.mine, row_multiple)
    if shape.has_own_decoder:
        commit = committed_rows(plan, kept, layout.window.capacity)
        yield "decoder_commit", listed(commit)
        yield "decoder_commit_row", listed(kept[commit])
    if 0 < shape.num_kept < shape.num_rows:
        mine = np.arange(len(kept)) if split is None or split.decoder is None else split.decoder.mine
        yield from _picked("kept", kept, mine, row_multiple)
    sampled = np.flatnonzero(plan.row_sample[kept])
    for name, found in (("sample", sampled), ("sample_row", kept[sampled])):
        yield name, _filled(found, shape.padded_rows, 0) if shape.is_fixed else found
    yield "table", _table(plan, shape)


def committed_rows(plan: StepPlan, rows: Int64, capacity: int) -> Int64:
    """Numbers among `rows` of the last `capacity` of every segment that may write windows."""
    ends = np.repeat(plan.segment_start[1:], np.diff(plan.segment_start))[rows]
    writes = (plan.row_writes[rows] & Writes.WINDOW) != 0
    return np.flatnonzero(writes & (ends - rows <= capacity))


def _picked(name: str, rows: Int64, numbers: Int64, row_multiple: int) -> Iterator[tuple[str, Int64]]:
    """Those of `rows` that have the numbers, and the numbers; padding repeats the first row and has no number."""
    padded = _up_to(len(numbers), row_multiple)
    yield name, _filled(rows[numbers], padded, int(rows[numbers[0]]))
    yield f"{name}_number", _filled(numbers, padded, NO_ROW)


def _table(plan: StepPlan, shape: StepShape) -> Int64:
    tables = plan.block_tables[:, : shape.table_columns]
    found = np.full((1 + len(tables), shape.table_columns), -1, np.int64)
    found[1:, : tables.shape[1]] = tables
    return found


def _filled(values: NDArray[Any], length: int, fill: int) -> Int64:
    """int64 [length]: `values`, then `fill`."""
    found = np.full(length, fill, np.int64)
    found[: len(values)] = values
    return found


def _up_to(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple
