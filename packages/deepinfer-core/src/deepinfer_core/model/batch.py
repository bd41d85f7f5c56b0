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
from dataclasses import dataclass, replace
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
from deepinfer_core.model.step_split import SplitSet, StepSplit, split_step
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.context import CacheShare, RowMove
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
    window_share: CacheShare | None  # of the scratch rows that other ranks read; None: no rank lacks any
    tail_share: CacheShare | None  # of those among them that go into rings
    blocks: Tensor  # [P, B] block numbers of the row's request
    num_visible: dict[int, Tensor]  # ratio -> [P] compressed entries that the row may see
    most_visible: int  # largest position + 1


@dataclass(frozen=True, eq=False)
class Batch:
    """One step. `layout` is that of the state it was built for.

    Split over the ranks of a context group, P and P' count the rows of this rank, N those of all.
    """

    layout: CacheLayout
    tokens: Tensor  # [P]
    encoder: RowSet
    decoder: RowSet | None
    decoder_rows: RowMove | None  # [P'] of the encoder rows; None: the same rows
    engram_history: Tensor  # [P, N] token classes, newest first
    entry_rows: dict[int, Tensor]  # ratio -> [P] entry cache row that each row writes (or trash)
    entry_share: dict[int, CacheShare]  # ratio -> of the entries that this step writes; empty: no rank lacks any
    entry_rope: dict[int, Tensor]  # ratio -> [P, 2, rotary] rope of the entry's first token
    pair_partner: Tensor  # [P] pair cache row of the position before
    pair_scratch: Tensor  # [P]
    pair_share: CacheShare | None
    pair_commit: RingCommit
    history_commit: RingCommit
    sample_rows: RowMove  # [N] of the decoder rows: those whose logits are wanted
    sample_position: Tensor  # [N]
    sample_token: Tensor  # [N]
    local_rows: Tensor | None  # [R] row P of each row of the step, P where another rank computes it; None: R = P


def build_batch(
    plan: StepPlan,
    state: ModelState,
    params: ModelParams,
    kernels: Kernels,
    *,
    mask_decoder: bool = False,
    group: Communicator | None = None,
) -> Batch:
    """Tensors of `plan` on the device of `state`.

    `mask_decoder` computes the decoder half for all rows and only clips what the kept ones see: the oracle of skipping
    them. `group`: the ranks that share the rows of long prompts; every one of them builds the batch of the same plan.
    """
    split = split_step(plan, state.layout, group, mask_decoder=mask_decoder)
    arrays = pack_step(plan, state.layout, kernels.row_multiple, mask_decoder=mask_decoder, split=split)
    device = state.history.device
    columns = arrays.columns if device.type == "cpu" else arrays.views(upload(arrays, device))
    return batch_of(arrays.shape, columns, state, params, kernels, mask_decoder=mask_decoder, split=split)


def batch_of(
    shape: StepShape,
    columns: Mapping[str, Array],
    state: ModelState,
    params: ModelParams,
    kernels: Kernels,
    *,
    mask_decoder: bool = False,
    split: StepSplit | None = None,
) -> Batch:
    """The batch of `pack_step`'s columns, given as numpy arrays or as tensors on the device of `state`.

    With tensors and no split: no host synchronisation, and no size or branch that `shape` does not fix.
    """
    return _Builder(shape, columns, state, params, kernels, split).build(mask_decoder)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is known of each of P rows; padding rows see nothing, and have the number of the trash row or one of their
    own.
    """

    number: Array  # within the set that the rows belong to: the place of its keys in the scratch rows
    position: Array
    slot: Array
    segment: Array  # row of the block table
    first: Array  # lowest position of the segment in this step
    visible_from: Array
    is_image: Array | None


class _Builder:
    def __init__(
        self,
        shape: StepShape,
        columns: Mapping[str, Array],
        state: ModelState,
        params: ModelParams,
        kernels: Kernels,
        split: StepSplit | None,
    ) -> None:
        self.shape, self.columns, self.split = shape, columns, split
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

    def numbers(self, values: np.ndarray[Any, Any]) -> Array:
        """Numbers of rows that no column holds, where the work is done."""
        return values if self.on_host else torch.from_numpy(values).to(self.device)

    def number_tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        """The same, as the kernels take it."""
        return self.tensor(self.numbers(values))

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def build(self, mask_decoder: bool) -> Batch:
        columns, layout, split = self.columns, self.layout, self.split
        position, tokens = self._resolve(columns["slot"])
        step = _Rows(
            number=self.row,
            position=position,
            slot=columns["slot"],
            segment=columns["segment"],
            first=position - columns["offset"],
            visible_from=columns["window_from"],
            is_image=self.flags("image") if self.shape.has_images else None,
        )
        rows = step if split is None else self._picked(step, "mine")  # those that this process computes
        encoder_split = None if split is None else split.encoder
        num_rows = self.shape.num_rows if encoder_split is None else len(encoder_split.mine)
        encoder = self._row_set(rows, num_rows, self._commit("commit", layout.window, step), encoder_split)
        decoder, decoder_rows = self._decoder(mask_decoder, step, rows, encoder)
        self._store_history(tokens, step)
        entry_rows, entry_share = self._entries(step)
        return Batch(
            layout=layout,
            tokens=self.tensor(tokens if split is None else tokens[columns["mine"]]),
            encoder=encoder,
            decoder=decoder,
            decoder_rows=decoder_rows,
            engram_history=self.tensor(self._history(rows)),
            entry_rows=entry_rows,
            entry_share=entry_share,
            entry_rope={ratio: self._entry_rope(ratio, rows.position, encoder) for ratio in entry_rows},
            pair_partner=self.tensor(self._pair_partner(rows)),
            pair_scratch=self.tensor(layout.pairs.scratch_start + rows.number),
            pair_share=None if split is None else self._share_scratch(split.encoder, split.pair_tail, layout.pairs),
            pair_commit=self._commit("pair_commit", layout.pairs, step),
            history_commit=self._commit("history_commit", layout.history, step),
            sample_rows=self._sample_rows(decoder),
            sample_position=self.tensor(position[columns["sample_row"]]),
            sample_token=self.tensor(tokens[columns["sample_row"]]),
            local_rows=None if split is None else self.number_tensor(split.places(len(rows.number))),
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

    def _picked(self, step: _Rows, name: str) -> _Rows:
        """The listed ones of the step's rows."""
        pick, number = self.columns[name], self.columns[f"{name}_number"]
        return _Rows(
            number=number,
            position=step.position[pick],
            slot=step.slot[pick],
            segment=step.segment[pick],
            first=step.first[pick],
            visible_from=self.xp.where(number == NO_ROW, NOTHING_VISIBLE, step.visible_from[pick]),
            is_image=None if step.is_image is None else step.is_image[pick],
        )

    def _decoder(
        self, mask_decoder: bool, step: _Rows, rows: _Rows, encoder: RowSet
    ) -> tuple[RowSet | None, RowMove | None]:
        """Rows of the decoder half, which see no key below `segment_decoder_from`, and where they come from.

        step: all rows of the step; rows: those of them that this process computes.
        """
        shape, columns, xp, split = self.shape, self.columns, self.xp, self.split
        if shape.num_kept == 0:
            return None, None
        if not shape.has_own_decoder:
            return encoder, None
        decoder_from = columns["decoder_from"]
        visible = xp.maximum(step.visible_from, decoder_from)
        if mask_decoder:  # rows below stay what they are; nobody above reads them
            clipped = replace(step, visible_from=xp.where(step.position >= decoder_from, visible, step.visible_from))
        else:
            clipped = replace(step, visible_from=visible, first=xp.maximum(step.first, decoder_from))
        commit = self._commit("decoder_commit", self.layout.window, step)
        decoder_split = None if split is None else split.decoder
        num_rows = shape.num_kept if decoder_split is None else len(decoder_split.mine)
        if shape.num_kept == shape.num_rows:
            kept = clipped if split is None else self._picked(clipped, "mine")
            return self._row_set(kept, num_rows, commit, decoder_split), None
        kept = self._picked(clipped, "kept")
        if split is None:
            move = RowMove(self.tensor(columns["kept"]))
        else:
            move = split.to_decoder(len(rows.number), len(kept.number), self.number_tensor)
        return self._row_set(kept, num_rows, commit, decoder_split), move

    def _row_set(self, rows: _Rows, num_rows: int, commit: RingCommit, split: SplitSet | None) -> RowSet:
        config, kernels, params, ring = self.config, self.kernels, self.params, self.layout.window
        keys = self._window_keys(rows)
        visible = self.xp.where(rows.visible_from != NOTHING_VISIBLE, rows.position + 1, 0)
        position = self.tensor(rows.position)
        return RowSet(
            num_rows=num_rows,
            position=position,
            slot=self.tensor(rows.slot),
            is_image=None if rows.is_image is None else self.tensor(rows.is_image),
            rope=kernels.rope_table(position, params.frequencies),
            long_rope=kernels.rope_table(position, params.long_frequencies),
            scratch=self.tensor(ring.scratch_start + rows.number),
            window_plan=kernels.plan_keys(self.tensor(keys)),
            commit=commit,
            window_share=None if split is None else self._share_scratch(split, split.window, ring),
            tail_share=None if split is None else self._share_scratch(split, split.tail, ring),
            blocks=self.tensor(self.columns["table"][rows.segment]),
            num_visible={
                ratio: self.tensor(visible // ratio) for ratio in sorted(set(config.compress_ratios)) if ratio
            },
            most_visible=self.shape.most_visible,
        )

    def _sample_rows(self, decoder: RowSet | None) -> RowMove:
        if self.split is None or decoder is None:
            return RowMove(self.tensor(self.columns["sample"]))
        return self.split.to_samples(len(decoder.position), self.number_tensor)

    def _share_scratch(self, split: SplitSet, needed: np.ndarray[Any, Any], ring: RingLayout) -> CacheShare:
        """Of the scratch rows of those rows of the set that are needed elsewhere."""
        return split.share(needed, lambda rows: self.number_tensor(ring.scratch_start + rows))

    # ---- what is read ------------------------------------------------------------------------------------------------

    def _keys_before(self, rows: _Rows, ring: RingLayout, back: Array) -> tuple[Array, Array]:
        """Positions [P, n] at distances `back` [n] <= 0 from each row, and the cache rows of their keys.

        That is the scratch row where the position is one of this step, else the slot's ring.
        """
        key = rows.position[:, None] + back
        scratch = ring.scratch_start + rows.number[:, None] + back
        stored = rows.slot[:, None] * ring.capacity + key % ring.capacity
        return key, self.xp.where(key >= rows.first[:, None], scratch, stored)

    def _window_keys(self, rows: _Rows) -> Array:
        """Cache rows of the window of each row, oldest first, -1 = invisible: [P, W]."""
        key, found = self._keys_before(rows, self.layout.window, self.arange(1 - self.config.sliding_window, 1))
        return self.xp.where(key < rows.visible_from[:, None], -1, found)

    def _pair_partner(self, rows: _Rows) -> Array:
        """Pair cache row of the position before each row: [P]."""
        return self._keys_before(rows, self.layout.pairs, self.arange(-1, 0))[1][:, 0]

    def _store_history(self, tokens: Array, step: _Rows) -> None:
        """Token classes of all rows of the step into the scratch rows, DEAD on images."""
        ring, stored = self.layout.history, self.view(self.state.history)
        classes = self.view(self.params.token_classes)[tokens]
        if step.is_image is not None:
            classes = self.xp.where(step.is_image, DEAD_CLASS, classes)
        stored[ring.scratch_start : ring.scratch_start + self.shape.padded_rows] = classes

    def _history(self, rows: _Rows) -> Array:
        """Token classes of each row and of the positions before it, newest first, DEAD before the start: [P, N]."""
        key, found = self._keys_before(rows, self.layout.history, -self.arange(0, self.config.engram_max_ngram_size))
        return self.xp.where(key < 0, DEAD_CLASS, self.view(self.state.history)[found])

    # ---- what is written ---------------------------------------------------------------------------------------------

    def _commit(self, name: str, ring: RingLayout, step: _Rows) -> RingCommit:
        """Copies of the listed scratch rows into the rings of their slots."""
        number = self.columns[name]
        row = self.columns.get(f"{name}_row", number)  # the same one among the rows of the step
        if self.shape.is_fixed:
            row, number = self.xp.clip(row, 0, None), self.xp.clip(number, 0, None)
        destination = step.slot[row] * ring.capacity + step.position[row] % ring.capacity
        if self.shape.is_fixed:
            destination = self.xp.where(self.columns[name] == NO_ROW, ring.trash_row, destination)
        return RingCommit(self.tensor(ring.scratch_start + number), self.tensor(destination))

    def _entries(self, step: _Rows) -> tuple[dict[int, Tensor], dict[int, CacheShare]]:
        """By ratio: entry cache row that each row completes, and what other ranks need of it."""
        config, split = self.config, self.split
        rows: dict[int, Tensor] = {}
        shares: dict[int, CacheShare] = {}
        for ratio in sorted({config.compress_ratios[layer] for layer in config.kv_source_layer_ids}):
            of_step = self._entry_rows(ratio, step)
            if split is None:
                rows[ratio] = self.tensor(of_step)
                continue
            padding = self.columns["mine_number"] == NO_ROW
            mine = self.xp.where(padding, self.layout.entry_trash_row(ratio), of_step[self.columns["mine"]])
            rows[ratio] = self.tensor(mine)
            shares[ratio] = split.encoder.share(
                split.entries[ratio], lambda numbers, of=of_step: self.tensor(of[self.numbers(numbers)])
            )
        return rows, shares

    def _entry_rows(self, ratio: int, step: _Rows) -> Array:
        """Block of the position, entry within it; trash where the row completes none: [P]."""
        table = self.columns["table"]
        block = table[step.segment, self.xp.clip(step.position // BLOCK_TOKENS, 0, table.shape[1] - 1)]
        complete = self.flags("writes_global") & ((step.position + 1) % ratio == 0) & (block >= 0)
        row = block * self.layout.entries_per_block(ratio) + (step.position % BLOCK_TOKENS) // ratio
        return self.xp.where(complete, row, self.layout.entry_trash_row(ratio))

    def _entry_rope(self, ratio: int, position: Array, encoder: RowSet) -> Tensor:
        if ratio == 1:
            return encoder.long_rope
        first = self.tensor(position // ratio * ratio)
        return self.kernels.rope_table(first, self.params.long_frequencies)
