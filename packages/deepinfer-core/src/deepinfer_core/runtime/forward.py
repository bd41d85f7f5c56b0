"""The device's work of a step up to its logits, run eagerly or replayed from a captured graph.

    plan ─► columns ─► one copy ─► batch ─► layers ─┊─► head ─► logits [N, V]
                                   └─► draft context┊           position, token [N] of the sample rows
    anchors ─► draft stages ────────────────────────┊─► head ─► hidden, base logits of the blocks
                                           captured ┊

On an accelerator both pieces are captured the second time that a shape comes by, in *buckets*: a step with fewer rows,
segments or table columns than its bucket is padded with rows that see nothing and write to trash rows. Prefill steps
are not captured. A padded, replayed step gives the bits of an eager one wherever the kernels are row-invariant. The
head is not captured: graphs share their memory, and logits that outlive the next one would have to be copied out of it.
A shape that could not be captured, for want of memory as a rule, is named in a warning and stays eager.
"""

from __future__ import annotations

import logging
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
from deepinfer_core.model.backbone import Backbone, ForwardOutput, GivenEmbeddings
from deepinfer_core.model.batch import Batch, batch_of, build_batch
from deepinfer_core.model.draft import DraftBlock, Drafter, DraftStates
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

_log = logging.getLogger(__name__)

_MOST_GRAPHS = 192  # kept; the one that was used longest ago goes first. A load that falls from 64 to 1 request with
# drafts comes by 110 shapes, and each that has gone takes a step to be captured again.


def bucket(size: int) -> int:
    """The smallest bucket that holds `size`: every size up to 16, then eight for each doubling."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


@dataclass(frozen=True, eq=False)
class ForwardRows:
    """What a step's sample rows gave, on the device; position and token are valid until the next forward pass."""

    logits: Tensor  # [N, V] float32
    position: Tensor  # [N] int64, of the row's own token
    token: Tensor  # [N] int64


@dataclass(frozen=True, eq=False)
class _CapturedRows:
    """What a graph leaves of the sample rows."""

    normalized: Tensor  # [N, D], what the head takes
    position: Tensor  # [N]
    token: Tensor  # [N]


class Capture(Protocol):
    """A device's way to record work and to run it again."""

    def record[Output](self, work: Callable[[], Output]) -> tuple[Output, Callable[[], None]]:
        """Record what `work` launches, without running it: the tensors that it returns, and a call that fills them.

        Every such call reads and writes the tensors of the time of recording.
        """
        ...


class CudaCapture:
    """CUDA graphs that share one memory pool: they run one by one, so what one leaves free the next may use.

    Work beside the step (model/beside.py) fills what the step leaves idle: the step's own stream goes first.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None

    def record[Output](self, work: Callable[[], Output]) -> tuple[Output, Callable[[], None]]:
        """See `Capture`."""
        if self._stream is None:  # made by the thread that captures, on its device
            self._stream = torch.cuda.Stream(priority=-1)
        graph = torch.cuda.CUDAGraph()
        # Another thread may wait for the step before this one meanwhile, so only this thread's calls are checked.
        recording: AbstractContextManager[None] = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        # A recording that cannot end leaves its own stream current; the outer block doesn't.
        try:
            with torch.cuda.stream(torch.cuda.current_stream()), recording:
                output = work()
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()  # torch believes that the old one still records
            raise
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
        self._refused: set[Hashable] = set()  # shapes that could not be captured
        self.is_cold = False  # the newest step compiled or captured something

    @property
    def captured_rows(self) -> tuple[int, ...]:
        """Sizes [rows] that steps are padded to, ascending; none where nothing is captured."""
        if self._capture is None or self.mask_decoder:
            return ()
        most = min(self.most_rows, self.state.layout.window.scratch_rows)
        return tuple(sorted({min(self._padded(rows), most) for rows in range(1, most + 1)}))

    # ---- the step -------------------------------------------------------------------------------------------------

    def run(
        self, plan: StepPlan, given: GivenEmbeddings | None, *, store_context: bool
    ) -> tuple[ForwardRows | None, tuple[int, ...]]:
        """(sample rows or None, real rows that each layer computed)."""
        self.is_cold = False
        shape = self._fixed_shape(plan) if given is None else None
        key = (shape, store_context)
        if shape is None or not self._is_known(key):
            return self._eager(plan, given, store_context)
        arrays = pack_step(plan, self.state.layout, self.kernels.row_multiple, fixed=shape)
        graph: _Graph[_CapturedRows] | None = self._graphs[key]
        inputs = self._zeros(arrays.largest_size) if graph is None else graph.inputs
        inputs[: arrays.size].copy_(staged(arrays, inputs.device), non_blocking=True)
        if graph is None:
            graph = self._capture_step(key, arrays, inputs, store_context)
        if graph is None:
            return self._eager(plan, given, store_context)
        graph.replay()
        count = plan.num_rows
        rows = graph.output
        counts = (count,) * self.backbone.config.num_hidden_layers
        logits = self.backbone.head(rows.normalized[:count])
        return ForwardRows(logits, rows.position[:count], rows.token[:count]), counts

    def _eager(
        self, plan: StepPlan, given: GivenEmbeddings | None, store_context: bool
    ) -> tuple[ForwardRows | None, tuple[int, ...]]:
        batch = build_batch(
            plan, self.state, self.params, self.kernels, mask_decoder=self.mask_decoder, group=self.context
        )
        out = self._layers(batch, given, store_context, with_logits=True)
        if out.logits is None:
            return None, out.rows_per_layer
        return ForwardRows(out.logits, batch.sample_position, batch.sample_token), out.rows_per_layer

    def _layers(
        self, batch: Batch, given: GivenEmbeddings | None, store_context: bool, *, with_logits: bool
    ) -> ForwardOutput:
        out = self.backbone.forward(batch, self.state, given=given, with_logits=with_logits)
        if store_context and self.drafter is not None and out.features is not None:
            self.drafter.store_context(out.features, batch, self.state)
        return out

    def _fixed_shape(self, plan: StepPlan) -> StepShape | None:
        """The bucket of a step that graphs are made for."""
        if self._capture is None or self.mask_decoder or plan.num_rows > self.most_rows:
            return None
        if not fits_fixed_shape(plan, self.state.layout):
            return None
        rows = self._padded(max(plan.num_rows, plan.padded_rows))
        return StepShape.fixed(min(rows, self.state.layout.window.scratch_rows), bucket(plan.block_tables.shape[1]))

    def _padded(self, rows: int) -> int:
        multiple = self.kernels.row_multiple
        return bucket(-(-rows // multiple)) * multiple

    def _capture_step(
        self, key: Hashable, arrays: StepArrays, inputs: Tensor, store_context: bool
    ) -> _Graph[_CapturedRows] | None:
        shape, columns = arrays.shape, arrays.views(inputs)

        def work() -> _CapturedRows:
            batch = batch_of(shape, columns, self.state, self.params, self.kernels)
            out = self._layers(batch, None, store_context, with_logits=False)
            if out.normalized is None:
                raise EngineError("a step of a fixed shape has no sample rows; run with enforce_eager=True")
            return _CapturedRows(out.normalized, batch.sample_position, batch.sample_token)

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
        graph: _Graph[DraftStates] | None = self._graphs[key]
        inputs = self._zeros(4, size) if graph is None else graph.inputs
        inputs[:, :segments] = torch.stack((anchor, anchor_position, slot, visible_from))
        inputs[3, segments:] = NOTHING_VISIBLE
        if graph is None:
            graph = self._capture_stages(self.drafter, key, inputs, num_steps)
        if graph is None:
            return self.drafter.make_block(anchor, anchor_position, slot, visible_from, self.state, num_steps)
        graph.replay()
        states = graph.output
        return self.drafter.with_logits(DraftStates(states.hidden[:segments], states.normalized[:segments]))

    def _capture_stages(
        self, drafter: Drafter, key: Hashable, inputs: Tensor, num_steps: int
    ) -> _Graph[DraftStates] | None:
        def work() -> DraftStates:
            anchor, anchor_position, slot, visible_from = inputs.unbind(0)
            return drafter.run_stages(anchor, anchor_position, slot, visible_from, self.state, num_steps)

        return self._keep(key, inputs, work)

    # ---- graphs ---------------------------------------------------------------------------------------------------

    def _is_known(self, key: Hashable) -> bool:
        """Whether this shape came by before: its first step runs eagerly, which compiles and loads every kernel."""
        if key in self._refused:
            return False
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return True
        self._graphs[key], self.is_cold = None, True
        while len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return False

    def _keep[Output](self, key: Hashable, inputs: Tensor, work: Callable[[], Output]) -> _Graph[Output] | None:
        """None where torch could not capture it: nothing has run then, so the caller may still run it eagerly."""
        if self._capture is None:
            raise ValueError("nothing is captured on this device")
        self.is_cold = True
        try:
            output, replay = self._capture.record(work)
        except RuntimeError as error:  # torch's own, lack of memory among them
            _log.warning("steps of shape %s could not be captured and stay eager: %s", key, error)
            self._refused.add(key)
            del self._graphs[key]
            return None
        graph = self._graphs[key] = _Graph(inputs, output, replay)
        return graph

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.state.history.device)
