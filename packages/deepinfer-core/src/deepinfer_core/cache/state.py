"""`ModelState`: every tensor that outlives a step. Who owns which slot or block is known to the scheduler alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.cache.layout import CacheLayout, RingLayout
from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.errors import RequestError
from deepinfer_core.kernels.reference.records import COMPRESSED, INDEX, WINDOW, RecordFormat

__all__ = ["ModelState"]


@dataclass(frozen=True, eq=False)
class ModelState:
    """Caches and per-slot rows of one process; made by `allocate`, written in place.

    Row numbers are those of `CacheLayout`. `held_tokens` [slots, 1 + block] is the anchor and the drafts that a slot's
    last step left, `held_position` [slots] the position of the anchor.
    """

    layout: CacheLayout
    window: tuple[Tensor, ...]  # a layer: [window rows, record]
    draft_window: tuple[Tensor, ...]  # a stage
    entries: dict[int, Tensor]  # KV source layer -> [entry rows, record]
    index_keys: dict[int, Tensor]  # KV source layer -> [entry rows, record]
    pairs: dict[int, Tensor]  # ratio-2 source layer -> [pair rows, 2 * head_dim] float32
    history: Tensor  # [history rows] int64 token classes
    held_tokens: Tensor
    held_position: Tensor

    @classmethod
    def allocate(cls, layout: CacheLayout, *, device: torch.device | str, dtype: torch.dtype) -> ModelState:
        """Zeroed state; `dtype` is that of plain caches (packed ones are uint8)."""
        c = layout.config

        def cache(rows: int, dim: int, fmt: RecordFormat) -> Tensor:
            packed = layout.form == "packed"
            width = fmt.num_bytes(dim) if packed else dim
            return torch.zeros(rows, width, dtype=torch.uint8 if packed else dtype, device=device)

        def ring_cache(ring: RingLayout) -> Tensor:
            return cache(ring.num_rows, c.head_dim, WINDOW)

        ratios = {layer: c.compress_ratios[layer] for layer in c.kv_source_layer_ids}
        return cls(
            layout=layout,
            window=tuple(ring_cache(layout.window) for _ in range(c.num_hidden_layers)),
            draft_window=tuple(ring_cache(layout.draft_window) for _ in range(c.num_nextn_predict_layers)),
            entries={layer: cache(layout.entry_rows(r), c.head_dim, COMPRESSED) for layer, r in ratios.items()},
            index_keys={layer: cache(layout.entry_rows(r), c.index_head_dim, INDEX) for layer, r in ratios.items()},
            pairs={
                layer: torch.zeros(layout.pairs.num_rows, 2 * c.head_dim, dtype=torch.float32, device=device)
                for layer, ratio in ratios.items()
                if ratio > 1
            },
            history=torch.zeros(layout.history.num_rows, dtype=torch.int64, device=device),
            held_tokens=torch.zeros(layout.num_slots, 1 + c.dspark_block_size, dtype=torch.int64, device=device),
            held_position=torch.zeros(layout.num_slots, dtype=torch.int64, device=device),
        )

    def num_bytes(self) -> int:
        """Memory of all tensors."""
        tensors = [
            *self.window,
            *self.draft_window,
            *self.entries.values(),
            *self.index_keys.values(),
            *self.pairs.values(),
        ]
        tensors += [self.history, self.held_tokens, self.held_position]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    # ---- blocks in and out: sub-buffers by name ------------------------------------------------------------------

    def block_buffers(self) -> dict[str, tuple[Tensor, int]]:
        """Name -> (cache, entries a block) of everything that a block of 128 positions consists of."""
        ratios = self.layout.config.compress_ratios
        buffers: dict[str, tuple[Tensor, int]] = {}
        for layer in self.entries:
            per_block = BLOCK_TOKENS // ratios[layer]
            buffers[f"layers.{layer}.entries"] = (self.entries[layer], per_block)
            buffers[f"layers.{layer}.index_keys"] = (self.index_keys[layer], per_block)
        return buffers

    def export_block(self, block: int) -> dict[str, Tensor]:
        """A copy of one block's rows, by sub-buffer name."""
        self._check_block(block)
        return {name: cache[block * n : (block + 1) * n].clone() for name, (cache, n) in self.block_buffers().items()}

    def import_block(self, block: int, buffers: dict[str, Tensor]) -> None:
        """Write what `export_block` gave, here or on another process with the same layout. Raises RequestError."""
        self._check_block(block)
        own = self.block_buffers()
        if buffers.keys() != own.keys():
            raise RequestError(f"a block has the sub-buffers {sorted(own)}, not {sorted(buffers)}")
        for name, (cache, n) in own.items():
            value = buffers[name]
            if value.shape != (n, cache.shape[1]) or value.dtype != cache.dtype:
                raise RequestError(
                    f"sub-buffer {name} is {tuple(value.shape)} {value.dtype}; "
                    f"this cache has {(n, cache.shape[1])} {cache.dtype}"
                )
        for name, (cache, n) in own.items():
            cache[block * n : (block + 1) * n] = buffers[name]

    def _check_block(self, block: int) -> None:
        if not 0 <= block < self.layout.num_blocks:
            raise RequestError(f"block {block} does not exist; this cache has blocks 0 to {self.layout.num_blocks - 1}")
