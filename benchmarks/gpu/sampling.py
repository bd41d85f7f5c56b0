"""How long do the operations on sample rows take, beside the reference's torch calls on the same device?

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/sampling.py --out $OUT/sampling.json

1,024 rows (256 requests of 4) and 129,280 ids, and 8 rows. Medians of 7 calls between events, so what the host sends
with a call is part of it. `equal` compares all results with the reference's bit for bit; log-probabilities, which are
free in their last bits, are compared with a tolerance.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.timing import event_time, write_report
from deepinfer_core.kernels.contract import OPS
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.adjust import Entries, LogitChanges, Masks, Penalties
from deepinfer_core.kernels.reference.filters import RowFilters
from deepinfer_kernels_nvidia.ops import TABLE

IDS, ROWS, FEW_ROWS, DRAFTS, REQUESTS = 129_280, 1024, 8, 3, 256
CALLS = 7
FILTERS = {  # temperature, top_k, top_p, min_p
    "temperature": (0.7, 0, 1.0, 0.0),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "top-p 0.95": (1.0, 0, 0.95, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
    "top-k 40, top-p 0.95, min-p 0.01": (0.8, 40, 0.95, 0.01),
}


@dataclass(frozen=True)
class Timing:
    """One operation with one set of arguments."""

    op: str
    case: str
    microseconds: float
    torch_microseconds: float
    equal: bool


def cases() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Operation, name, arguments."""
    g = torch.Generator(device="cuda").manual_seed(0)
    logits = torch.randn(ROWS, IDS, device="cuda", generator=g) * 3.0
    seed = torch.randint(-(2**62), 2**62, (ROWS,), device="cuda", generator=g)
    position = torch.randint(0, 2**34, (ROWS,), device="cuda", generator=g)
    token = torch.randint(0, IDS, (ROWS,), device="cuda", generator=g)
    for rows in (ROWS, FEW_ROWS):
        yield "draw_token", f"{rows} rows", (logits[:rows], seed[:rows], position[:rows], 0)
        for name, (temperature, k, p, m) in FILTERS.items():
            columns = np.full(rows, temperature, np.float32), np.full(rows, k), np.full(rows, p), np.full(rows, m)
            yield "filter_logits", f"{name}, {rows} rows", (logits[:rows], RowFilters(*columns))
        for n in (0, 20):
            yield "token_logprobs", f"top {n}, {rows} rows", (logits[:rows], token[:rows], n)
    for name, changes in _changes(token, g).items():
        yield "adjust_logits", name, (logits, changes)
    flags = torch.rand(2, ROWS, device="cuda", generator=g) < 0.75
    yield (
        "accept_drafts",
        f"{REQUESTS} requests",
        (token, flags[0], ~flags[1], np.arange(0, ROWS + 1, 4, dtype=np.int32)),
    )
    history = torch.randint(-1, 50_000, (ROWS, 4), device="cuda", generator=g)
    primes = torch.randint(10**5, 10**6, (24,), device="cuda", generator=g)
    multipliers = torch.randint(1, 2**46, (4,), device="cuda", generator=g) * 2 + 1
    yield "engram_rows", f"{ROWS} rows", (history, multipliers, primes, primes.cumsum(0) - primes, 7, 8)


def _changes(token: Tensor, g: torch.Generator) -> dict[str, LogitChanges]:
    rng, rows = np.random.default_rng(0), np.arange(ROWS)
    words = rng.integers(0, 2**32, (ROWS, -(-IDS // 32)), dtype=np.uint32).view(np.int32)
    entries = Entries(
        np.repeat(rows, 3), rng.integers(0, IDS, 3 * ROWS), torch.randn(3 * ROWS, device="cuda", generator=g)
    )
    repetition, presence, frequency = (np.full(ROWS, factor, np.float32) for factor in (1.2, 0.3, 0.1))
    seen = torch.rand(REQUESTS, IDS, device="cuda", generator=g) < 0.1
    count = torch.randint(0, 3, (REQUESTS, IDS), device="cuda", generator=g, dtype=torch.int32)
    penalties = Penalties(rows, rows // 4, rows % (DRAFTS + 1), repetition, presence, frequency, token, seen, count)
    masks = Masks(rows, words)
    return {
        "masks": LogitChanges(masks),
        "three biased ids": LogitChanges(None, entries),
        "penalties": LogitChanges(None, None, penalties),
        "all of them": LogitChanges(masks, entries, penalties),
    }


def same(op: str, ours: Any, theirs: Any) -> bool:
    """Whether results are equal as the contract of `op` demands."""
    pairs = zip(*(one if isinstance(one, tuple) else (one,) for one in (ours, theirs)), strict=True)
    tolerance = 0.0 if OPS[op].exact else OPS[op].float32_tolerance
    return all(torch.allclose(mine, other, tolerance, tolerance) for mine, other in pairs)


def main() -> None:
    """Time every case and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default="", help="operations to time, separated by commas")
    arguments = parser.parse_args()
    wanted = set(filter(None, arguments.only.split(",")))
    timings: list[Timing] = []
    for op, name, given in cases():
        if wanted and op not in wanted:
            continue
        mine, other = TABLE[op], getattr(REFERENCE, op)
        equal = same(op, mine(*given), other(*given))
        ours_us, torch_us = (event_time(partial(call, *given), CALLS) * 1e6 for call in (mine, other))
        timings.append(Timing(op, name, ours_us, torch_us, equal))
        print(timings[-1], flush=True)
    write_report(arguments.out, timings=[asdict(timing) for timing in timings])


if __name__ == "__main__":
    main()
