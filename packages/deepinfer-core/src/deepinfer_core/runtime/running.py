"""What `LLM` and `Engine` ask of a running engine: `AssembledEngine` in this process, `FrontEnd` of many."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.outputs import Provenance
from deepinfer_core.scheduling.plan import Int64Array
from deepinfer_core.scheduling.request import Constraint, StepOutputs, TokenWatcher
from deepinfer_core.text import Tokenizer

__all__ = ["RequestQueue", "RunningEngine", "StepLoop"]


class RequestQueue(Protocol):
    """Takes requests. `scheduling.scheduler.Scheduler` says what each member means."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_unfinished(self) -> int: ...
    @property
    def drafter_has_collapsed(self) -> bool: ...

    def add(
        self,
        prompt: Int64Array,
        params: SamplingParams,
        *,
        seed: int,
        priority: int = 0,
        tenant_salt: str = "",
        watcher: TokenWatcher | None = None,
        constraint: Constraint | None = None,
    ) -> int: ...
    def abort(self, number: int) -> bool: ...
    def hit_tokens(self, number: int) -> int: ...
    def take_finished(self) -> StepOutputs: ...


class StepLoop(Protocol):
    """Brings requests forward. `runtime.engine_loop.EngineLoop` says what each member means."""

    @property
    def has_work(self) -> bool: ...
    def step(self) -> StepOutputs: ...


class RunningEngine(Protocol):
    """Loaded and ready."""

    @property
    def folder(self) -> Path: ...
    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def provenance(self) -> Provenance: ...
    @property
    def scheduler(self) -> RequestQueue: ...
    @property
    def loop(self) -> StepLoop: ...

    def summary(self) -> str:
        """One line: what open settings became."""
        ...

    def statistics(self) -> dict[str, object]:
        """Counters since the start, by name with units."""
        ...

    def close(self) -> None:
        """Finish what is queued; the engine cannot run afterwards."""
        ...
