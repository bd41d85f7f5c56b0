"""Cost tables of a device, measured at start: the prior of the draft budget (scheduling/cost.py).

    verify   seconds of a forward pass over 1, 4, 16, .. rows, up to every draft of every request; then of 2, 8, 32, ..
    draft    seconds of a proposal for 1, 4, 16, .. and 2, 8, .. requests

The fastest of several rounds over all sizes counts: what slows a run down on a shared machine is not the device. Sizes
that would take the first round beyond half of the time budget are left out; beyond the last one the cost goes on with
its slope, and while serving the model is corrected by the steps that it sees. The passes write no cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch

from deepinfer_core.runtime.runner import Runner
from deepinfer_core.scheduling.cost import CostModel, CostTable
from deepinfer_core.scheduling.plan import Content, RowKind, StepPlan, TokenSource, Writes

__all__ = ["measure_costs"]

_BUDGET_S = 0.7  # for each table; two sizes and two rounds are measured in any case
_ROUNDS = 5  # at most
_MOST_LOST_S = 20.0  # on kernels that are compiled and graphs that are captured for the purpose, of each table
_CONTEXT_TOKENS = 1024


def measure_costs(
    runner: Runner, *, max_rows: int, max_requests: int, agree: Callable[[float], float] = lambda seconds: seconds
) -> CostModel:
    """Measure on an idle runner. `max_rows`: rows of the largest step; `max_requests`: slots. `agree`: of ranks that
    run each pass together, the time of the slowest; so all of them run the same passes and know the same costs.
    """
    captured = runner.forward.captured_rows
    first_passes = 2 if captured else 0
    _forward(runner, 1, max_requests)  # first use allocates
    most = min(max_rows, max_requests * (1 + runner.config.num_drafts))
    verify = _table(_Timer(lambda rows: _forward(runner, rows, max_requests), first_passes, agree), most, captured)
    draft = _table(_Timer(lambda requests: _propose(runner, requests), first_passes, agree), max_requests)
    return CostModel(verify, draft, max_rows=max_rows, max_requests=max_requests)


@dataclass
class _Timer:
    """Times `run(size)`. Of each size `first_passes` come before and are not measured: they compile and capture."""

    run: Callable[[int], None]
    first_passes: int
    agree: Callable[[float], float]
    lost_s: float = 0.0  # in passes that were not measured
    seen: set[int] = field(default_factory=set[int])

    def __call__(self, size: int) -> float:
        if self.first_passes and size not in self.seen:
            self.seen.add(size)
            self.lost_s += self.agree(sum(self._pass(size) for _ in range(self.first_passes)))
        return self.agree(self._pass(size))

    def _pass(self, size: int) -> float:
        start_s = perf_counter()
        self.run(size)
        return perf_counter() - start_s


def _table(timer: _Timer, largest: int, captured: tuple[int, ...] = ()) -> CostTable:
    """The first round finds the sizes, in half of the budget; others follow while there is time."""
    seconds: dict[int, float] = {}
    spent_s = 0.0
    for size in _sizes(largest):
        if len(seconds) > 1:
            below = max(measured for measured in seconds if measured < size)
            expected_s = seconds[below] * size / below
            if spent_s + expected_s > _BUDGET_S / 2 or timer.lost_s > _MOST_LOST_S:
                continue
        seconds[size] = timer(size)
        spent_s += seconds[size]
    for number in range(1, _ROUNDS):
        if number > 1 and spent_s + sum(seconds.values()) > _BUDGET_S:
            break
        for size, before in seconds.items():
            now = timer(size)
            seconds[size] = min(before, now)
            spent_s += now
    sizes = tuple(sorted(seconds))
    return CostTable(sizes, tuple(seconds[size] for size in sizes), captured)


def _sizes(largest: int) -> list[int]:
    """Powers of four and `largest`, then those between: a budget that ends early leaves a table that reaches far."""
    powers = [2**n for n in range(largest.bit_length())]
    far = powers[::2]
    return [*far, *(() if largest in far else (largest,)), *(size for size in powers[1::2] if size != largest)]


def _forward(runner: Runner, rows: int, max_requests: int) -> None:
    runner.probe(_idle_plan(rows, min(rows, max_requests, runner.config.num_slots)))


def _propose(runner: Runner, requests: int) -> None:
    slots = torch.arange(requests, device=runner.device)
    runner.probe_drafts(slots % runner.config.num_slots)


def _idle_plan(rows: int, segments: int) -> StepPlan:
    """`rows` rows over `segments` slots at a typical context, that write nothing."""
    start = np.linspace(0, rows, segments + 1).astype(np.int32)
    counts = np.diff(start)
    offset = np.arange(rows) - np.repeat(start[:-1], counts)
    return StepPlan(
        step=-1,
        row_position=_CONTEXT_TOKENS + offset,
        row_token=np.zeros(rows, np.int64),
        row_source=np.full(rows, TokenSource.GIVEN, np.uint8),
        row_kind=np.full(rows, RowKind.DUMMY, np.uint8),
        row_content=np.full(rows, Content.TEXT, np.uint8),
        row_writes=np.full(rows, Writes.NONE, np.uint8),
        row_sample=np.ones(rows, np.bool_),
        segment_start=start,
        segment_slot=np.arange(segments, dtype=np.int32),
        segment_generation=np.zeros(segments, np.int32),
        segment_window_from=np.zeros(segments, np.int64),
        segment_decoder_from=np.zeros(segments, np.int64),
        segment_num_drafts=np.zeros(segments, np.int32),
        block_tables=np.full((segments, _CONTEXT_TOKENS // 128 + 1), -1, np.int32),
        is_dummy=True,
    )
