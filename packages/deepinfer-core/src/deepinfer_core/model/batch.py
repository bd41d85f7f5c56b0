"""A step's rows as tensors: where each row reads and writes, worked out once and used by all layers.

    plan (integers)  ->  Batch
                           encoder: RowSet   every row, for the layers below the cut
                           decoder: RowSet   rows from `segment_decoder_from` on, for the cut layer and above; or None

A window key of position p is read from the scratch rows if p is a row of this step in the same set, else from the
slot's ring; ring positions at or above the first row of the segment are never read, so what rejected drafts left there
does no harm. Rows are padded to the multiple that the kernels want; padding rows see nothing and write to trash rows.

All of it is arithmetic on small integer arrays. Where the state is on the host, numpy does it, at a third of the time
that torch takes for arrays of this size; else torch does, on the device, since held tokens and positions exist only
there. Both know the same names for what is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.cache.layout import CacheLayout, RingLayout
from deepinfer_core.cache.state import ModelState
from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference.engram import DEAD_CLASS
from deepinfer_core.model.params import ModelParams
from deepinfer_core.scheduling.plan import Content, StepPlan, TokenSource, Writes

__all__ = ["Batch", "RingCommit", "RowSet", "build_batch"]

_NOTHING_VISIBLE = 2**62

type Array = Any  # numpy array or tensor, see above


@dataclass(frozen=True, eq=False)
class RingCommit:
    """Copies from scratch rows to ring rows after a layer has read its old keys."""

    source: Tensor  # [n]
    destination: Tensor  # [n]


@dataclass(frozen=True, eq=False)
class RowSet:
    """The rows that a half of the model computes: R real ones, padded to P."""

    num_rows: int  # R
    position: Tensor  # [P] int64
    slot: Tensor  # [P]
    is_image: Tensor | None  # [P] bool, None if there is no image row
    rope: Tensor  # [P, 2, rotary] window-only layers
    long_rope: Tensor  # [P, 2, rotary] layers with a compressed cache
    scratch: Tensor  # [P] window cache rows of this step's keys
    window_plan: Any  # of kernels.plan_keys
    commit: RingCommit
    blocks: Tensor  # [P, B] block numbers of the row's request
    num_visible: dict[int, Tensor]  # ratio -> [P] compressed entries that the row may see
    most_visible: int  # largest position + 1


@dataclass(frozen=True, eq=False)
class Batch:
    """One step. `layout` is that of the state it was built for."""

    layout: CacheLayout
    tokens: Tensor  # [P]
    encoder: RowSet
    decoder: RowSet | None
    decoder_rows: Tensor | None  # [P'] encoder row of each decoder row; None: the same rows
    engram_history: Tensor  # [P, N] token classes, newest first
    entry_rows: dict[int, Tensor]  # ratio -> [P] entry cache row that each row writes (or trash)
    entry_rope: dict[int, Tensor]  # ratio -> [P, 2, rotary] rope of the entry's first token
    pair_partner: Tensor  # [P] pair cache row of the position before
    pair_scratch: Tensor  # [P]
    pair_commit: RingCommit
    history_commit: RingCommit
    sample_rows: Tensor  # [N] decoder rows whose logits are wanted


def build_batch(
    plan: StepPlan, state: ModelState, params: ModelParams, kernels: Kernels, *, mask_decoder: bool = False
) -> Batch:
    """Tensors of `plan` on the device of `state`.

    `mask_decoder` computes the decoder half for all rows and only clips what the kept ones see: the oracle of skipping
    them.
    """
    builder = _Builder(plan, state, params, kernels, on_host=state.history.device.type == "cpu")
    return builder.build(mask_decoder)


class _Builder:
    def __init__(
        self, plan: StepPlan, state: ModelState, params: ModelParams, kernels: Kernels, *, on_host: bool
    ) -> None:
        self.plan, self.state, self.params, self.kernels = plan, state, params, kernels
        self.layout, self.config = state.layout, state.layout.config
        self.device = state.history.device
        self.on_host = on_host
        self.xp: Any = np if on_host else torch
        self.segment_of = np.repeat(np.arange(plan.num_segments), np.diff(plan.segment_start))  # [R]
        self.segment_first_row = plan.segment_start[:-1][self.segment_of]  # [R]
        self.padded = self.up_to_multiple(max(plan.num_rows, plan.padded_rows, 1))
        self.row = self.array(np.arange(self.padded))  # [P]
        self.most_visible = int(plan.row_position.max(initial=0)) + 1

    # ---- host and device ---------------------------------------------------------------------------------------------

    def up_to_multiple(self, rows: int) -> int:
        """`rows` and the padding that the kernels want."""
        return -(-rows // self.kernels.row_multiple) * self.kernels.row_multiple

    def array(self, values: np.ndarray[Any, Any], fill: int = 0, length: int | None = None) -> Array:
        """[R, ...] integers or flags, with rows of `fill` appended up to `length`, by default the padded one."""
        values = np.asarray(values, dtype=np.bool_ if values.dtype == np.bool_ else np.int64)
        missing = (self.padded if length is None else length) - len(values)
        if missing:
            values = np.concatenate([values, np.full((missing, *values.shape[1:]), fill, dtype=values.dtype)])
        return values if self.on_host else torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def tensor(self, values: Array) -> Tensor:
        """What the kernels take."""
        return torch.from_numpy(np.ascontiguousarray(values)) if self.on_host else values

    def view(self, tensor: Tensor) -> Array:
        """A tensor of the state or the parameters; writes go through."""
        return tensor.numpy() if self.on_host else tensor

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def build(self, mask_decoder: bool) -> Batch:
        plan, config, layout = self.plan, self.config, self.layout
        slot = self.array(plan.segment_slot[self.segment_of])
        position, tokens = self._resolve(slot)
        first = position - self.array(np.arange(plan.num_rows) - self.segment_first_row)
        window_from = self._lower_bounds(plan.segment_window_from)
        image = plan.row_content == Content.IMAGE
        is_image = self.array(image) if image.any() else None
        blocks = self._blocks()
        every_row = np.arange(plan.num_rows)
        encoder = self._row_set(every_row, position, slot, first, window_from, is_image, blocks)
        kept = every_row if mask_decoder else self._kept_rows()
        decoder, decoder_rows = encoder, None
        if len(kept) == 0:
            decoder = None
        elif len(kept) < plan.num_rows or (plan.segment_decoder_from > 0).any():
            decoder, decoder_rows = self._decoder_rows(
                kept, mask_decoder, position, slot, first, window_from, is_image, blocks
            )
        history, history_commit = self._history(tokens, position, first, slot, is_image)
        ratios = sorted({config.compress_ratios[layer] for layer in config.kv_source_layer_ids})
        pair_scratch = layout.pairs.scratch_start + self.row
        partner = self._rows_of_keys(position - 1, first, slot, pair_scratch - 1, layout.pairs)
        return Batch(
            layout=layout,
            tokens=self.tensor(tokens),
            encoder=encoder,
            decoder=decoder,
            decoder_rows=decoder_rows,
            engram_history=self.tensor(history),
            entry_rows={ratio: self._entry_rows(ratio, position, blocks) for ratio in ratios},
            entry_rope={ratio: self._entry_rope(ratio, position, encoder) for ratio in ratios},
            pair_partner=self.tensor(partner),
            pair_scratch=self.tensor(pair_scratch),
            pair_commit=self._commit(every_row, layout.pairs, position, slot),
            history_commit=history_commit,
            sample_rows=self._sample_rows(kept),
        )

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _resolve(self, slot: Array) -> tuple[Array, Array]:
        """Positions and tokens, those of held rows from the device's block of the slot."""
        plan, xp = self.plan, self.xp
        position, tokens = self.array(plan.row_position), self.array(plan.row_token)
        held_rows = plan.row_source == TokenSource.HELD
        if not held_rows.any():
            return position, tokens
        # A segment with a held anchor has its place from the device; drafts in it may be given (forced by a grammar).
        held_segment = self.array(held_rows[self.segment_first_row])
        offset = self.array(np.arange(plan.num_rows) - self.segment_first_row)
        position = xp.where(held_segment, self.view(self.state.held_position)[slot] + offset, position)
        held = self.array(held_rows)
        block = self.view(self.state.held_tokens)
        return position, xp.where(held, block[slot, xp.where(held, tokens, 0)], tokens)

    def _lower_bounds(self, of_segment: np.ndarray[Any, Any]) -> Array:
        """[P] lowest visible position of each row; padding rows see nothing."""
        return self.array(np.maximum(of_segment, 0)[self.segment_of], fill=_NOTHING_VISIBLE)

    def _blocks(self) -> Array:
        """[P, B] block table of each row, cut to what the largest position needs."""
        needed = min(self.plan.block_tables.shape[1], self.most_visible // BLOCK_TOKENS + 1)
        return self.array(self.plan.block_tables[:, :needed][self.segment_of], fill=-1)

    def _kept_rows(self) -> np.ndarray[Any, Any]:
        plan = self.plan
        if self.config.decoder_start >= self.config.num_hidden_layers:  # no KV source: there is no decoder half
            return np.arange(plan.num_rows)
        held = plan.row_source == TokenSource.HELD
        return np.flatnonzero(held | (plan.row_position >= plan.segment_decoder_from[self.segment_of]))

    def _decoder_rows(
        self,
        kept: np.ndarray[Any, Any],
        mask_decoder: bool,
        position: Array,
        slot: Array,
        first: Array,
        window_from: Array,
        is_image: Array | None,
        blocks: Array,
    ) -> tuple[RowSet, Tensor | None]:
        """Rows of the decoder half, which see no key below `segment_decoder_from`, and their encoder rows."""
        plan, xp = self.plan, self.xp
        decoder_from = self._lower_bounds(plan.segment_decoder_from)
        visible = xp.maximum(window_from, decoder_from)
        if mask_decoder:  # rows below stay what they are; nobody above reads them
            visible = xp.where(position >= decoder_from, visible, window_from)
        else:
            first = xp.maximum(first, decoder_from)
        if len(kept) == plan.num_rows:
            return self._row_set(kept, position, slot, first, visible, is_image, blocks), None
        pick = self.array(kept, fill=int(kept[0]), length=self.up_to_multiple(len(kept)))
        padding = self.array(np.arange(len(pick)) >= len(kept), length=len(pick))
        rows = self._row_set(
            kept,
            position[pick],
            slot[pick],
            first[pick],
            xp.where(padding, _NOTHING_VISIBLE, visible[pick]),
            None if is_image is None else is_image[pick],
            blocks[pick],
        )
        return rows, self.tensor(pick)

    def _row_set(
        self,
        rows: np.ndarray[Any, Any],
        position: Array,
        slot: Array,
        first: Array,
        visible_from: Array,
        is_image: Array | None,
        blocks: Array,
    ) -> RowSet:
        ring, config, kernels, params = self.layout.window, self.config, self.kernels, self.params
        scratch = ring.scratch_start + self.row[: len(position)]
        keys = self._window_keys(position, first, visible_from, slot, scratch)
        visible = self.xp.where(visible_from != _NOTHING_VISIBLE, position + 1, 0)
        on_device = self.tensor(position)
        return RowSet(
            num_rows=len(rows),
            position=on_device,
            slot=self.tensor(slot),
            is_image=None if is_image is None else self.tensor(is_image),
            rope=kernels.rope_table(on_device, params.frequencies),
            long_rope=kernels.rope_table(on_device, params.long_frequencies),
            scratch=self.tensor(scratch),
            window_plan=kernels.plan_keys(self.tensor(keys)),
            commit=self._commit(rows, ring, position, slot),
            blocks=self.tensor(blocks),
            num_visible={
                ratio: self.tensor(visible // ratio) for ratio in sorted(set(config.compress_ratios)) if ratio
            },
            most_visible=self.most_visible,
        )

    def _sample_rows(self, kept: np.ndarray[Any, Any]) -> Tensor:
        wanted = np.flatnonzero(self.plan.row_sample[kept])
        return self.tensor(self.array(wanted, length=len(wanted)))

    # ---- what is read ------------------------------------------------------------------------------------------------

    def _rows_of_keys(self, key: Array, first: Array, slot: Array, scratch: Array, ring: RingLayout) -> Array:
        """Cache rows of positions `key`: the scratch row where the position is one of this step, else the slot's ring.

        first: lowest position of the segment in this step; scratch: scratch row that `key` would have.
        """
        return self.xp.where(key >= first, scratch, slot * ring.capacity + key % ring.capacity)

    def _window_keys(self, position: Array, first: Array, visible_from: Array, slot: Array, scratch: Array) -> Array:
        """Cache rows of the window of each row, oldest first, -1 = invisible: [P, W]."""
        window = self.config.sliding_window
        back = self.array(np.arange(1 - window, 1), length=window)
        key = position[:, None] + back  # [P, W]
        rows = self._rows_of_keys(key, first[:, None], slot[:, None], scratch[:, None] + back, self.layout.window)
        return self.xp.where(key < visible_from[:, None], -1, rows)

    def _history(
        self, tokens: Array, position: Array, first: Array, slot: Array, is_image: Array | None
    ) -> tuple[Array, RingCommit]:
        """Token classes of each row and of the positions before it, DEAD before the start and on images: [P, N]."""
        ring, length, stored = self.layout.history, self.config.engram_max_ngram_size, self.view(self.state.history)
        classes = self.view(self.params.token_classes)[tokens]
        if is_image is not None:
            classes = self.xp.where(is_image, DEAD_CLASS, classes)
        stored[ring.scratch_start : ring.scratch_start + self.padded] = classes
        scratch = ring.scratch_start + self.row
        back = self.array(np.arange(0, -length, -1), length=length)
        key = position[:, None] + back
        rows = self._rows_of_keys(key, first[:, None], slot[:, None], scratch[:, None] + back, ring)
        history = self.xp.where(key < 0, DEAD_CLASS, stored[rows])
        return history, self._commit(np.arange(self.plan.num_rows), ring, position, slot)

    # ---- what is written ---------------------------------------------------------------------------------------------

    def _commit(self, rows: np.ndarray[Any, Any], ring: RingLayout, position: Array, slot: Array) -> RingCommit:
        """The last `capacity` of `rows` of every segment that may write windows; position and slot belong to `rows`."""
        plan = self.plan
        ends = plan.segment_start[1:][self.segment_of[rows]]
        writes = (plan.row_writes[rows] & Writes.WINDOW) != 0
        chosen = np.flatnonzero(writes & (ends - rows <= ring.capacity))
        index = self.array(chosen, length=len(chosen))
        destination = slot[index] * ring.capacity + position[index] % ring.capacity
        return RingCommit(self.tensor(ring.scratch_start + index), self.tensor(destination))

    def _entry_rows(self, ratio: int, position: Array, blocks: Array) -> Tensor:
        """Entry cache row that each row completes: block of the position, entry within it; trash where it completes
        none.
        """
        writes = self.array((self.plan.row_writes & Writes.GLOBAL) != 0)
        block = blocks[self.row, self.xp.clip(position // BLOCK_TOKENS, 0, blocks.shape[1] - 1)]
        complete = writes & ((position + 1) % ratio == 0) & (block >= 0)
        row = block * self.layout.entries_per_block(ratio) + (position % BLOCK_TOKENS) // ratio
        return self.tensor(self.xp.where(complete, row, self.layout.entry_trash_row(ratio)))

    def _entry_rope(self, ratio: int, position: Array, encoder: RowSet) -> Tensor:
        if ratio == 1:
            return encoder.long_rope
        first = self.tensor(position // ratio * ratio)
        return self.kernels.rope_table(first, self.params.long_frequencies)
