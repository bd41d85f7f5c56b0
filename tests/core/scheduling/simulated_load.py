"""Tokens a second of an engine on a simulated device with a clock of its own, under a load that changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.config.scheduler import SchedulerConfig, SpeculationConfig
from deepinfer_core.runtime.engine_loop import EngineLoop
from deepinfer_core.runtime.simulated import SimulatedDevice
from deepinfer_core.scheduling.cost import CostModel, CostTable
from deepinfer_core.scheduling.plan import StepPlan
from deepinfer_core.scheduling.scheduler import Scheduler
from tests.core.scheduling.harness import EOS, rules

NUM_DRAFTS = 5
MAX_REQUESTS = 64
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: of the target by rows, of the drafter by requests, of keeping up its context by rows."""

    verify: Callable[[int], float]
    draft: Callable[[int], float]
    context: Callable[[int], float] = lambda rows: 0.0

    def seconds(self, plan: StepPlan) -> float:
        drafting = int(np.count_nonzero(plan.segment_num_drafts))
        context = self.context(plan.num_rows) if plan.stores_draft_context else 0.0
        return self.verify(plan.num_rows) + context + (self.draft(drafting) if drafting else 0.0)


@dataclass(frozen=True)
class Phase:
    """So many requests run at once, for so many seconds, with confidences drawn from `acceptance`.

    prompt_tokens, output_tokens: least and largest of a request. in_turns: the next requests come all together when
    all before them are done, as in offline batches: many prompts beside few that decode, then fewer and fewer requests.
    """

    requests: int
    seconds: float
    acceptance: tuple[float, float]
    prompt_tokens: tuple[int, int] = (3, 3)
    output_tokens: tuple[int, int] = (200, 200)
    in_turns: bool = False


def tokens_a_second(
    policy: str,
    phases: Sequence[Phase],
    costs: Costs,
    *,
    believed: Costs | None = None,
    overlap: bool = True,
    noise: float = 0.0,
    optimism: float = 0.0,
    without_context: float = 0.65,
    seed: int = 0,
) -> list[float]:
    """Rate of each phase. policy: "none", "fixed 3", "scheduled" ... `believed`: what the cost tables say at start.

    noise: standard deviation of the logarithm of a step's seconds. optimism: the confidence head adds it.
    without_context: what is left of acceptance where the drafter has no context, about that of the bundled model.
    """
    now, rng = [0.0], np.random.default_rng(seed)
    kind, _, depth = policy.partition(" ")
    num_drafts = 0 if kind == "none" else int(depth or NUM_DRAFTS)

    def seconds(plan: StepPlan) -> float:
        return costs.seconds(plan) * float(np.exp(noise * rng.standard_normal()))

    def sleep(duration: float) -> None:
        now[0] += duration

    device = SimulatedDevice(
        num_blocks=4 * MAX_REQUESTS,
        num_slots=MAX_REQUESTS,
        num_drafts=num_drafts,
        vocab_size=997,
        encoder_layers=2,
        window=16,
        step_seconds=seconds,
        clock=lambda: now[0],
        sleep=sleep,
        optimism=optimism,
        without_context=without_context,
    )
    table = believed or costs
    model = CostModel(
        CostTable(_SIZES, tuple(table.verify(size) for size in _SIZES)),
        CostTable(_SIZES[:7], tuple(table.draft(size) for size in _SIZES[:7])),
        max_rows=512,
        max_requests=MAX_REQUESTS,
    )
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=512),
        num_blocks=4 * MAX_REQUESTS,
        max_model_len=400,
        eos_token_id=EOS,
        rules=rules(),
        speculation=SpeculationConfig(
            num_drafts=num_drafts, draft_schedule="scheduled" if kind == "scheduled" else "fixed"
        ),
        cost=model if kind == "scheduled" else None,
        clock=lambda: now[0],
    )
    loop = EngineLoop(scheduler, device, depth=2 if overlap else 1, clock=lambda: now[0])
    rates: list[float] = []
    number = 0
    for phase in phases:
        device.acceptance = phase.acceptance
        for surplus in range(number - max(0, scheduler.num_unfinished - phase.requests), number):
            scheduler.abort(surplus)
        start_s, tokens = now[0], scheduler.stats.output_tokens
        while now[0] < start_s + phase.seconds or (phase.in_turns and scheduler.num_unfinished):
            if not (phase.in_turns and scheduler.num_unfinished):
                while scheduler.num_unfinished < phase.requests:
                    _add(scheduler, phase, number)
                    number += 1
            loop.step()
        rates.append((scheduler.stats.output_tokens - tokens) / (now[0] - start_s))
    return rates


def _add(scheduler: Scheduler, phase: Phase, number: int) -> None:
    """Request `number`: the same one in each engine."""
    rng = np.random.default_rng(number)
    prompt_tokens, output_tokens = (
        int(rng.integers(low, high + 1)) for low, high in (phase.prompt_tokens, phase.output_tokens)
    )
    prompt = [2, 3, 4 + number % 900, *rng.integers(4, 900, prompt_tokens - 3).tolist()]
    scheduler.add(prompt, SamplingParams(max_tokens=output_tokens, ignore_eos=True), seed=number)
