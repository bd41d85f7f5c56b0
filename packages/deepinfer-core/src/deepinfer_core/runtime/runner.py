"""`Runner`: a plan -> device work -> a result. The only place where a plan meets tensors.

    admit, release -> build_batch -> Backbone.forward -> draft context -> sample, verify -> propose drafts -> StepResult
                                                                             |
                 held_tokens[slot] = [newest token, drafts ..], held_position[slot] = its position

`run(plan)` is `wait(launch(plan))`. `launch` hands the step to one worker thread and returns at once, so that the next
plan can be made while torch works; steps run in the order of their launches.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

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
from deepinfer_core.model.backbone import Backbone, ForwardOutput, GivenEmbeddings
from deepinfer_core.model.batch import Batch, build_batch
from deepinfer_core.model.draft import Drafter, DraftOutput
from deepinfer_core.model.params import ModelParams
from deepinfer_core.sampling import SampledBatch, Sampler, SampleRows, prompt_logprobs
from deepinfer_core.scheduling.plan import Admission, Content, StepPlan, StepResult, TokenLogprobs

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


@dataclass
class RunnerStats:
    """Totals since the start."""

    steps: int = 0
    device_seconds: float = 0.0
    rows_per_layer: list[int] = field(default_factory=list[int])


class Runner:
    """Runs the plans of one engine on one device."""

    def __init__(
        self,
        model_config: ModelConfig,
        params: ModelParams,
        kernels: Kernels,
        config: RunnerConfig,
        *,
        cache_form: str = "plain",
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
        self.backbone = Backbone(model_config, params, kernels)
        self.drafter = Drafter(self.backbone, params.draft) if config.num_drafts and params.draft is not None else None
        self.sampler = Sampler(
            model_config.vocab_size,
            config.num_slots,
            self.device,
            mask_from=config.num_token_ids or model_config.vocab_size,
            eos_token_id=model_config.eos_token_id,
            mode="ratio" if config.verification == "ratio" else "coupled",
            logprobs_mode="processed" if config.logprobs_mode == "processed" else "raw",
        )
        self.stats = RunnerStats(rows_per_layer=[0] * model_config.num_hidden_layers)
        self._admitted: dict[int, Admission] = {}  # slot -> its request
        self._draft_logits = self._ratio_logits()
        self._temperatures = self._confidence_temperatures()
        self._failures = 0  # of launched steps; the worker's
        self._reported_failures = 0  # by `wait`; the caller's
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="deepinfer-device")

    # ---- the three calls of a step -------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step on the calling thread."""
        return self._step(plan)

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Queue one step; returns at once. It does not run if a step fails that `wait` has not reported by now."""
        return self._worker.submit(self._step_behind, plan, self._reported_failures)

    def wait(self, launched: Future[StepResult]) -> StepResult:
        """The result of a launched step, or the error that it ended in."""
        try:
            return launched.result()
        except Exception:
            self._reported_failures += 1
            raise

    def close(self) -> None:
        """Finish what is queued and end the worker thread."""
        self._worker.shutdown()

    @torch.inference_mode()
    def probe(self, plan: StepPlan) -> None:
        """Run the forward pass of a plan whose rows write nothing; for measuring what a step costs."""
        self.backbone.forward(build_batch(plan, self.state, self.params, self.kernels), self.state)

    @torch.inference_mode()
    def probe_drafts(self, slot: Tensor) -> None:
        """Draft for slots [S] that hold nothing; for measuring what that costs."""
        if self.drafter is not None:
            zero = torch.zeros_like(slot)
            self.drafter.propose(zero, zero, slot, zero, self.state, lambda _, logits: logits.argmax(-1))

    # ---- one step ------------------------------------------------------------------------------------------------

    def _step_behind(self, plan: StepPlan, reported_failures: int) -> StepResult:
        """A step planned in the belief that all before it would succeed.

        Behind a failed one its held rows would stand where a former tenant of the slot stopped, and write there: into
        blocks that others share.
        """
        try:
            if self._failures != reported_failures:
                raise EngineError("the step before it failed, so it could not run")
            return self._step(plan)
        except Exception:
            self._failures += 1
            raise

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        for release in plan.releases:
            self.sampler.release(release)
            admitted = self._admitted.get(release.slot)
            if admitted is not None and admitted.generation == release.generation:
                del self._admitted[release.slot]
        for admission in plan.admissions:
            self._admit(admission)
        batch = build_batch(plan, self.state, self.params, self.kernels, mask_decoder=self.config.mask_decoder)
        out = self.backbone.forward(batch, self.state, given=self._given_embeddings(plan))
        if self.drafter is not None and plan.stores_draft_context and out.features is not None:
            self.drafter.store_context(out.features, batch, self.state)
        result = self._sample(plan, batch, out)
        self.stats.steps += 1
        self.stats.device_seconds += time.perf_counter() - start
        self.stats.rows_per_layer = [a + b for a, b in zip(self.stats.rows_per_layer, out.rows_per_layer, strict=True)]
        return result

    def _admit(self, admission: Admission) -> None:
        self.sampler.admit(admission)
        self._admitted[admission.slot] = admission
        ring = self.layout.history
        first = admission.first_position
        before = np.arange(max(0, first - self.model_config.engram_max_ngram_size + 1), first)
        if len(before) == 0:
            return
        classes = self.params.token_classes[torch.from_numpy(admission.token_ids[before]).to(self.device)]
        if admission.content is not None:
            image = torch.from_numpy(admission.content[before] == Content.IMAGE).to(self.device)
            classes = classes.masked_fill(image, DEAD_CLASS)
        rows = admission.slot * ring.capacity + torch.from_numpy(before % ring.capacity).to(self.device)
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
        joined = torch.from_numpy(np.concatenate(rows)).to(self.device)
        return GivenEmbeddings(joined, torch.from_numpy(np.concatenate(values)).to(self.device))

    def _sample(self, plan: StepPlan, batch: Batch, out: ForwardOutput) -> StepResult:
        if out.logits is None:
            return _empty_result(plan)
        rows = _SampledRows.of(plan, self._admitted)
        prompt = self._prompt_logprobs(plan, out.logits, rows)
        if len(rows.segments) == 0:
            return _empty_result(plan, prompt)
        decoder = batch.decoder or batch.encoder
        draw = torch.from_numpy(rows.draw).to(self.device)  # [N] sample rows that draw
        decoder_row = batch.sample_rows[draw]
        position = decoder.position[decoder_row]
        token_rows = decoder_row if batch.decoder_rows is None else batch.decoder_rows[decoder_row]
        logits = out.logits if len(rows.draw) == len(out.logits) else out.logits[draw]
        slots = plan.segment_slot[rows.segments]
        sampled = self.sampler.sample(
            SampleRows(
                logits=logits,
                position=position,
                token=batch.tokens[token_rows],
                segment_start=rows.segment_start,
                segment_slot=slots,
                grammar_masks=rows.masks(plan),
                draft_logits=self._held_draft_logits(rows, slots),
            )
        )
        slot = torch.from_numpy(slots.astype(np.int64)).to(self.device)
        first = position[torch.from_numpy(rows.segment_start[:-1].astype(np.int64)).to(self.device)]
        anchor, anchor_position = self._hold(slot, first, sampled)
        proposals = self._propose(plan, rows, slot, slots, anchor, anchor_position)
        return self._result(plan, rows, first, sampled, proposals, prompt)

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
        rows: _SampledRows,
        slot: Tensor,
        slots: NDArray[np.int32],
        anchor: Tensor,
        position: Tensor,
    ) -> _Proposals | None:
        """New drafts of the segments that want some; None if nobody does."""
        wanted = plan.segment_num_drafts[rows.segments]
        if self.drafter is None or not wanted.any():
            return None
        num_steps = int(wanted.max())
        chosen = np.flatnonzero(wanted)
        if len(chosen) < len(wanted):
            pick = torch.from_numpy(chosen).to(self.device)
            slot, slots, anchor, position = slot[pick], slots[chosen], anchor[pick], position[pick]
        noise = self.sampler.draft_noise(slots, position + 1, num_steps)
        visible_from = np.maximum(plan.segment_decoder_from, plan.segment_window_from)
        if plan.segment_draft_from is not None:
            visible_from = np.maximum(visible_from, plan.segment_draft_from)
        drafts: DraftOutput = self.drafter.propose(
            anchor,
            position,
            slot,
            torch.from_numpy(visible_from[rows.segments[chosen]]).to(self.device),
            self.state,
            noise.choose,
            num_steps,
        )
        self.state.held_tokens[slot, 1 : 1 + num_steps] = drafts.tokens
        if self._draft_logits is not None:
            self._draft_logits[slot, :num_steps] = drafts.logits
        calibrated = drafts.confidence_logits / self._temperatures[:num_steps]
        return _Proposals(chosen, drafts.tokens, torch.sigmoid(calibrated))

    def _ratio_logits(self) -> Tensor | None:
        if self.config.verification != "ratio" or not self.config.num_drafts:
            return None
        shape = (self.config.num_slots, self.config.num_drafts, self.model_config.vocab_size)
        return torch.zeros(shape, device=self.device)

    def _held_draft_logits(self, rows: _SampledRows, slots: NDArray[np.int32]) -> Tensor | None:
        """[N, V]: row k of a segment gets the logits that its draft k + 1 was drawn from."""
        if self._draft_logits is None:
            return None
        lengths = np.diff(rows.segment_start)
        index = np.arange(len(rows.draw)) - np.repeat(rows.segment_start[:-1], lengths)
        slot = torch.from_numpy(np.repeat(slots, lengths).astype(np.int64)).to(self.device)
        place = torch.from_numpy(np.minimum(index, self.config.num_drafts - 1)).to(self.device)
        return self._draft_logits[slot, place]

    def _confidence_temperatures(self) -> Tensor:
        given = self.config.confidence_temperatures
        values = given if len(given) > 1 else given * max(1, self.config.num_drafts)
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    # ---- results -------------------------------------------------------------------------------------------------

    def _prompt_logprobs(self, plan: StepPlan, logits: Tensor, rows: _SampledRows) -> dict[int, list[TokenLogprobs]]:
        found: dict[int, list[TokenLogprobs]] = {}
        for segment, (sample_rows, positions) in rows.prompt_rows.items():
            admission = self._admitted[int(plan.segment_slot[segment])]
            target = torch.from_numpy(admission.token_ids[positions + 1]).to(self.device)
            wanted = torch.from_numpy(sample_rows).to(self.device)
            found[segment] = prompt_logprobs(logits[wanted], target, admission.params.prompt_logprobs or 0)
        return found

    def _result(
        self,
        plan: StepPlan,
        rows: _SampledRows,
        first: Tensor,
        sampled: SampledBatch,
        proposals: _Proposals | None,
        prompt: dict[int, list[TokenLogprobs]],
    ) -> StepResult:
        count = len(rows.segments)
        depth = 0 if proposals is None else proposals.tokens.shape[1]
        drafts, confidences = np.full((count, depth), -1, np.int64), np.zeros((count, depth), np.float32)
        if proposals is not None:
            drafts[proposals.entries] = proposals.tokens.cpu().numpy()
            confidences[proposals.entries] = proposals.confidences.cpu().numpy()
            unwanted = np.arange(drafts.shape[1]) >= plan.segment_num_drafts[rows.segments][:, None]
            drafts[unwanted] = -1
        errors = {
            int(segment): "no token could be drawn: every logit is masked or not finite"
            for segment, failed in zip(rows.segments, sampled.failed.tolist(), strict=True)
            if failed
        }
        return StepResult(
            step=plan.step,
            slot=plan.segment_slot[rows.segments],
            generation=plan.segment_generation[rows.segments],
            position=first.cpu().numpy() + 1,
            tokens=sampled.tokens.cpu().numpy(),
            num_tokens=sampled.num_tokens.cpu().numpy().astype(np.int32),
            num_verified=sampled.num_verified,
            draft_tokens=drafts,
            confidences=confidences,
            logprobs=sampled.logprobs_on_host(),
            prompt_logprobs=prompt,
            errors=errors,
        )


@dataclass(frozen=True, eq=False)
class _Proposals:
    """Drafts of some of the segments that drew a token."""

    entries: NDArray[np.int64]  # [S] which ones
    tokens: Tensor  # [S, n], n the largest number wanted
    confidences: Tensor  # [S, n] calibrated


@dataclass(frozen=True)
class _SampledRows:
    """Which sample rows of a plan draw a token, and which only score the prompt."""

    segments: NDArray[np.int64]  # [M] segments that draw
    segment_start: NDArray[np.int32]  # [M + 1] into `draw`
    draw: NDArray[np.int64]  # [N] sample rows (rows of the logits)
    plan_rows: NDArray[np.int64]  # [N] the same as rows of the plan
    prompt_rows: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]  # segment -> sample rows, their positions

    @classmethod
    def of(cls, plan: StepPlan, admitted: dict[int, Admission]) -> _SampledRows:
        plan_rows = np.flatnonzero(plan.row_sample)
        segment = np.searchsorted(plan.segment_start, plan_rows, side="right") - 1
        draws = np.ones(len(plan_rows), np.bool_)
        prompt_rows: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        for i in np.unique(segment).tolist():
            admission = admitted.get(int(plan.segment_slot[i]))
            if admission is None or admission.params.prompt_logprobs is None:
                continue
            mine = np.flatnonzero(segment == i)
            position = plan.row_position[plan_rows[mine]]
            scored = position < admission.prompt_tokens - 1
            draws[mine] = position >= len(admission.token_ids) - 1
            if scored.any():
                prompt_rows[i] = (mine[scored], position[scored])
        draw = np.flatnonzero(draws)
        segments, counts = np.unique(segment[draw], return_counts=True)
        start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        return cls(segments, start, draw, plan_rows[draw], prompt_rows)

    def masks(self, plan: StepPlan) -> dict[int, NDArray[np.uint32]]:
        """Grammar masks by number of the drawing row."""
        if not plan.grammar_masks:
            return {}
        return {
            i: plan.grammar_masks[row] for i, row in enumerate(self.plan_rows.tolist()) if row in plan.grammar_masks
        }


def _empty_result(plan: StepPlan, prompt: dict[int, list[TokenLogprobs]] | None = None) -> StepResult:
    none32, none64 = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return StepResult(
        step=plan.step,
        slot=none32,
        generation=none32,
        position=none64,
        tokens=np.zeros((0, 1), np.int64),
        num_tokens=none32,
        num_verified=none32,
        draft_tokens=np.zeros((0, 0), np.int64),
        confidences=np.zeros((0, 0), np.float32),
        prompt_logprobs=prompt or {},
    )
