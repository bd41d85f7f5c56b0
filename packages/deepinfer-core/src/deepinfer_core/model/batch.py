"""A step's rows as tensors: where each row reads and writes, worked out once and used by all layers.

    plan (integers)  ->  Batch
                           encoder: RowSet   every row, for the layers below the cut
                           decoder: RowSet   rows from `segment_decoder_from` on, for the cut layer and above; or None

A window key of position p is read from the scratch rows if p is a row of this step in the same set, else from the
slot's ring; ring positions at or above the first row of the segment are never read, so what rejected drafts left there
does no harm. Rows are padded to the multiple that the kernels want; padding rows see nothing and write to trash rows.

All of it is arithmetic on small integer arrays. Where the state is on the host, numpy does it, at a third of the time
that torch takes for arrays of this size; else torch does, on the device, since held tokens and positions exist only
there. Both know the same names for what is used. On the device nothing is sent but the columns of `step_arrays`, and
nothing waits, so the work of building a batch can be captured in a graph together with the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from deepinfer_core.model.step_arrays import NO_ROW, NOTHING_VISIBLE, StepShape, pack_step, upload
from deepinfer_core.scheduling.plan import StepPlan

__all__ = ["Batch", "RingCommit", "RowSet", "batch_of", "build_batch"]

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
    arrays = pack_step(plan, state.layout, kernels.row_multiple, mask_decoder=mask_decoder)
    device = state.history.device
    columns = arrays.columns if device.type == "cpu" else arrays.views(upload(arrays, device))
    return batch_of(arrays.shape, columns, state, params, kernels, mask_decoder=mask_decoder)


def batch_of(
    shape: StepShape,
    columns: Mapping[str, Array],
    state: ModelState,
    params: ModelParams,
    kernels: Kernels,
    *,
    mask_decoder: bool = False,
) -> Batch:
    """The batch of `pack_step`'s columns, given as numpy arrays or as tensors on the device of `state`.

    With tensors: no host synchronisation, and no size or branch that `shape` does not fix.
    """
    return _Builder(shape, columns, state, params, kernels).build(mask_decoder)


class _Builder:
    def __init__(
        self, shape: StepShape, columns: Mapping[str, Array], state: ModelState, params: ModelParams, kernels: Kernels
    ) -> None:
        self.shape, self.columns = shape, columns
        self.state, self.params, self.kernels = state, params, kernels
        self.layout, self.config = state.layout, state.layout.config
        self.device = state.history.device
        self.on_host = isinstance(columns["slot"], np.ndarray)
        self.xp: Any = np if self.on_host else torch
        self.row = self.arange(0, shape.padded_rows)  # [P]

    # ---- host and device ---------------------------------------------------------------------------------------------

    def arange(self, start: int, stop: int, step: int = 1) -> Array:
        """Integers where the work is done."""
        return np.arange(start, stop, step) if self.on_host else torch.arange(start, stop, step, device=self.device)

    def flags(self, name: str) -> Array:
        """A column of zeros and ones as booleans."""
        return self.columns[name] != 0

    def tensor(self, values: Array) -> Tensor:
        """What the kernels take."""
        return torch.from_numpy(np.ascontiguousarray(values)) if self.on_host else values

    def view(self, tensor: Tensor) -> Array:
        """A tensor of the state or the parameters; writes go through."""
        return tensor.numpy() if self.on_host else tensor

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def build(self, mask_decoder: bool) -> Batch:
        shape, columns, layout, config = self.shape, self.columns, self.layout, self.config
        slot, window_from = columns["slot"], columns["window_from"]
        position, tokens = self._resolve(slot)
        first = position - columns["offset"]
        is_image = self.flags("image") if shape.has_images else None
        blocks = columns["table"][columns["segment"]]  # [P, B]
        encoder = self._row_set("commit", shape.num_rows, position, slot, first, window_from, is_image, blocks)
        decoder, decoder_rows = encoder, None
        if shape.num_kept == 0:
            decoder = None
        elif shape.has_own_decoder:
            decoder, decoder_rows = self._decoder_rows(
                mask_decoder, position, slot, first, window_from, is_image, blocks
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
            pair_commit=self._commit("pair_commit", layout.pairs, position, slot),
            history_commit=history_commit,
            sample_rows=self.tensor(columns["sample"]),
        )

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _resolve(self, slot: Array) -> tuple[Array, Array]:
        """Positions and tokens, those of held rows from the device's block of the slot."""
        xp, columns = self.xp, self.columns
        position, tokens = columns["position"], columns["token"]
        if not self.shape.has_held:
            return position, tokens
        # A segment with a held anchor has its place from the device; drafts in it may be given (forced by a grammar).
        there = self.view(self.state.held_position)[slot] + columns["offset"]
        position = xp.where(self.flags("held_segment"), there, position)
        held = self.flags("held")
        block = self.view(self.state.held_tokens)
        return position, xp.where(held, block[slot, xp.where(held, tokens, 0)], tokens)

    def _decoder_rows(
        self,
        mask_decoder: bool,
        position: Array,
        slot: Array,
        first: Array,
        window_from: Array,
        is_image: Array | None,
        blocks: Array,
    ) -> tuple[RowSet, Tensor | None]:
        """Rows of the decoder half, which see no key below `segment_decoder_from`, and their encoder rows."""
        shape, columns, xp = self.shape, self.columns, self.xp
        decoder_from = columns["decoder_from"]
        visible = xp.maximum(window_from, decoder_from)
        if mask_decoder:  # rows below stay what they are; nobody above reads them
            visible = xp.where(position >= decoder_from, visible, window_from)
        else:
            first = xp.maximum(first, decoder_from)
        if shape.num_kept == shape.num_rows:
            rows = self._row_set("decoder_commit", shape.num_kept, position, slot, first, visible, is_image, blocks)
            return rows, None
        pick = columns["kept"]
        rows = self._row_set(
            "decoder_commit",
            shape.num_kept,
            position[pick],
            slot[pick],
            first[pick],
            xp.where(self.flags("kept_padding"), NOTHING_VISIBLE, visible[pick]),
            None if is_image is None else is_image[pick],
            blocks[pick],
        )
        return rows, self.tensor(pick)

    def _row_set(
        self,
        commit: str,
        num_rows: int,
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
        visible = self.xp.where(visible_from != NOTHING_VISIBLE, position + 1, 0)
        on_device = self.tensor(position)
        return RowSet(
            num_rows=num_rows,
            position=on_device,
            slot=self.tensor(slot),
            is_image=None if is_image is None else self.tensor(is_image),
            rope=kernels.rope_table(on_device, params.frequencies),
            long_rope=kernels.rope_table(on_device, params.long_frequencies),
            scratch=self.tensor(scratch),
            window_plan=kernels.plan_keys(self.tensor(keys)),
            commit=self._commit(commit, ring, position, slot),
            blocks=self.tensor(blocks),
            num_visible={
                ratio: self.tensor(visible // ratio) for ratio in sorted(set(config.compress_ratios)) if ratio
            },
            most_visible=self.shape.most_visible,
        )

    # ---- what is read ------------------------------------------------------------------------------------------------

    def _rows_of_keys(self, key: Array, first: Array, slot: Array, scratch: Array, ring: RingLayout) -> Array:
        """Cache rows of positions `key`: the scratch row where the position is one of this step, else the slot's ring.

        first: lowest position of the segment in this step; scratch: scratch row that `key` would have.
        """
        return self.xp.where(key >= first, scratch, slot * ring.capacity + key % ring.capacity)

    def _window_keys(self, position: Array, first: Array, visible_from: Array, slot: Array, scratch: Array) -> Array:
        """Cache rows of the window of each row, oldest first, -1 = invisible: [P, W]."""
        back = self.arange(1 - self.config.sliding_window, 1)
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
        stored[ring.scratch_start : ring.scratch_start + self.shape.padded_rows] = classes
        scratch = ring.scratch_start + self.row
        back = -self.arange(0, length)
        key = position[:, None] + back
        rows = self._rows_of_keys(key, first[:, None], slot[:, None], scratch[:, None] + back, ring)
        history = self.xp.where(key < 0, DEAD_CLASS, stored[rows])
        return history, self._commit("history_commit", ring, position, slot)

    # ---- what is written ---------------------------------------------------------------------------------------------

    def _commit(self, name: str, ring: RingLayout, position: Array, slot: Array) -> RingCommit:
        """Copies of the listed rows into their slots' rings; position and slot belong to the rows that are listed."""
        listed = self.columns[name]
        if self.shape.is_fixed:
            index = self.xp.clip(listed, 0, None)
            inside = slot[index] * ring.capacity + position[index] % ring.capacity
            destination = self.xp.where(listed == NO_ROW, ring.trash_row, inside)
        else:
            index = listed
            destination = slot[index] * ring.capacity + position[index] % ring.capacity
        return RingCommit(self.tensor(ring.scratch_start + index), self.tensor(destination))

    def _entry_rows(self, ratio: int, position: Array, blocks: Array) -> Tensor:
        """Entry cache row that each row completes: block of the position, entry within it; trash where it completes
        none.
        """
        block = blocks[self.row, self.xp.clip(position // BLOCK_TOKENS, 0, blocks.shape[1] - 1)]
        complete = self.flags("writes_global") & ((position + 1) % ratio == 0) & (block >= 0)
        row = block * self.layout.entries_per_block(ratio) + (position % BLOCK_TOKENS) // ratio
        return self.tensor(self.xp.where(complete, row, self.layout.entry_trash_row(ratio)))

    def _entry_rope(self, ratio: int, position: Array, encoder: RowSet) -> Tensor:
        if ratio == 1:
            return encoder.long_rope
        first = self.tensor(position // ratio * ratio)
        return self.kernels.rope_table(first, self.params.long_frequencies)
