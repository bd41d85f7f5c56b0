"""compute-sanitizer over every operation of a provider, on the conformance suite's inputs; several processes at once.

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/sanitize.py --tool racecheck --jobs 12 --out $OUT/racecheck.json

memcheck     reads and writes outside of an allocation; torch's allocator is off, so that each tensor is one
racecheck    threads of a block that meet in shared memory without a barrier between them
initcheck    reads of memory that nobody wrote                     synccheck   barriers used against their rules

Programs come from the cache folder: run the conformance suite before; --large takes large_cases.py instead of that
suite's cases, after repeats.py. A worker runs the operation alone, without the reference, since results are that
suite's matter. The report holds the cases that ended, those that did not within the time, and what the tool said. Exit
status 0: every case ended and the tool reports nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.large_cases import large_cases
from deepinfer_core.kernels.conformance.cases import Case, all_cases
from deepinfer_core.kernels.conformance.subject import ConformanceSubject, find_subject, make_inputs

_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_ONE_TENSOR_AN_ALLOCATION = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
_SUMMARY = re.compile(r"========= (?:ERROR|RACECHECK) SUMMARY: (.*)")
_OF_ONE_ACCESS = re.compile(r"=========\s*(?:by thread|Address|and is|$)|.*COMPUTE-SANITIZER")  # same for many
_OPTIONS = ("--show-backtrace", "no", "--print-limit", "20000")


@dataclass(frozen=True)
class Work:
    """A worker's share: every `workers`-th case from `first` on, with so many rows, in this dtype."""

    provider: str
    dtype: torch.dtype | None
    rows: tuple[int, ...]
    match: str  # cases whose name has it
    skip: tuple[str, ...]  # operations
    large: bool
    first: int
    workers: int


def share_of(work: Work) -> tuple[ConformanceSubject, list[tuple[str, Case, int]]]:
    """The provider, and (name, case, rows) of a share in its order."""
    subject = find_subject(work.provider, work.dtype)
    cases = large_cases() if work.large else all_cases()
    mine = [case for case in cases if subject.skips(case) is None and case.op not in work.skip]
    every = [(f"{case.op}-{case.name}, {rows} rows", case, rows) for case in mine for rows in work.rows]
    every = [one for one in every if work.match in one[0]]
    return subject, every[work.first :: work.workers]


def run_share(work: Work) -> None:
    """Inside the sanitizer: run the cases, say when each begins and ends."""
    subject, share = share_of(work)
    for name, case, rows in share:
        start = time.perf_counter()
        row_inputs, shared = make_inputs(case, rows, subject.device, subject.cache_form, subject.dtype)
        print(f"BEGIN {name}", flush=True)
        case.run(subject.table, row_inputs, shared)
        if subject.device == "cuda":
            torch.cuda.synchronize()
        print(f"END {time.perf_counter() - start:.1f}", flush=True)


def read_log(text: str) -> dict[str, Any]:
    """What a worker's output says."""
    ended: dict[str, float] = {}
    current, reports = "", Counter[str]()
    for line in text.splitlines():
        if line.startswith("BEGIN "):
            current = line.removeprefix("BEGIN ")
        elif line.startswith("END ") and current:
            ended[current], current = float(line.removeprefix("END ")), ""
        elif not line.startswith("========="):
            reports[line] += 1  # a traceback, a warning of torch
        elif not _SUMMARY.match(line) and not _OF_ONE_ACCESS.match(line):
            reports[f"{current}: {line.removeprefix('=========').strip()}"] += 1
    summary = _SUMMARY.findall(text)
    return {"ended": ended, "summary": summary[-1] if summary else None, "said": dict(reports)}


def sanitize(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Start the workers, wait, and join what they say; the report, and whether nothing was found."""
    tool, jobs = str(arguments.tool), int(arguments.jobs)
    environment = dict(os.environ) | (_ONE_TENSOR_AN_ALLOCATION if tool in ("memcheck", "initcheck") else {})
    workers: list[tuple[subprocess.Popen[bytes], Path]] = []
    for first in range(jobs):
        log = Path(arguments.out).with_suffix(f".{first}.log")
        share = ["--share", f"{first}/{jobs}", "--rows", arguments.rows, "--provider", arguments.provider]
        share += ["--match", arguments.match, "--skip", arguments.skip] + ["--large"] * arguments.large
        share += [] if arguments.dtype is None else ["--dtype", arguments.dtype]
        command = [arguments.sanitizer, "--tool", tool, *_OPTIONS, sys.executable, __file__, *share]
        with log.open("wb") as output:
            started = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        workers.append((started, log))
    deadline = time.monotonic() + float(arguments.limit_s)
    found: list[dict[str, Any]] = []
    for worker, log in workers:
        try:
            worker.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)  # the sanitizer and what it runs
            worker.wait()
        found.append(read_log(log.read_text(encoding="utf-8", errors="replace")))
        log.unlink()
    ended = {name: seconds for one in found for name, seconds in one["ended"].items()}
    _, wanted = share_of(_work(arguments, 0, 1))
    missing = [name for name, _, _ in wanted if name not in ended]
    summaries = [one["summary"] for one in found]
    clean = not missing and all(summary is not None and summary.startswith("0 ") for summary in summaries)
    report = {
        "tool": tool,
        "clean": clean,
        "cases": len(ended),
        "not_ended": missing,
        "summaries": summaries,
        "said": {line: count for one in found for line, count in one["said"].items()},
        "seconds_by_case": ended,
    }
    return report, clean


def _work(arguments: argparse.Namespace, first: int, workers: int) -> Work:
    dtype = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}[arguments.dtype]
    rows = tuple(int(part) for part in arguments.rows.split(","))
    skip = tuple(arguments.skip.split(","))
    return Work(arguments.provider, dtype, rows, arguments.match, skip, arguments.large, first, workers)


def main() -> int:
    """Sanitize; with --share be one of the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=_TOOLS, default="memcheck")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--jobs", type=int, default=8, help="processes (8)")
    parser.add_argument("--rows", default="1,13", help="numbers of rows of each case (1,13)")
    parser.add_argument("--match", default="", help="only the cases with this in their name")
    parser.add_argument("--skip", default="", help="operations to leave out, separated by commas")
    parser.add_argument("--large", action="store_true", help="the cases of large_cases.py")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds until workers are ended (300)")
    parser.add_argument("--provider", default="nvidia", help="as of the conformance suite (nvidia)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None, help="compute dtype")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    parser.add_argument("--share", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.share is not None:
        first, workers = (int(part) for part in arguments.share.split("/"))
        run_share(_work(arguments, first, workers))
        return 0
    if arguments.out is None:
        parser.error("--out is needed")
    report, clean = sanitize(arguments)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{report['tool']}: {report['cases']} cases ended, {len(report['not_ended'])} did not, clean: {clean}")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
