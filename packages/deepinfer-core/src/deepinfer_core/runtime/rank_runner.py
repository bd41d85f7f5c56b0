"""`RankRunner`: a runner whose every step is a step of all ranks that share experts with it.

    leader      plan ──► its context group          notice ─► agreement    ┌ Engram, layers, drafts ┐    verdict
    follower    plan ◄── its leader                 notice ─► agreement    └  of the agreed step     ┘    verdict

What this rank has no rows for, it takes part in without: it runs its experts, and looks up its Engram rows, for those
of others. So does a rank whose own part of a step has failed, up to the verdict. An error of a collective itself is the
end: the ranks have lost each other, and `broken` says why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.errors import ParallelError, PeerError
from deepinfer_core.model.moe import serve_experts
from deepinfer_core.model.params import MoeParams
from deepinfer_core.parallel.expert_balancer import ExpertBalancer
from deepinfer_core.parallel.experts import SharedExperts
from deepinfer_core.parallel.lockstep import Agreement, Lockstep, Notice
from deepinfer_core.parallel.owned import SharedEngram
from deepinfer_core.runtime.context_group import ContextGroup
from deepinfer_core.runtime.forward import ForwardRows
from deepinfer_core.runtime.pending import PendingResult
from deepinfer_core.runtime.runner import Runner
from deepinfer_core.scheduling.plan import Admission, RowKind, StepPlan, TokenSource

__all__ = ["RankRunner"]


class RankRunner(Runner):
    """`exchange`, `engram`: None where every rank has all of it. `group`: the ranks that run the plans of the first of
    them, None = this one alone. `pads`: every rank pads to the rows of the fullest.
    """

    def __init__(
        self,
        *args: Any,
        lockstep: Lockstep,
        exchange: SharedExperts | None,
        engram: SharedEngram | None,
        group: ContextGroup | None = None,
        balancer: ExpertBalancer | None = None,
        pads: bool = False,
        **named: Any,
    ) -> None:
        super().__init__(
            *args,
            exchange=exchange,
            engram=engram,
            context=None if group is None else group.rows,
            runs_ahead=True,
            **named,
        )
        self.lockstep, self.exchange, self.engram = lockstep, exchange, engram
        self.agreed: Agreement | None = None  # of the newest step
        self.broken: ParallelError | None = None
        self.balancer = balancer
        self._group, self._pads = group, pads

    # ---- steps -----------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether the plans that this rank runs are its own."""
        return self._group is None or self._group.leads

    def join(self, notice: Notice) -> Agreement:
        """A dummy step: none of its rows is from here. Raises ParallelError or PeerError."""
        return self._worker.submit(self._join, notice).result()

    def follow(self, notice: Notice) -> Agreement:
        """The next step of the leader; `notice` is for a dummy step. Raises ParallelError or PeerError."""
        return self._worker.submit(self._follow, notice).result()

    def _follow(self, notice: Notice) -> Agreement:
        plan = self._shared_plan(None)
        if plan is None:
            return self._join(notice)
        try:
            self._finish(self._step(plan))
        except ParallelError:
            raise
        except Exception as error:
            raise PeerError(f"a step of the leader has failed: {error}") from error  # who knows, and runs it again
        if self.agreed is None:
            raise ParallelError("a step was run that nobody agreed on")
        return self.agreed

    def _shared_plan(self, plan: StepPlan | None) -> StepPlan | None:
        """What the leader runs, on every rank of its context group; None = a dummy step."""
        try:
            return plan if self._group is None else self._group.share_plan(plan)
        except ParallelError as error:
            self.broken = error
            raise

    @torch.inference_mode()
    def _join(self, notice: Notice) -> Agreement:
        if self.leads:
            self._shared_plan(None)
        agreed = self._begin(notice)
        self._conclude(self._serve_rest())
        return agreed

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> PendingResult:
        try:
            return self._step_together(plan)
        except ParallelError as error:
            self.broken = error
            raise

    def _step_together(self, plan: StepPlan) -> PendingResult:
        if self.leads:
            self._shared_plan(plan)
        agreed = self._begin(self._notice(plan))
        failure: Exception | None = None
        pending: PendingResult | None = None
        if self._group is not None:
            self._group.begin()
        try:
            pending = super()._step(replace(plan, padded_rows=agreed.most_rows) if self._pads else plan)
        except ParallelError:
            raise
        except Exception as error:
            failure = error if self._group is None else self._group.fail(error)
        failure = self._serve_rest() or failure
        if self._group is not None:
            failure = self._group.conclude(failure, self.state)
        self._conclude(failure)
        if pending is None:
            raise ParallelError("a step has neither a result nor an error")
        return pending

    def _run_layers(self, plan: StepPlan) -> tuple[ForwardRows | None, tuple[int, ...]]:
        if self._group is not None:
            self._group.enter()
        found = super()._run_layers(plan)
        if self._group is not None:
            self._group.leave()
        return found

    def _admit(self, admission: Admission) -> None:
        super()._admit(admission)
        if self.exchange is not None:
            self.exchange.admit(admission.slot, admission.seed)

    # ---- together --------------------------------------------------------------------------------------------------

    def _notice(self, plan: StepPlan) -> Notice:
        segment_of = np.repeat(np.arange(plan.num_segments), np.diff(plan.segment_start))
        kept = (plan.row_source == TokenSource.HELD) | (plan.row_position >= plan.segment_decoder_from[segment_of])
        has_no_half = self.model_config.decoder_start >= self.model_config.num_hidden_layers
        return Notice(
            num_rows=plan.num_rows,
            fixed_rows=plan.num_rows - int(np.count_nonzero(plan.row_kind == RowKind.DRAFT)),
            runs_decoder=has_no_half or self.config.mask_decoder or bool(kept.any()),
            drafts=self.drafter is not None and bool(plan.segment_num_drafts.any()),
            has_work=True,
        )

    def _begin(self, notice: Notice) -> Agreement:
        try:
            if self.balancer is None:
                agreed = self.lockstep.agree(notice)
            else:
                agreed = self.lockstep.agree(notice._replace(num_staged=self.balancer.num_staged))
                self.balancer.begin_step(agreed.step, agreed.num_staged)
        except ParallelError as error:
            self.broken = error
            raise
        self.agreed = agreed
        if agreed.most_rows:
            self._expect(self._layers(agreed))
        return agreed

    def _layers(self, agreed: Agreement) -> list[int]:
        """Layers and draft stages that some rank has rows for, in the order in which they run."""
        config = self.model_config
        last = config.num_hidden_layers if agreed.runs_decoder else config.decoder_start
        layers = list(range(min(last, config.num_hidden_layers)))
        stages = range(config.num_nextn_predict_layers) if agreed.drafts else ()
        return layers + [config.num_hidden_layers + stage for stage in stages]

    def _expect(self, layers: list[int], *, with_engram: bool = True) -> None:
        if self.exchange is not None:
            self.exchange.begin(layers)
        if self.engram is not None and with_engram:
            self.engram.begin()

    def _serve_rest(self) -> Exception | None:
        """Take part in what is left of the step without rows of one's own; the first error of this rank's own."""
        failure: Exception | None = None
        try:
            if self.engram is not None:
                self.engram.finish()
            while self.exchange is not None and (due := self.exchange.unfinished()):
                try:
                    serve_experts(self._experts_of(due[0]), self.exchange, due[0], self.model_config, self.kernels)
                except ParallelError:
                    raise
                except Exception as error:
                    if self.exchange.unfinished() == due:
                        raise ParallelError(f"layer {due[0]} cannot be exchanged: {error}") from error
                    failure = failure or error
        except ParallelError as error:
            self.broken = error
            raise
        return failure

    def _experts_of(self, layer: int) -> MoeParams:
        params, num_layers = self.params, self.model_config.num_hidden_layers
        if layer < num_layers:
            return params.layers[layer].ffn
        if params.draft is None:
            raise ParallelError(f"draft stage {layer - num_layers} is exchanged, and this rank has no drafter")
        return params.draft.stages[layer - num_layers].ffn

    def _conclude(self, failure: Exception | None) -> None:
        try:
            self.lockstep.conclude(failure is not None)
        except ParallelError as error:
            self.broken = error
            raise
        if failure is not None:
            raise failure

    def close(self) -> None:
        """See `Runner`."""
        super().close()
        if self.balancer is not None:
            self.balancer.close()

    # ---- measuring at the start: all ranks run the same passes ------------------------------------------------------

    def probe(self, plan: StepPlan) -> None:
        """See `Runner`; all ranks at once, with plans of one size."""
        self._expect(list(range(self.model_config.num_hidden_layers)))
        super().probe(plan)

    def probe_drafts(self, slot: Tensor) -> None:
        """See `Runner`; all ranks at once, for the same number of slots."""
        if self.drafter is not None:
            first = self.model_config.num_hidden_layers
            stages = range(first, first + self.model_config.num_nextn_predict_layers)
            self._expect(list(stages), with_engram=False)
        super().probe_drafts(slot)
