"""Runs the model on sequences without a scheduler: plans by hand, one state, any split into chunks, any company."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer_core.cache import CacheLayout, ModelState
from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.checkpoint.weights import ModelWeights
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.model import Backbone, Drafter, ForwardOutput, LayerTrace, ModelParams, build_batch, build_params
from deepinfer_core.scheduling.plan import RowKind, StepPlan, TokenSource, Writes
from tests.fixture_models import FIXTURES as FIXTURES

SHARED_MODELS = Path(__file__).parents[2].parent / "shared" / "model"
BACKTRACK = 12
BLOCKS_A_REQUEST = 24


@dataclass(frozen=True)
class Chunk:
    """Rows of one request in one step."""

    slot: int
    start: int
    tokens: Sequence[int]
    decoder_from: int = 0
    window_from: int = 0
    writes: Writes = Writes.GLOBAL | Writes.WINDOW


def plan_of(chunks: Sequence[Chunk], *, step: int = 0, sample: str = "all", padded_rows: int = 0) -> StepPlan:
    """A step of given rows; each slot owns its own run of blocks. `sample` is "all" or "last"."""
    counts = [len(chunk.tokens) for chunk in chunks]
    start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows = int(start[-1])
    wanted = np.ones(rows, np.bool_) if sample == "all" else np.isin(np.arange(rows), start[1:] - 1)
    return StepPlan(
        step=step,
        row_position=np.concatenate([np.arange(c.start, c.start + len(c.tokens)) for c in chunks]),
        row_token=np.concatenate([np.asarray(c.tokens, np.int64) for c in chunks]),
        row_source=np.full(rows, TokenSource.GIVEN, np.uint8),
        row_kind=np.full(rows, RowKind.PREFILL, np.uint8),
        row_content=np.zeros(rows, np.uint8),
        row_writes=np.repeat([np.uint8(c.writes) for c in chunks], counts),
        row_sample=wanted,
        segment_start=start,
        segment_slot=np.array([c.slot for c in chunks], np.int32),
        segment_generation=np.zeros(len(chunks), np.int32),
        segment_window_from=np.array([c.window_from for c in chunks], np.int64),
        segment_decoder_from=np.array([c.decoder_from for c in chunks], np.int64),
        segment_num_drafts=np.zeros(len(chunks), np.int32),
        block_tables=np.stack([blocks_of(c.slot) for c in chunks]),
        padded_rows=padded_rows,
    )


def blocks_of(slot: int) -> np.ndarray[Any, Any]:
    """Block table of a slot. Neighbouring blocks are far apart on purpose."""
    return (np.arange(BLOCKS_A_REQUEST, dtype=np.int32) * 7 + slot * BLOCKS_A_REQUEST * 7) % (7 * 4 * BLOCKS_A_REQUEST)


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint, ready to run, with its expected values where the folder has them."""

    folder: Path
    config: ModelConfig
    weights: ModelWeights
    params: ModelParams
    backbone: Backbone
    expected: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def drafter(self) -> Drafter:
        if self.params.draft is None:
            raise ValueError("this checkpoint has no drafter")
        return Drafter(self.backbone, self.params.draft)

    def state(self, num_slots: int = 4, max_rows: int = 1024) -> ModelState:
        layout = CacheLayout(self.config, num_slots, 7 * 4 * BLOCKS_A_REQUEST, max_rows, BACKTRACK)
        return ModelState.allocate(layout, device="cpu", dtype=torch.float32)

    @torch.inference_mode()
    def step(
        self, state: ModelState, plan: StepPlan, *, mask: bool = False, trace: LayerTrace | None = None
    ) -> ForwardOutput:
        batch = build_batch(plan, state, self.params, self.backbone.kernels, mask_decoder=mask)
        return self.backbone.forward(batch, state, trace)

    def logits(self, tokens: Sequence[int], *, trace: LayerTrace | None = None) -> Tensor:
        """Logits of every row, in one chunk of a fresh state."""
        out = self.step(self.state(), plan_of([Chunk(0, 0, tokens)]), trace=trace)
        if out.logits is None:
            raise ValueError("no row reached the head")
        return out.logits


def load_tiny(folder: Path, kernels: Kernels = REFERENCE) -> TinyModel:
    config = ModelConfig.from_folder(folder)
    weights = load_model_weights(folder, config, dtype=torch.float32, device="cpu", progress=False)
    params = build_params(weights, config)
    expected_file = folder / "expected.json"
    has_expected = expected_file.exists()
    return TinyModel(
        folder,
        config,
        weights,
        params,
        Backbone(config, params, kernels),
        json.loads(expected_file.read_text()) if has_expected else {},
        load_file(folder / "expected.safetensors") if has_expected else {},
    )


def with_rounding_off(model: TinyModel) -> TinyModel:
    """The same model without any cache or index rounding; smooth, so programs can be compared row by row."""

    def plain_write(cache: Tensor, rows: Tensor, values: Tensor) -> None:
        cache.index_copy_(0, rows, values)

    kernels = replace(
        model.backbone.kernels,
        write_window=plain_write,
        write_entries=plain_write,
        write_index_keys=plain_write,
        round_index=lambda x: x,
    )
    return replace(model, backbone=Backbone(model.config, model.params, kernels))
