"""A step's rows as tensors: where each row reads and writes, worked out once and used by all layers.

    plan (integers)  ->  Batch
                           encoder: RowSet   every row, for the layers below the cut
                           decoder: RowSet   rows from `segment_decoder_from` on, for the cut layer and above; or None

A window key of position p is read from the scratch rows if p is a row of this step in the same set, else from the
slot's ring; ring positions at or above the first row of the segment are never read, so what rejected drafts left there
does no harm. Rows are padded to the multiple that the kernels want; padding rows see nothing and write to trash rows.
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

__all__ = ["Batch", "RingCommit", "RowSet", "build_batch", "window_rows"]

_NOTHING_VISIBLE = 2**62


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
    builder = _Builder(plan, state, params, kernels)
    return builder.build(mask_decoder)


def window_rows(
    position: Tensor, first: Tensor, visible_from: Tensor, slot: Tensor, scratch: Tensor, window: int, ring: RingLayout
) -> Tensor:
    """Cache rows of the window of each row, oldest first, -1 = invisible: [P, W].

    position [P]; first [P]: lowest position of the row's segment in this step, whose keys stand in scratch rows;
    visible_from [P]; scratch [P] scratch row of the row itself.
    """
    back = torch.arange(1 - window, 1, device=position.device)
    key = position[:, None] + back  # [P, W]
    rows = torch.where(
        key >= first[:, None], scratch[:, None] + back, slot[:, None] * ring.capacity + key % ring.capacity
    )
    return rows.masked_fill(key < visible_from[:, None], -1)


class _Builder:
    def __init__(self, plan: StepPlan, state: ModelState, params: ModelParams, kernels: Kernels) -> None:
        self.plan, self.state, self.params, self.kernels = plan, state, params, kernels
        self.layout, self.config = state.layout, state.layout.config
        self.device = state.history.device
        rows = plan.num_rows
        self.segment_of = np.repeat(np.arange(plan.num_segments), np.diff(plan.segment_start))  # [R]
        self.row_slot = plan.segment_slot[self.segment_of]
        self.padded = self.up_to_multiple(max(rows, plan.padded_rows, 1))

    def up_to_multiple(self, rows: int) -> int:
        """`rows` and the padding that the kernels want."""
        return -(-rows // self.kernels.row_multiple) * self.kernels.row_multiple

    def tensor(self, array: np.ndarray[Any, Any], fill: int = 0, length: int | None = None) -> Tensor:
        """[R, ...] array as an int64 tensor with rows appended up to the padded length."""
        array = np.asarray(array, dtype=np.int64)
        missing = (self.padded if length is None else length) - len(array)
        if missing:
            array = np.concatenate([array, np.full((missing, *array.shape[1:]), fill, dtype=np.int64)])
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def build(self, mask_decoder: bool) -> Batch:
        plan, config, layout = self.plan, self.config, self.layout
        slot = self.tensor(self.row_slot)
        position, tokens = self._resolve(slot)
        first = position - self.tensor(np.arange(plan.num_rows) - plan.segment_start[:-1][self.segment_of])
        window_from, decoder_from = self._visible_from()
        is_image = self._is_image()
        blocks = self._blocks()
        if mask_decoder:
            from_here = self.tensor(plan.segment_decoder_from[self.segment_of])
            clipped = torch.where(position >= from_here, torch.maximum(window_from, decoder_from), window_from)
            kept = np.arange(plan.num_rows)
            decoder_first, decoder_visible = first, clipped
        else:
            kept = self._kept_rows()
            decoder_first, decoder_visible = (
                torch.maximum(first, decoder_from),
                torch.maximum(window_from, decoder_from),
            )
        encoder = self._row_set(np.arange(plan.num_rows), position, slot, first, window_from, is_image, blocks)
        decoder, decoder_rows = encoder, None
        same_rows = len(kept) == plan.num_rows
        if len(kept) == 0:
            decoder = None
        elif not same_rows:
            decoder_rows = self._padded_indices(kept)
            pick = decoder_rows
            decoder = self._row_set(
                kept,
                position[pick],
                slot[pick],
                decoder_first[pick],
                decoder_visible[pick].masked_fill(
                    torch.arange(len(pick), device=self.device) >= len(kept), _NOTHING_VISIBLE
                ),
                None if is_image is None else is_image[pick],
                blocks[pick],
            )
        elif bool((plan.segment_decoder_from > 0).any()):
            decoder = self._row_set(kept, position, slot, decoder_first, decoder_visible, is_image, blocks)
        history, history_commit = self._history(tokens, position, first, slot, is_image)
        ratios = sorted({config.compress_ratios[layer] for layer in config.kv_source_layer_ids})
        pair_scratch = layout.pairs.scratch_start + torch.arange(self.padded, device=self.device)
        before = position - 1
        partner = torch.where(
            before >= first, pair_scratch - 1, slot * layout.pairs.capacity + before % layout.pairs.capacity
        )
        return Batch(
            layout=layout,
            tokens=tokens,
            encoder=encoder,
            decoder=decoder,
            decoder_rows=decoder_rows,
            engram_history=history,
            entry_rows={ratio: self._entry_rows(ratio, position, blocks) for ratio in ratios},
            entry_rope={ratio: self._entry_rope(ratio, position, encoder) for ratio in ratios},
            pair_partner=partner,
            pair_scratch=pair_scratch,
            pair_commit=self._commit(np.arange(plan.num_rows), layout.pairs, position, slot),
            history_commit=history_commit,
            sample_rows=self._sample_rows(kept),
        )

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _resolve(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and tokens, those of held rows from the device's block of the slot."""
        plan, state = self.plan, self.state
        position, tokens = self.tensor(plan.row_position), self.tensor(plan.row_token)
        held_rows = plan.row_source == TokenSource.HELD
        if not held_rows.any():
            return position, tokens
        # A segment with a held anchor has its place from the device; drafts in it may be given (forced by a grammar).
        starts = plan.segment_start[:-1][self.segment_of]
        held_segment = self.tensor(held_rows[starts]).bool()
        offset = self.tensor(np.arange(plan.num_rows) - starts)
        position = torch.where(held_segment, state.held_position[slot] + offset, position)
        held = self.tensor(held_rows).bool()
        return position, torch.where(held, state.held_tokens[slot, torch.where(held, tokens, 0)], tokens)

    def _visible_from(self) -> tuple[Tensor, Tensor]:
        plan = self.plan
        window_from = self.tensor(plan.segment_window_from[self.segment_of], fill=_NOTHING_VISIBLE)
        decoder_from = self.tensor(plan.segment_decoder_from[self.segment_of], fill=_NOTHING_VISIBLE)
        return window_from.clamp_min(0), decoder_from.clamp_min(0)

    def _is_image(self) -> Tensor | None:
        image = self.plan.row_content == Content.IMAGE
        return self.tensor(image).bool() if image.any() else None

    def _blocks(self) -> Tensor:
        """[P, B] block table of each row, cut to what the largest position needs."""
        plan = self.plan
        needed = min(plan.block_tables.shape[1], self._most_visible() // BLOCK_TOKENS + 1)
        return self.tensor(plan.block_tables[:, :needed][self.segment_of], fill=-1)

    def _most_visible(self) -> int:
        return int(self.plan.row_position.max(initial=0)) + 1

    def _kept_rows(self) -> np.ndarray[Any, Any]:
        plan = self.plan
        if self.config.decoder_start >= self.config.num_hidden_layers:  # no KV source: there is no decoder half
            return np.arange(plan.num_rows)
        held = plan.row_source == TokenSource.HELD
        return np.flatnonzero(held | (plan.row_position >= plan.segment_decoder_from[self.segment_of]))

    def _padded_indices(self, kept: np.ndarray[Any, Any]) -> Tensor:
        return self.tensor(kept, fill=int(kept[0]), length=self.up_to_multiple(len(kept)))

    def _sample_rows(self, kept: np.ndarray[Any, Any]) -> Tensor:
        wanted = np.flatnonzero(self.plan.row_sample[kept])
        return self.tensor(wanted, length=len(wanted))

    def _row_set(
        self,
        rows: np.ndarray[Any, Any],
        position: Tensor,
        slot: Tensor,
        first: Tensor,
        visible_from: Tensor,
        is_image: Tensor | None,
        blocks: Tensor,
    ) -> RowSet:
        ring, config, kernels, params = self.layout.window, self.config, self.kernels, self.params
        scratch = ring.scratch_start + torch.arange(len(position), device=self.device)
        keys = window_rows(position, first, visible_from, slot, scratch, config.sliding_window, ring)
        real = visible_from != _NOTHING_VISIBLE
        visible = torch.where(real, position + 1, 0)
        ratios = sorted({ratio for ratio in config.compress_ratios if ratio})
        return RowSet(
            num_rows=len(rows),
            position=position,
            slot=slot,
            is_image=is_image,
            rope=kernels.rope_table(position, params.frequencies),
            long_rope=kernels.rope_table(position, params.long_frequencies),
            scratch=scratch,
            window_plan=kernels.plan_keys(keys),
            commit=self._commit(rows, ring, position, slot),
            blocks=blocks,
            num_visible={ratio: torch.div(visible, ratio, rounding_mode="floor") for ratio in ratios},
            most_visible=self._most_visible(),
        )

    # ---- what is written -----------------------------------------------------------------------------------------

    def _commit(self, rows: np.ndarray[Any, Any], ring: RingLayout, position: Tensor, slot: Tensor) -> RingCommit:
        """The last `capacity` of `rows` of every segment that may write windows; position and slot belong to `rows`."""
        plan = self.plan
        ends = plan.segment_start[1:][self.segment_of[rows]]
        writes = (plan.row_writes[rows] & Writes.WINDOW) != 0
        chosen = np.flatnonzero(writes & (ends - rows <= ring.capacity))
        index = self.tensor(chosen, length=len(chosen))
        destination = slot[index] * ring.capacity + position[index] % ring.capacity
        return RingCommit(ring.scratch_start + index, destination)

    def _entry_rows(self, ratio: int, position: Tensor, blocks: Tensor) -> Tensor:
        """Entry cache row that each row completes: block of the position, entry within it; trash where it completes
        none.
        """
        per_block = self.layout.entries_per_block(ratio)
        writes = self.tensor((self.plan.row_writes & Writes.GLOBAL) != 0).bool()
        block = blocks.gather(1, (position // BLOCK_TOKENS).clamp_max(blocks.shape[1] - 1)[:, None])[:, 0]
        complete = writes & ((position + 1) % ratio == 0) & (block >= 0)
        row = block * per_block + (position % BLOCK_TOKENS) // ratio
        return torch.where(complete, row, self.layout.entry_trash_row(ratio))

    def _entry_rope(self, ratio: int, position: Tensor, encoder: RowSet) -> Tensor:
        if ratio == 1:
            return encoder.long_rope
        first = torch.div(position, ratio, rounding_mode="floor") * ratio
        return self.kernels.rope_table(first, self.params.long_frequencies)

    def _history(
        self, tokens: Tensor, position: Tensor, first: Tensor, slot: Tensor, is_image: Tensor | None
    ) -> tuple[Tensor, RingCommit]:
        """Token classes of each row and of the positions before it, DEAD before the start and on images."""
        ring, state = self.layout.history, self.state
        classes = self.params.token_classes[tokens]
        if is_image is not None:
            classes = classes.masked_fill(is_image, DEAD_CLASS)
        state.history[ring.scratch_start : ring.scratch_start + self.padded] = classes
        scratch = ring.scratch_start + torch.arange(self.padded, device=self.device)
        back = torch.arange(0, -self.config.engram_max_ngram_size, -1, device=self.device)
        key = position[:, None] + back
        rows = torch.where(
            key >= first[:, None], scratch[:, None] + back, slot[:, None] * ring.capacity + key % ring.capacity
        )
        history = state.history[rows].masked_fill(key < 0, DEAD_CLASS)
        return history, self._commit(np.arange(self.plan.num_rows), ring, position, slot)
