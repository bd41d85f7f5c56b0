"""`FrontEnd`: many ranks as one engine. Looks to `LLM` and `Engine` like an engine in this process.

LLM, Engine ─ add, abort ─► RankScheduler ─ by load ─► rank 0     each: scheduler, caches, a share of the experts
            ◄─ outputs ──── step          ◄─────────── rank 1 ..
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_core import __version__
from deepinfer_core.config.engine import EngineConfig
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.errors import ParallelError
from deepinfer_core.outputs import Provenance
from deepinfer_core.runtime.rank_messages import Failed, Ready, Start, decode_report, encode
from deepinfer_core.runtime.rank_scheduler import Ranks, RankScheduler, find_cause
from deepinfer_core.scheduling.rank_load import RankCapacity
from deepinfer_core.text import Tokenizer

__all__ = ["FrontEnd"]

_SLICE_S = 0.5  # of a wait; between slices Ctrl-C and dead ranks are noticed


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Everything that the front end of a group knows; `scheduler` is also its `loop`."""

    folder: Path
    model_config: ModelConfig
    fingerprint: str
    tokenizer: Tokenizer
    scheduler: RankScheduler
    provenance: Provenance
    ready: tuple[Ready, ...]  # what each rank said when it was loaded

    @classmethod
    def connect(cls, config: EngineConfig, ranks: Ranks, leaders: Sequence[int], settings: dict[str, Any]) -> FrontEnd:
        """Give the ranks their settings and wait until all have loaded; stops them if one fails. `leaders` take
        requests. Raises ParallelError.
        """
        try:
            for rank in range(len(ranks)):
                ranks.send(rank, encode(Start(settings)))
            ready = _wait_until_ready(ranks)
        except BaseException:
            ranks.stop(0.0)
            raise
        folder = Path(ready[0].folder)
        model = ModelConfig.from_folder(folder)
        tokenizer = Tokenizer.from_path(
            config.tokenizer or folder, bos_token_id=model.bos_token_id, eos_token_id=model.eos_token_id
        )
        scheduling = config.scheduler
        capacity = RankCapacity(
            scheduling.max_num_seqs, ready[0].num_blocks * BLOCK_TOKENS, scheduling.max_num_batched_tokens
        )
        max_model_len = min(one.max_model_len for one in ready)
        scheduler = RankScheduler(ranks, leaders, capacity, max_model_len, scheduling.max_num_waiting)
        provenance = Provenance(__version__, ready[0].fingerprint, ready[0].settings)
        return cls(folder, model, ready[0].fingerprint, tokenizer, scheduler, provenance, ready)

    @property
    def loop(self) -> RankScheduler:
        """Its `step` waits for a step of any rank."""
        return self.scheduler

    def summary(self) -> str:
        """What the settings that were left open have become."""
        return f"{len(self.ready)} ranks; {self.ready[0].summary}"

    def statistics(self) -> dict[str, object]:
        """Counters by rank."""
        return {f"rank_{rank}": counters for rank, counters in sorted(self.scheduler.ask().items())}

    def close(self) -> None:
        """Abort what is open and end the ranks."""
        self.scheduler.close()


def _wait_until_ready(ranks: Ranks) -> tuple[Ready, ...]:
    ready: dict[int, Ready] = {}
    while len(ready) < len(ranks):
        try:
            messages = ranks.receive(_SLICE_S)
        except ParallelError as error:
            raise find_cause(ranks, error, -1) from error
        for rank, data in messages:
            report = decode_report(data)
            if isinstance(report, Failed):
                raise find_cause(ranks, report, rank)
            if isinstance(report, Ready):
                ready[rank] = report
    return tuple(ready[rank] for rank in range(len(ranks)))
