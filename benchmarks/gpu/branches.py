"""Do the branches of a step, which run beside each other (model/beside.py), ever change a bit?

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/branches.py --out $OUT/branches.json [--repeats 200]

    wanted    a step of the bundled model and its draft stages, once, each piece of work after the one before
    got       the same with branches, eagerly and in graphs, while another stream keeps the device busy (repeats.py)

Two inputs take turns, and the caches are put back before each step. So a branch that reads too early finds what the
other input left, and one that writes too late leaves it: both show, where the same input would hide them. Compared are
logits, draft blocks and caches, all but the rows that nobody reads. Exit status 0: no step differed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.repeats import Company
from benchmarks.gpu.subjects import TINY
from benchmarks.gpu.timing import write_report
from deepinfer_core.cache import CacheLayout, ModelState
from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.kernels.registry import build_kernels, choose_provider
from deepinfer_core.model import Backbone, Drafter, build_params
from deepinfer_core.runtime.forward import Capture, CudaCapture, Forward
from deepinfer_core.scheduling.plan import StepPlan
from tests.core.harness import BACKTRACK, Chunk, plan_of

SLOTS, PAST = 12, 300  # requests, and positions that each of them has behind it
ROWS_EACH = (1, 6, 12)  # of a request in a step: 12 rows of all; and more than tiles for few rows take
INPUTS = 2
_BLOCKS_EACH = -(-(PAST + max(ROWS_EACH)) // BLOCK_TOKENS)


class Subject:
    """The bundled model with requests that have a past."""

    def __init__(self, *, coded: bool) -> None:
        choice = choose_provider("nvidia")
        self.config = ModelConfig.from_folder(TINY)
        kernels, _ = build_kernels(choice, self.config, torch.bfloat16)
        weights = load_model_weights(TINY, self.config, dtype=torch.bfloat16, device=choice.device, progress=False)
        params = build_params(weights, self.config, coded=coded)
        if params.draft is None:
            raise SystemExit(f"{TINY} has no drafter")
        self.backbone = Backbone(self.config, params, kernels)
        self.drafter = Drafter(self.backbone, params.draft)
        layout = CacheLayout(self.config, SLOTS, SLOTS * _BLOCKS_EACH, SLOTS * PAST, BACKTRACK, form="packed")
        self.state = ModelState.allocate(layout, device=choice.device, dtype=torch.bfloat16)
        self.random = np.random.default_rng(0)
        past = [Chunk(slot, 0, self._tokens(PAST)) for slot in range(SLOTS)]
        self.forward(None).run(_plan(past), None, store_context=True)
        self._past = [cache.clone() for cache in self._caches()]

    def forward(self, capture: Capture | None) -> Forward:
        """With no graphs yet."""
        return Forward(self.backbone, self.drafter, self.state, capture=capture, most_rows=SLOTS * max(ROWS_EACH))

    def inputs(self, rows_each: int) -> list[list[Chunk]]:
        """Rows of every request behind its past; the same positions, other tokens."""
        return [[Chunk(slot, PAST, self._tokens(rows_each)) for slot in range(SLOTS)] for _ in range(INPUTS)]

    def step(self, forward: Forward, chunks: list[Chunk]) -> tuple[Tensor, ...]:
        """What a step and the draft blocks after it make of the past."""
        for cache, past in zip(self._caches(), self._past, strict=True):
            cache.copy_(past)
        rows, _ = forward.run(_plan(chunks), None, store_context=True)
        if rows is None:
            raise SystemExit("a step gave no logits")
        each = len(chunks[0].tokens)
        anchor = rows.logits[each - 1 :: each].argmax(-1)
        position, slot = torch.full_like(anchor, PAST + each), torch.arange(SLOTS, device=anchor.device)
        block = forward.draft_block(anchor, position, slot, torch.zeros_like(anchor), self.config.dspark_block_size)
        return rows.logits, block.hidden, block.base_logits, *self._read_rows()

    def _tokens(self, count: int) -> list[int]:
        return self.random.integers(200, self.config.vocab_size, count).tolist()

    def _caches(self) -> list[Tensor]:
        state = self.state
        of_layers = (state.entries, state.index_keys, state.pairs)
        of_all = (cache for caches in of_layers for cache in caches.values())
        return [*state.window, *state.draft_window, *of_all, state.history]

    def _read_rows(self) -> list[Tensor]:
        """Copies of all cache rows that a later step may read: no trash, no scratch rows."""
        state, layout, ratios = self.state, self.state.layout, self.config.compress_ratios
        rings = ((state.window, layout.window), (state.draft_window, layout.draft_window))
        found = [cache[: ring.trash_row] for caches, ring in rings for cache in caches]
        found += [cache[: layout.pairs.trash_row] for cache in state.pairs.values()]
        found.append(state.history[: layout.history.trash_row])
        for caches in (state.entries, state.index_keys):
            found += [cache[: layout.entry_trash_row(ratios[layer])] for layer, cache in caches.items()]
        return [rows.clone() for rows in found]


def _plan(chunks: list[Chunk]) -> StepPlan:
    """A step of all slots, each with a run of blocks."""
    blocks = np.arange(SLOTS * _BLOCKS_EACH, dtype=np.int32).reshape(SLOTS, -1)
    return replace(plan_of(chunks), block_tables=blocks)


class CountingCapture(CudaCapture):
    """Steps that stay eager would say nothing of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = 0

    def record[Output](self, work: Callable[[], Output]) -> tuple[Output, Callable[[], None]]:
        made = super().record(work)
        self.recorded += 1
        return made


def one_by_one() -> AbstractContextManager[object]:
    """Nothing runs beside anything else in here."""
    return patch("deepinfer_core.model.beside._take_stream", return_value=None)


def count_differing(
    step: Callable[[list[Chunk]], tuple[Tensor, ...]],
    inputs: list[list[Chunk]],
    wanted: list[tuple[Tensor, ...]],
    repeats: int,
    company: Company,
) -> int:
    """How many of so many steps differ from what is wanted of their input, these taking turns."""
    differs = torch.zeros(repeats, dtype=torch.bool, device="cuda")
    for i in range(repeats):
        company.keep_busy()
        for got, want in zip(step(inputs[i % INPUTS]), wanted[i % INPUTS], strict=True):
            differs[i] |= (got != want).any()  # a NaN differs, too
    return int(differs.sum())


@torch.inference_mode()
def main() -> int:
    """Repeat every step; the exit status says whether one differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=200, help="steps of a case (200)")
    arguments = parser.parse_args()
    company, start, found = Company(), time.perf_counter(), dict[str, int]()
    for coded in (False, True):
        subject = Subject(coded=coded)
        for rows_each in ROWS_EACH:
            inputs, eager = subject.inputs(rows_each), subject.forward(None)
            with one_by_one():
                wanted = [subject.step(eager, chunks) for chunks in inputs]
            capture = CountingCapture()
            ways: dict[str, Forward | None] = {
                "one by one": None,
                "eager": eager,
                "graphs": subject.forward(capture),
            }
            for way, forward in ways.items():
                with one_by_one() if forward is None else nullcontext():
                    name = f"{SLOTS} x {rows_each} rows, {'e4m3' if coded else 'bfloat16'}, {way}"
                    found[name] = count_differing(
                        lambda chunks, forward=forward or eager, subject=subject: subject.step(forward, chunks),
                        inputs,
                        wanted,
                        arguments.repeats,
                        company,
                    )
                print(f"{name}: {found[name]} of {arguments.repeats} differ", flush=True)
            if capture.recorded != 2:  # the step's rows, and the draft stages
                raise SystemExit(f"{capture.recorded} graphs were captured for {SLOTS} x {rows_each} rows, not 2")
    seconds, differ = round(time.perf_counter() - start, 1), {name: count for name, count in found.items() if count}
    write_report(arguments.out, repeats=arguments.repeats, cases=list(found), differing=differ, seconds=seconds)
    print(f"{len(found)} cases of {arguments.repeats} steps in {seconds} s, {len(differ)} differ")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
