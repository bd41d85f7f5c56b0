"""An engine on a simulated device, and the tokens that a request must get whatever happens around it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.config.scheduler import SchedulerConfig, SpeculationConfig
from deepinfer_core.runtime.engine_loop import EngineLoop, make_loop
from deepinfer_core.runtime.simulated import Faults, SimulatedDevice, mix, next_token
from deepinfer_core.scheduling.cost import CostModel
from deepinfer_core.scheduling.prefix_index import PrefixHasher
from deepinfer_core.scheduling.replay import ReplayRules
from deepinfer_core.scheduling.request import Finished, StepOutputs
from deepinfer_core.scheduling.scheduler import Scheduler

VOCAB = 97
EOS = 1
ENCODER_LAYERS = 2
WINDOW = 16


def rules(decoder_prefill: str = "compact", prefix_replay: str = "exact") -> ReplayRules:
    return ReplayRules(
        decoder_prefill=decoder_prefill,  # type: ignore[arg-type] # parametrised by tests
        prefix_replay=prefix_replay,  # type: ignore[arg-type]
        keep_tokens=28,
        window=WINDOW,
        encoder_layers=ENCODER_LAYERS,
        exact_decoder_rows=1 + 2 * (WINDOW - 1),
    )


def alone(prompt: list[int], params: SamplingParams, seed: int, max_model_len: int) -> list[int]:
    """The tokens of a request, from the definition of the simulated model and of stops."""
    tokens = list(prompt)
    state = sum(int(mix(token, position)) for position, token in enumerate(prompt)) % 2**64
    limit = min(max_model_len, len(prompt) + (params.max_tokens or max_model_len))
    stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {EOS})
    while len(tokens) < limit:
        position = len(tokens)
        drawn = next_token(np.array([state], np.uint64), np.array([seed], np.uint64), np.array([position]), VOCAB)
        tokens.append(int(drawn[0]))
        if tokens[-1] in stops and position >= len(prompt) + params.min_tokens:
            break
        state = (state + int(mix(tokens[-1], position))) % 2**64
    return tokens[len(prompt) :]


@dataclass
class Engine:
    """Scheduler, device and loop, with the outputs collected by request number."""

    scheduler: Scheduler
    device: SimulatedDevice
    loop: EngineLoop[object]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)

    def step(self) -> StepOutputs:
        outputs = self.loop.step()
        self.collect(outputs)
        return outputs

    def collect(self, outputs: StepOutputs) -> None:
        for number, tokens in outputs:
            self.tokens.setdefault(number, []).extend(tokens)
        for end in outputs.finished:
            self.finished[end.number] = end

    def run(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.loop.has_work:
                self.collect(self.scheduler.take_finished())
                return
            self.step()
        raise AssertionError(f"{self.scheduler.num_unfinished} requests are not done after {max_steps} steps")


def expect_short_answers(engine: Engine) -> None:
    """Serve answers of one token: admission then thinks that all will be so short, and lets too many in."""
    params = SamplingParams(max_tokens=None, ignore_eos=True, stop_token_ids=list(range(VOCAB)))
    for seed in range(100):
        engine.scheduler.add([2, 3], params, seed=seed)
    engine.run()
    engine.tokens.clear()
    engine.finished.clear()


def make_engine(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    num_blocks: int = 64,
    max_model_len: int = 2048,
    num_drafts: int = 3,
    overlap: bool = True,
    replay: ReplayRules | None = None,
    prefix_caching: bool = True,
    cost: CostModel | None = None,
    faults: Faults | None = None,
    draft_schedule: str = "scheduled",
    **settings: int | None,
) -> Engine:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **settings),  # type: ignore[arg-type]
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        eos_token_id=EOS,
        rules=replay or rules(),
        speculation=SpeculationConfig(num_drafts=num_drafts, draft_schedule=draft_schedule),  # type: ignore[arg-type]
        hasher=PrefixHasher(b"weights", bytes(32)) if prefix_caching else None,
        cost=cost,
    )
    device = SimulatedDevice(
        num_blocks=num_blocks,
        num_slots=max_num_seqs,
        num_drafts=num_drafts,
        vocab_size=VOCAB,
        window=WINDOW,
        encoder_layers=ENCODER_LAYERS,
        faults=faults or Faults(),
    )
    return Engine(scheduler, device, make_loop(scheduler, device, overlap=overlap))  # type: ignore[arg-type]
