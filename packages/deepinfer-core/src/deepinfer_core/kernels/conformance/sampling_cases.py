"""Cases of what runs on sample rows: changes of logits, filters, draws, verification, log-probabilities.

What the host knows of a row is made from an integer of the row, so that a cut batch keeps it. Scores have ties, entries
that may not be drawn and, for draws, rows that must fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.kernels.conformance.case import Case, Inputs
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference.adjust import Entries, LogitChanges, Masks, Penalties
from deepinfer_core.kernels.reference.filters import RowFilters

__all__ = ["sampling_cases"]

_IDS = (5, 3000, 8193)
_POOL = 3  # requests with token counts
_DRAFTS = 2
# Rows of one batch take these in turn: temperature, top_k, top_p, min_p.
_FILTERS = (
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 1, 1.0, 0.0),
    (1.0, 40, 0.95, 0.0),
    (0.5, 2000, 0.99, 0.001),
    (1.0, 0, 1.0, 0.05),
    (2.0, 100_000, 0.3, 0.2),
    (1.0, 0, 1e-9, 0.0),
)


def sampling_cases(numbers_of_ids: Sequence[int] = _IDS) -> Iterator[Case]:
    """Cases of `contract.SAMPLING_OPS`."""
    for ids in numbers_of_ids:
        yield from _changes(ids)
        yield from _filters(ids)
        yield from _draws(ids)
        yield from _logprobs(ids)
    yield from _verification()


def _scores(rows: int, ids: int, g: torch.Generator) -> Tensor:
    """[rows, ids] with ties, -inf, and zeros of both signs."""
    scores = torch.randn(rows, ids, generator=g) * 3.0
    scores[::2] = torch.round(scores[::2] * 4) / 4
    scores[0, ::2] = float("-inf")
    scores[-1, 1::3] = -0.0
    return scores


def _integers(rows: int, high: int, g: torch.Generator) -> Tensor:
    return torch.randint(0, high, (rows,), generator=g)


def _changes(ids: int) -> Iterator[Case]:
    def make(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        row = {"scores": _scores(rows, ids, g), "kind": _integers(rows, 1 << 30, g), "token": _integers(rows, ids, g)}
        shared = {
            "prompt_seen": torch.rand(_POOL, ids, generator=g) < 0.3,
            "output_count": torch.randint(0, 3, (_POOL, ids), generator=g, dtype=torch.int32),
        }
        return row, shared

    def run(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
        kind = r["kind"].cpu().numpy()
        return (o.adjust_logits(r["scores"], _changes_of(kind, np.minimum(kind % 2, 1), r, s)),)

    def run_drafts(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
        kind = r["kind"].cpu().numpy()
        drafts = np.minimum(np.arange(len(kind)) % 4, _DRAFTS)
        nothing = LogitChanges(penalties=_changes_of(kind, drafts, r, s).penalties)
        return (o.adjust_logits(r["scores"], nothing),)

    yield Case("adjust_logits", str(ids), make, run)
    yield Case("adjust_logits", f"{ids}-drafts", make, run_drafts, by_row=False)


def _changes_of(kind: np.ndarray, num_drafts: np.ndarray, r: Inputs, s: Inputs) -> LogitChanges:
    """A third of the rows has a mask, a fifth biased ids, a half penalties."""
    ids, device = r["scores"].shape[1], r["scores"].device
    masked, biased = np.flatnonzero(kind % 3 == 0), np.flatnonzero(kind % 5 == 0)
    penalised = np.flatnonzero(kind % 2 == 0)
    words = np.random.Generator(np.random.PCG64(3)).integers(0, 2**32, (7, -(-ids // 32)), dtype=np.uint32)
    entries = None
    if biased.size:
        chosen = np.stack([kind[biased] % ids, kind[biased] // 7 % ids, kind[biased] // 7 % ids], 1)  # one twice
        values = torch.tensor([1.5, -2.25, 0.0], device=device).repeat(len(biased))
        entries = Entries(np.repeat(biased, 3), chosen.flatten(), values)
    penalties = None
    if penalised.size:
        own = kind[penalised]
        penalties = Penalties(
            penalised,
            own % _POOL,
            num_drafts[penalised],
            repetition=(0.8 + own % 7 * 0.13).astype(np.float32),
            presence=(-0.5 + own % 9 * 0.13).astype(np.float32),
            frequency=(-0.3 + own % 5 * 0.13).astype(np.float32),
            token=r["token"],
            prompt_seen=s["prompt_seen"],
            output_count=s["output_count"],
        )
    masks = Masks(masked, words[kind[masked] % 7].view(np.int32)) if masked.size else None
    return LogitChanges(masks, entries, penalties)


def _filters(ids: int) -> Iterator[Case]:
    def make(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        return {"scores": _scores(rows, ids, g), "kind": torch.arange(rows) % len(_FILTERS)}, {}

    def run(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
        temperature, k, p, m = np.array(_FILTERS)[r["kind"].cpu().numpy()].T
        filters = RowFilters(temperature.astype(np.float32), k.astype(np.int64), p, m)
        return (o.filter_logits(r["scores"], filters),)

    yield Case("filter_logits", str(ids), make, run)


def _draws(ids: int) -> Iterator[Case]:
    def make(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        scores = _scores(rows, ids, g)
        if rows > 3:
            scores[1] = float("-inf")  # nothing can be drawn
            scores[2, ids // 2] = float("nan")
            scores[3, :-1] = float("-inf")
        row = {"scores": scores, "seed": torch.randint(-(2**62), 2**62, (rows,), generator=g)}
        return row | {"position": torch.randint(0, 2**34, (rows,), generator=g)}, {}

    def draw(o: Kernels, r: Inputs, s: Inputs) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for stream in (0, 3):
            token, failed = o.draw_token(r["scores"], r["seed"], r["position"], stream)
            found += [token.masked_fill(failed, 0), failed]  # the id of a failed draw means nothing
        return tuple(found)

    yield Case("draw_token", str(ids), make, draw)


def _logprobs(ids: int) -> Iterator[Case]:
    def make(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        return {"scores": _scores(rows, ids, g), "token": _integers(rows, ids, g)}, {}

    for num_top in (0, 7):

        def run(o: Kernels, r: Inputs, s: Inputs, num_top: int = num_top) -> tuple[Tensor, ...]:
            return o.token_logprobs(r["scores"], r["token"], num_top)

        yield Case("token_logprobs", f"{ids}-{num_top}", make, run)


def _verification() -> Iterator[Case]:
    def make(rows: int, g: torch.Generator) -> tuple[Inputs, Inputs]:
        row = {"emitted": _integers(rows, 3, g), "stands": torch.rand(rows, generator=g) < 0.7}
        return row | {"failed": torch.rand(rows, generator=g) < 0.1}, {}

    for longest in (1, 4):

        def run(o: Kernels, r: Inputs, s: Inputs, longest: int = longest) -> tuple[Tensor, ...]:
            lengths = np.arange(len(r["emitted"])) % longest + 1
            starts = np.minimum(np.append(0, lengths.cumsum()), len(r["emitted"]))
            starts = starts[: np.argmax(starts == starts[-1]) + 1].astype(np.int32)
            return o.accept_drafts(r["emitted"], r["stands"], r["failed"], starts)

        yield Case("accept_drafts", f"up to {longest} rows", make, run, by_row=False)
