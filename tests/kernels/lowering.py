"""Sources of programs and their machine code, without a device. Lowering one takes seconds, compiling it more.

lowered(name, parameters, arch)      a source, made at the first call
Workshop                             two processes that work ahead ─► sources, ptxas's report and machine code
"""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

type Wanted = tuple[str, tuple[Any, ...], str]  # name and parameters of a program, architecture

_PROCESSES = 2  # each imports torch and TileLang, so more would pay on a larger machine only


@dataclass(frozen=True)
class Made:
    """A program's source; where it was compiled, what ptxas said and its disassembled code."""

    source: str
    report: str = ""
    code: str = ""


@cache
def lowered(name: str, parameters: tuple[Any, ...], arch: str) -> str:
    """CUDA source."""
    import_module("deepinfer_kernels_nvidia.ops")  # registers the programs
    return import_module("deepinfer_kernels_nvidia.jit").PROGRAMS[name].source(parameters, arch)


class Workshop:
    """Makes what it is told of, in that order, while the tests that want it run one after the other."""

    def __init__(self) -> None:
        # Started anew: the compiler's threads do not survive a fork.
        self._pool = ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("spawn"))
        self._made: dict[Wanted, Future[Made]] = {}

    def begin(self, make: Callable[[Wanted], Made], wanted: Iterable[Wanted]) -> None:
        """Queue `make` of each, one of the functions below; what is queued already stays as it is."""
        for each in wanted:
            if each not in self._made:
                self._made[each] = self._pool.submit(make, each)

    def made(self, name: str, parameters: tuple[Any, ...], arch: str) -> Made:
        """What was begun, when it is done."""
        return self._made[name, parameters, arch].result()

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends; what nobody waited for is not begun."""
        self._pool.shutdown(cancel_futures=True)


def lower(wanted: Wanted) -> Made:
    """The CUDA source alone."""
    return Made(lowered(*wanted))


def lower_for_ascend(wanted: Wanted) -> Made:
    """Ascend C, which has one architecture."""
    name, parameters, _ = wanted
    import_module("deepinfer_kernels_ascend.ops")
    return Made(import_module("deepinfer_kernels_ascend.jit").PROGRAMS[name].source(parameters))


def compile_cubin(wanted: Wanted) -> Made:
    """Source, ptxas's report and machine code. Raises RuntimeError with what nvcc said where it fails."""
    source, number = lowered(*wanted), wanted[2].removeprefix("sm_")
    compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    root = Path(import_module("tilelang").__file__ or "").parent
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}"]
    options = ["-std=c++17", "-O3", "-cubin", "-Xptxas", "-v", f"-gencode=arch=compute_{number},code={wanted[2]}"]
    with TemporaryDirectory() as folder:
        Path(folder, "program.cu").write_text(source, encoding="utf-8")
        done = _run([compiler, *options, *includes, "program.cu", "-o", "program.cubin"], folder)
        triton = Path(import_module("triton").__file__ or "").parent
        disassembler = triton / "backends" / "nvidia" / "bin" / "nvdisasm"
        return Made(source, done.stderr, _run([str(disassembler), "program.cubin"], folder).stdout)


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name}: {done.stderr[-2000:]}")
    return done
