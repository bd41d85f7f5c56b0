"""Does an operation give the same bits every time, also while the device is busy with something else?

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/repeats.py --out $OUT/repeats.json [--repeats 200] [--share 0/4]

    stream of the operation  | run | compare | run | compare | ..       bits, with those of the first run
    another stream           | products and copies of random sizes ..   takes multiprocessors, L2 and memory

Cases are the conformance suite's, and large_cases.py. What races shows here as a difference, sooner or later; racecheck
(sanitize.py) sees a race within a block even if it never decides anything, but none between launches or streams. Exit
status 0: no case differed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.large_cases import large_cases
from benchmarks.gpu.timing import write_report
from deepinfer_core.kernels.conformance.cases import all_cases
from deepinfer_core.kernels.conformance.subject import find_subject, make_inputs

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST = 2048  # side of a matrix on the other stream
_KINDS: tuple[Callable[[Tensor], Tensor], ...] = (lambda part: part @ part, torch.clone, torch.sum)


class Company:
    """Work on another stream, of random kind and size."""

    def __init__(self) -> None:
        self._stream, self._random = torch.cuda.Stream(), random.Random(0)
        self._matrix = torch.randn(_LARGEST, _LARGEST, device="cuda", dtype=torch.bfloat16)
        self._done = torch.cuda.Event()

    def keep_busy(self) -> None:
        """Queue some work, unless there is some under way."""
        if not self._done.query():
            return
        with torch.cuda.stream(self._stream):
            for _ in range(self._random.randrange(4)):
                size = self._random.randrange(64, _LARGEST + 1, 64)
                self._random.choice(_KINDS)(self._matrix[:size, :size])
            self._done.record()


def differing(run: Callable[[], tuple[Tensor, ...]], repeats: int, company: Company) -> int:
    """How many of so many runs differ from the first."""
    wanted = [_bits(tensor).clone() for tensor in run()]
    differs = torch.zeros(repeats, dtype=torch.bool, device="cuda")
    for i in range(repeats):
        company.keep_busy()
        for got, want in zip(run(), wanted, strict=True):
            differs[i] |= (_bits(got) != want).any()
    return int(differs.sum())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def main() -> int:
    """Repeat every case; the exit status says whether one differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=200, help="runs of a case (200)")
    parser.add_argument("--rows", default="13,64", help="numbers of rows of each case (13,64)")
    parser.add_argument("--match", default="", help="only the cases with this in their name")
    parser.add_argument("--share", default="0/1", help="i/n: every n-th case from the i-th on, for n processes (0/1)")
    arguments = parser.parse_args()
    first, processes = (int(part) for part in arguments.share.split("/"))
    subject, company = find_subject("nvidia", None), Company()
    cases = [case for case in chain(all_cases(), large_cases()) if subject.skips(case) is None]
    cases = [case for case in cases if arguments.match in f"{case.op}-{case.name}"]
    start, found = time.perf_counter(), dict[str, int]()
    for case in cases[first::processes]:
        for rows in map(int, arguments.rows.split(",")):
            own, shared = make_inputs(case, rows, subject.device, subject.cache_form, subject.dtype)
            name = f"{case.op}-{case.name}, {rows} rows"
            found[name] = differing(
                lambda case=case, own=own, shared=shared: case.run(subject.table, own, shared),
                arguments.repeats,
                company,
            )
            if found[name]:
                print(f"{name}: {found[name]} of {arguments.repeats} differ", flush=True)
    seconds, differ = round(time.perf_counter() - start, 1), {name: count for name, count in found.items() if count}
    write_report(arguments.out, repeats=arguments.repeats, cases=len(found), differing=differ, seconds=seconds)
    print(f"{len(found)} cases of {arguments.repeats} runs in {seconds} s, {len(differ)} differ")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
