"""The device's work of a step up to its logits, run eagerly or replayed from a captured graph.

    plan ─► columns ─► one copy ─► batch ─► layers ─► head ─► logits [N, V]
                                   └─► draft context         position, token [N] of the sample rows
    anchors ─► draft stages ─► hidden, base logits of the blocks

On an accelerator both pieces are captured the second time that a shape comes by, in *buckets*: a step with fewer rows,
segments or table columns than its bucket is padded with rows that see nothing and write to trash rows. Prefill steps
are not captured. A padded, replayed step gives the bits of an eager one wherever the kernels are row-invariant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer_core.cache.state import ModelState
from deepinfer_core.errors import EngineError
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.model.backbone import Backbone, GivenEmbeddings
from deepinfer_core.model.batch import Batch, batch_of, build_batch
from deepinfer_core.model.draft import DraftBlock, Drafter
from deepinfer_core.model.params import ModelParams
from deepinfer_core.model.step_arrays import (
    NOTHING_VISIBLE,
    StepArrays,
    StepShape,
    fits_fixed_shape,
    pack_step,
    staged,
)
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.scheduling.plan import StepPlan

__all__ = ["Capture", "CudaCapture", "Forward", "ForwardRows", "bucket"]

_MOST_GRAPHS = 64  # kept; the one that was used longest ago goes first


def bucket(size: int) -> int:
    """The smallest bucket that holds `size`: every size up to 16, then eight for each doubling."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


@dataclass(frozen=True, eq=False)
class ForwardRows:
    """What a step's sample rows gave, on the device; valid until the next forward pass."""

    logits: Tensor  # [N, V] float32
    position: Tensor  # [N] int64, of the row's own token
    token: Tensor  # [N] int64


class Capture(Protocol):
    """A device's way to record work and to run it again."""

    def record[Output](self, work: Callable[[], Output]) -> tuple[Output, Callable[[], None]]:
        """Record what `work` launches, without running it: the tensors that it returns, and a call that fills them.

        Every such call reads and writes the tensors of the time of recording.
        """
        ...


class CudaCapture:
    """CUDA graphs that share one memory pool: they run one by one, so what one leaves free the next may use."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record[Output](self, work: Callable[[], Output]) -> tuple[Output, Callable[[], None]]:
        """See `Capture`."""
        graph = torch.cuda.CUDAGraph()
        # Another thread may wait for the step before this one meanwhile, so only this thread's calls are checked.
        recording: AbstractContextManager[None] = torch.cuda.graph(
            graph, pool=self._pool, capture_error_mode="thread_local"
        )
        with recording:
            output = work()
        return output, graph.replay


@dataclass(eq=False)
class _Graph[Output]:
    """One shape: its inputs, and its output once it is captured."""

    inputs: Tensor
    output: Output
    replay: Callable[[], None]


class Forward:
    """Runs the model for a runner. `capture` None: everything is eager. `context`: ranks that share long prompts."""

    def __init__(
        self,
        backbone: Backbone,
        drafter: Drafter | None,
        state: ModelState,
        *,
        mask_decoder: bool = False,
        capture: Capture | None = None,
        most_rows: int = 0,
        context: Communicator | None = None,
    ) -> None:
        self.backbone, self.drafter, self.state = backbone, drafter, state
        self.params: ModelParams = backbone.params
        self.kernels: Kernels = backbone.kernels
        self.mask_decoder, self.most_rows, self.context = mask_decoder, most_rows, context
        self._capture = capture
        self._graphs: OrderedDict[Hashable, _Graph[Any] | None] = OrderedDict()  # None: seen once
        self._logits: Tensor | None = None

    # ---- the step -------------------------------------------------------------------------------------------------

    def run(
        self, plan: StepPlan, given: GivenEmbeddings | None, *, store_context: bool
    ) -> tuple[ForwardRows | None, tuple[int, ...]]:
        """(sample rows or None, real rows that each layer computed)."""
        shape = self._fixed_shape(plan) if given is None else None
        key = (shape, store_context)
        if shape is None or not self._is_known(key):
            batch = build_batch(
                plan, self.state, self.params, self.kernels, mask_decoder=self.mask_decoder, group=self.context
            )
            return self._eager(batch, given, store_context)
        arrays = pack_step(plan, self.state.layout, self.kernels.row_multiple, fixed=shape)
        graph: _Graph[ForwardRows] | None = self._graphs[key]
        inputs = self._zeros(arrays.largest_size) if graph is None else graph.inputs
        inputs[: arrays.size].copy_(staged(arrays, inputs.device), non_blocking=True)
        if graph is None:
            graph = self._capture_step(key, arrays, inputs, store_context)
        graph.replay()
        count = plan.num_rows
        rows = graph.output
        counts = (count,) * self.backbone.config.num_hidden_layers
        return ForwardRows(rows.logits[:count], rows.position[:count], rows.token[:count]), counts

    def _eager(
        self, batch: Batch, given: GivenEmbeddings | None, store_context: bool
    ) -> tuple[ForwardRows | None, tuple[int, ...]]:
        out = self.backbone.forward(batch, self.state, given=given)
        if store_context and self.drafter is not None and out.features is not None:
            self.drafter.store_context(out.features, batch, self.state)
        if out.logits is None:
            return None, out.rows_per_layer
        return ForwardRows(out.logits, batch.sample_position, batch.sample_token), out.rows_per_layer

    def _fixed_shape(self, plan: StepPlan) -> StepShape | None:
        """The bucket of a step that graphs are made for."""
        if self._capture is None or self.mask_decoder or plan.num_rows > self.most_rows:
            return None
        if not fits_fixed_shape(plan, self.state.layout):
            return None
        multiple = self.kernels.row_multiple
        rows = bucket(-(-max(plan.num_rows, plan.padded_rows) // multiple)) * multiple
        return StepShape.fixed(min(rows, self.state.layout.window.scratch_rows), bucket(plan.block_tables.shape[1]))

    def _capture_step(
        self, key: Hashable, arrays: StepArrays, inputs: Tensor, store_context: bool
    ) -> _Graph[ForwardRows]:
        shape, columns = arrays.shape, arrays.views(inputs)
        logits = self._logits_buffer(shape.padded_rows)

        def work() -> ForwardRows:
            batch = batch_of(shape, columns, self.state, self.params, self.kernels)
            found, _ = self._eager(batch, None, store_context)
            if found is None:
                raise EngineError("a step of a fixed shape has no sample rows; run with enforce_eager=True")
            logits.copy_(found.logits)
            return ForwardRows(logits, found.position, found.token)

        return self._keep(key, inputs, work)

    # ---- draft blocks ---------------------------------------------------------------------------------------------

    def draft_block(
        self, anchor: Tensor, anchor_position: Tensor, slot: Tensor, visible_from: Tensor, num_steps: int
    ) -> DraftBlock:
        """What the stages make of the blocks of S segments; all arguments [S] int64, on the device."""
        if self.drafter is None:
            raise ValueError("this runner has no drafter")
        segments = len(anchor)
        size = min(bucket(segments), self.state.layout.num_slots)
        key = ("draft", size, num_steps)
        if self._capture is None or not self._is_known(key):
            return self.drafter.make_block(anchor, anchor_position, slot, visible_from, self.state, num_steps)
        graph: _Graph[DraftBlock] | None = self._graphs[key]
        inputs = self._zeros(4, size) if graph is None else graph.inputs
        inputs[:, :segments] = torch.stack((anchor, anchor_position, slot, visible_from))
        inputs[3, segments:] = NOTHING_VISIBLE
        if graph is None:
            graph = self._capture_block(key, inputs, num_steps)
        graph.replay()
        block = graph.output
        return DraftBlock(block.hidden[:segments], block.base_logits[:segments])

    def _capture_block(self, key: Hashable, inputs: Tensor, num_steps: int) -> _Graph[DraftBlock]:
        size = inputs.shape[1]
        logits = self._logits_buffer(size * num_steps)

        def work() -> DraftBlock:
            if self.drafter is None:
                raise ValueError("this runner has no drafter")
            anchor, anchor_position, slot, visible_from = inputs.unbind(0)
            block = self.drafter.make_block(anchor, anchor_position, slot, visible_from, self.state, num_steps)
            logits.copy_(block.base_logits.flatten(0, 1))
            return DraftBlock(block.hidden, logits.view(size, num_steps, -1))

        return self._keep(key, inputs, work)

    # ---- graphs ---------------------------------------------------------------------------------------------------

    def _is_known(self, key: Hashable) -> bool:
        """Whether this shape came by before: its first step runs eagerly, which compiles and loads every kernel."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return True
        self._graphs[key] = None
        while len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return False

    def _keep[Output](self, key: Hashable, inputs: Tensor, work: Callable[[], Output]) -> _Graph[Output]:
        if self._capture is None:
            raise ValueError("nothing is captured on this device")
        output, replay = self._capture.record(work)
        graph = self._graphs[key] = _Graph(inputs, output, replay)
        return graph

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.state.history.device)

    def _logits_buffer(self, rows: int) -> Tensor:
        """[rows, V] that graphs share: it is read before the next one runs."""
        if self._logits is None or len(self._logits) < rows:  # most_rows in whole tiles may be more
            most = max(self.most_rows, rows)
            self._logits = torch.empty(most, self.backbone.config.vocab_size, device=self.state.history.device)
        return self._logits[:rows]
