"""`Runner`: a plan -> device work -> a result. The only place where a plan meets tensors.

    admit, release -> Forward (batch, layers, head, draft context) -> sample, verify -> propose drafts -> StepResult
                                                                             |
                 held_tokens[slot] = [newest token, drafts ..], held_position[slot] = its position

`run(plan)` is `wait(launch(plan))`. `launch` returns at once, so that the next plan can be made; steps run in the order
of their launches. On an accelerator it hands the step to one worker thread, which only queues the step's work and goes
on with the next one: nothing waits for the device but `wait`, for the one block of numbers that the step's result is
made from. On a CPU the step runs in `wait`, since two threads would only take turns (lazy_executor.py).
"""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.cache.layout import CacheLayout
from deepinfer_core.cache.state import ModelState
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.scheduler import IN_FLIGHT_STEPS
from deepinfer_core.errors import CapacityError, EngineError
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference.engram import DEAD_CLASS
from deepinfer_core.model.backbone import Backbone, GivenEmbeddings
from deepinfer_core.model.draft import Drafter
from deepinfer_core.model.params import ModelParams
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.experts import ExpertExchange
from deepinfer_core.parallel.owned import EngramSource
from deepinfer_core.runtime.forward import CudaCapture, Forward, ForwardRows
from deepinfer_core.runtime.lazy_executor import LazyExecutor
from deepinfer_core.runtime.pending import PendingResult, Proposals, SampledRows
from deepinfer_core.sampling import PromptLogprobs, SampledBatch, Sampler, SampleRows, prompt_logprobs, to_device
from deepinfer_core.scheduling.plan import Admission, Content, StepPlan, StepResult

__all__ = ["Runner", "RunnerConfig", "RunnerStats"]


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes and choices of one runner."""

    num_slots: int
    num_blocks: int
    max_step_rows: int
    num_drafts: int = 0  # largest number of proposals, 0 = no drafter
    verification: str = "coupled"
    mask_decoder: bool = False  # decoder_prefill="mask"
    confidence_temperatures: tuple[float, ...] = (1.0,)
    logprobs_mode: str = "raw"
    num_token_ids: int | None = None  # len(tokenizer); ids from here on are never drawn. None = the vocabulary
    graphs: bool = True  # decode and verification steps are captured, where the device can; no collective can be


@dataclass
class RunnerStats:
    """Totals since the start."""

    steps: int = 0
    device_seconds: float = 0.0
    rows_per_layer: list[int] = field(default_factory=list[int])


class Runner:
    """Runs the plans of one engine on one device.

    context: ranks that share long prompts; all run the same plans. runs_ahead: a launched step runs whether or not
    anybody waits for it, as ranks that meet in it need; on an accelerator it does so in any case.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: ModelParams,
        kernels: Kernels,
        config: RunnerConfig,
        *,
        cache_form: str = "plain",
        context: Communicator | None = None,
        exchange: ExpertExchange | None = None,
        engram: EngramSource | None = None,
        runs_ahead: bool = False,
    ) -> None:
        if config.num_drafts > model_config.dspark_block_size or (config.num_drafts and params.draft is None):
            raise CapacityError(
                f"num_drafts is {config.num_drafts}; this checkpoint drafts at most "
                f"{0 if params.draft is None else model_config.dspark_block_size}"
            )
        self.config, self.model_config = config, model_config
        self.device, self.dtype = params.embed.device, params.embed.dtype
        backtrack = IN_FLIGHT_STEPS * (config.num_drafts + 1)
        self.layout = CacheLayout(
            model_config,
            config.num_slots,
            config.num_blocks,
            config.max_step_rows,
            backtrack,
            form="packed" if cache_form == "packed" else "plain",
        )
        try:
            self.state = ModelState.allocate(self.layout, device=self.device, dtype=self.dtype)
        except (RuntimeError, MemoryError) as error:  # torch has no class of its own for memory of the CPU
            raise CapacityError(
                f"the caches could not be allocated ({str(error).splitlines()[0]}); lower num_blocks "
                f"{config.num_blocks}, max_num_seqs {config.num_slots} or max_num_batched_tokens {config.max_step_rows}"
            ) from error
        self.params, self.kernels = params, kernels
        self.backbone = Backbone(model_config, params, kernels, exchange, engram)
        self.drafter = Drafter(self.backbone, params.draft) if config.num_drafts and params.draft is not None else None
        self.sampler = Sampler(
            model_config.vocab_size,
            config.num_slots,
            self.device,
            mask_from=config.num_token_ids or model_config.vocab_size,
            eos_token_id=model_config.eos_token_id,
            mode="ratio" if config.verification == "ratio" else "coupled",
            logprobs_mode="processed" if config.logprobs_mode == "processed" else "raw",
            kernels=kernels,
        )
        self.forward = Forward(
            self.backbone,
            self.drafter,
            self.state,
            mask_decoder=config.mask_decoder,
            capture=CudaCapture() if config.graphs and _can_be_captured(params) else None,
            most_rows=min(config.max_step_rows, config.num_slots * (1 + config.num_drafts)),
            context=context,
        )
        self.stats = RunnerStats(rows_per_layer=[0] * model_config.num_hidden_layers)
        self._admitted: dict[int, Admission] = {}  # slot -> its request
        self._draft_logits = self._ratio_logits()
        self._temperatures = self._confidence_temperatures()
        self._failures = 0  # of launched steps; the worker's
        self._reported_failures = 0  # by `wait`; the caller's
        self._last_done_s = 0.0  # when the result before was read
        self._worker = _worker_thread(self.device) if runs_ahead or self.device.type != "cpu" else LazyExecutor()

    # ---- the three calls of a step -------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step on the calling thread."""
        return self._finish(self._step(plan))

    def launch(self, plan: StepPlan) -> Future[PendingResult]:
        """Queue one step; returns at once. It does not run if a step fails that `wait` has not reported by now."""
        return self._worker.submit(self._step_behind, plan, self._reported_failures)

    def wait(self, launched: Future[PendingResult]) -> StepResult:
        """The result of a launched step, or the error that it ended in."""
        try:
            pending = launched.result()
        except Exception:
            self._reported_failures += 1
            raise
        return self._finish(pending)

    def close(self) -> None:
        """Finish what is queued and end the worker thread, if there is one."""
        self._worker.shutdown()

    @torch.inference_mode()
    def probe(self, plan: StepPlan) -> None:
        """Run the forward pass of a plan whose rows write nothing; for measuring what a step costs."""
        self.forward.run(plan, None, store_context=False)
        self._synchronize()

    @torch.inference_mode()
    def probe_drafts(self, slot: Tensor) -> None:
        """Draft for slots [S] that hold nothing; for measuring what that costs."""
        if self.drafter is not None:
            zero = torch.zeros_like(slot)
            block = self.forward.draft_block(zero, zero, slot, zero, self.config.num_drafts)
            self.drafter.draw_block(block, zero, lambda _, logits: logits.argmax(-1))
            self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    # ---- one step ------------------------------------------------------------------------------------------------

    def _step_behind(self, plan: StepPlan, reported_failures: int) -> PendingResult:
        """A step planned in the belief that all before it would succeed.

        Behind a failed one its held rows would stand where a former tenant of the slot stopped, and write there: into
        blocks that others share.
        """
        try:
            if self._failures != reported_failures:
                raise EngineError("the step before it failed, so it could not run")
            return self._step(plan)
        except BaseException:  # a step that was interrupted may have written a part of what it writes
            self._failures += 1
            raise

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> PendingResult:
        started_s = time.perf_counter()
        for release in plan.releases:
            self.sampler.release(release)
            admitted = self._admitted.get(release.slot)
            if admitted is not None and admitted.generation == release.generation:
                del self._admitted[release.slot]
        for admission in plan.admissions:
            self._admit(admission)
        rows, rows_per_layer = self._run_layers(plan)
        pending = self._sample(plan, rows, started_s)
        if self.forward.is_cold:
            pending = replace(pending, is_cold=True)
        self.stats.steps += 1
        self.stats.rows_per_layer = [a + b for a, b in zip(self.stats.rows_per_layer, rows_per_layer, strict=True)]
        return pending

    def _run_layers(self, plan: StepPlan) -> tuple[ForwardRows | None, tuple[int, ...]]:
        return self.forward.run(plan, self._given_embeddings(plan), store_context=plan.stores_draft_context)

    def _finish(self, pending: PendingResult) -> StepResult:
        """Wait for a step's numbers. The device's errors surface here."""
        result = pending.read()
        done_s = time.perf_counter()
        self.stats.device_seconds += done_s - max(pending.started_s, self._last_done_s)
        self._last_done_s = done_s
        return replace(result, is_cold=True) if pending.is_cold else result

    def _admit(self, admission: Admission) -> None:
        self.sampler.admit(admission)
        self._admitted[admission.slot] = admission
        ring = self.layout.history
        first = admission.first_position
        before = np.arange(max(0, first - self.model_config.engram_max_ngram_size + 1), first)
        if len(before) == 0:
            return
        classes = self.params.token_classes[to_device(admission.token_ids[before], self.device)]
        if admission.content is not None:
            image = to_device(admission.content[before] == Content.IMAGE, self.device)
            classes = classes.masked_fill(image, DEAD_CLASS)
        rows = to_device(admission.slot * ring.capacity + before % ring.capacity, self.device)
        self.state.history[rows] = classes

    def _given_embeddings(self, plan: StepPlan) -> GivenEmbeddings | None:
        """Rows of the plan whose input the admission brought along; None for a step of text alone."""
        rows: list[NDArray[np.int64]] = []
        values: list[NDArray[np.float32]] = []
        if not plan.row_content.any():
            return None
        for segment, slot in enumerate(plan.segment_slot.tolist()):
            admission = self._admitted.get(slot)
            if admission is None or admission.embedded_positions is None or admission.embeddings is None:
                continue
            start, stop = plan.segment_start[segment : segment + 2]
            positions = plan.row_position[start:stop]
            at = np.searchsorted(admission.embedded_positions, positions)
            at = np.minimum(at, len(admission.embedded_positions) - 1)
            found = np.flatnonzero(admission.embedded_positions[at] == positions)
            rows.append(start + found)
            values.append(admission.embeddings[at[found]])
        if not rows:
            return None
        joined = to_device(np.concatenate(rows), self.device)
        return GivenEmbeddings(joined, to_device(np.concatenate(values), self.device))

    def _sample(self, plan: StepPlan, out: ForwardRows | None, started_s: float) -> PendingResult:
        if out is None:
            return PendingResult(plan, started_s)
        rows = SampledRows.of(plan, self._admitted)
        prompt = self._prompt_logprobs(plan, out.logits, rows)
        if len(rows.segments) == 0:
            return PendingResult(plan, started_s, prompt)
        if len(rows.draw) < len(out.logits):  # some rows only score the prompt
            draw = to_device(rows.draw, self.device)
            out = ForwardRows(out.logits[draw], out.position[draw], out.token[draw])
        slots = plan.segment_slot[rows.segments]
        sampled = self.sampler.sample(
            SampleRows(
                logits=out.logits,
                position=out.position,
                token=out.token,
                segment_start=rows.segment_start,
                segment_slot=slots,
                grammar_masks=rows.masks(plan),
                draft_logits=self._held_draft_logits(rows, slots),
            )
        )
        slot = to_device(slots.astype(np.int64), self.device)
        first = out.position[to_device(rows.segment_start[:-1].astype(np.int64), self.device)]
        anchor, anchor_position = self._hold(slot, first, sampled)
        proposals = self._propose(plan, rows, slot, slots, anchor, anchor_position)
        return PendingResult.queue(plan, started_s, rows, first, sampled, proposals, prompt)

    def _hold(self, slot: Tensor, first: Tensor, sampled: SampledBatch) -> tuple[Tensor, Tensor]:
        """The newest token of each segment and its position become the slot's held anchor."""
        newest = sampled.num_tokens - 1
        anchor = sampled.tokens.gather(1, newest[:, None])[:, 0].clamp_min(0)
        anchor_position = first + sampled.num_tokens
        self.state.held_tokens[slot, 0] = anchor
        self.state.held_position[slot] = anchor_position
        return anchor, anchor_position

    # ---- drafts --------------------------------------------------------------------------------------------------

    def _propose(
        self,
        plan: StepPlan,
        rows: SampledRows,
        slot: Tensor,
        slots: NDArray[np.int32],
        anchor: Tensor,
        position: Tensor,
    ) -> Proposals | None:
        """New drafts of the segments that want some; None if nobody does."""
        wanted = plan.segment_num_drafts[rows.segments]
        if self.drafter is None or not wanted.any():
            return None
        num_steps = int(wanted.max())
        chosen = np.flatnonzero(wanted)
        if len(chosen) < len(wanted):
            pick = to_device(chosen, self.device)
            slot, slots, anchor, position = slot[pick], slots[chosen], anchor[pick], position[pick]
        noise = self.sampler.draft_noise(slots, position + 1, num_steps)
        visible_from = np.maximum(plan.segment_decoder_from, plan.segment_window_from)
        if plan.segment_draft_from is not None:
            visible_from = np.maximum(visible_from, plan.segment_draft_from)
        lowest = to_device(visible_from[rows.segments[chosen]], self.device)
        block = self.forward.draft_block(anchor, position, slot, lowest, num_steps)
        drafts = self.drafter.draw_block(block, anchor, noise.choose)
        self.state.held_tokens[slot, 1 : 1 + num_steps] = drafts.tokens
        if self._draft_logits is not None:
            self._draft_logits[slot, :num_steps] = torch.stack(drafts.logits, 1)
        calibrated = drafts.confidence_logits / self._temperatures[:num_steps]
        return Proposals(chosen, drafts.tokens, torch.sigmoid(calibrated))

    def _ratio_logits(self) -> Tensor | None:
        if self.config.verification != "ratio" or not self.config.num_drafts:
            return None
        shape = (self.config.num_slots, self.config.num_drafts, self.model_config.vocab_size)
        return torch.zeros(shape, device=self.device)

    def _held_draft_logits(self, rows: SampledRows, slots: NDArray[np.int32]) -> Tensor | None:
        """[N, V]: row k of a segment gets the logits that its draft k + 1 was drawn from."""
        if self._draft_logits is None:
            return None
        lengths = np.diff(rows.segment_start)
        index = np.arange(len(rows.draw)) - np.repeat(rows.segment_start[:-1], lengths)
        slot = to_device(np.repeat(slots, lengths).astype(np.int64), self.device)
        place = to_device(np.minimum(index, self.config.num_drafts - 1), self.device)
        return self._draft_logits[slot, place]

    def _confidence_temperatures(self) -> Tensor:
        given = self.config.confidence_temperatures
        values = given if len(given) > 1 else given * max(1, self.config.num_drafts)
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _prompt_logprobs(self, plan: StepPlan, logits: Tensor, rows: SampledRows) -> dict[int, PromptLogprobs]:
        found: dict[int, PromptLogprobs] = {}
        for segment, (sample_rows, positions) in rows.prompt_rows.items():
            admission = self._admitted[int(plan.segment_slot[segment])]
            target = to_device(admission.token_ids[positions + 1], self.device)
            wanted = to_device(sample_rows, self.device)
            found[segment] = prompt_logprobs(
                logits[wanted], target, admission.params.prompt_logprobs or 0, self.kernels
            )
        return found


def _can_be_captured(params: ModelParams) -> bool:
    """Whether all that a step needs is where a graph can reach it; CUDA is what has graphs here."""
    tables = [layer.engram.table for layer in params.layers if layer.engram is not None]
    return params.embed.device.type == "cuda" and all(table.codes.device.type == "cuda" for table in tables)


def _worker_thread(device: torch.device) -> Executor:
    return ThreadPoolExecutor(1, thread_name_prefix="deepinfer-device", initializer=_take_device, initargs=(device,))


def _take_device(device: torch.device) -> None:
    """A thread begins with device 0, whichever the process has chosen; kernels run on the thread's."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
