"""CUDA sources of programs: lowering one takes seconds, and several tests read it.

lower_all(wanted)           two processes ─► sources by (name, parameters, arch)
lowered(name, .., arch)     one of these, or lowered here
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any

type Wanted = tuple[str, tuple[Any, ...], str]  # name and parameters of a program, architecture

_PROCESSES = 2  # each imports torch and TileLang, so more would pay on a larger machine only
_sources: dict[Wanted, str] = {}


def lowered(name: str, parameters: tuple[Any, ...], arch: str) -> str:
    wanted = (name, parameters, arch)
    if wanted not in _sources:
        _sources[wanted] = _source(wanted)
    return _sources[wanted]


def lower_all(wanted: Sequence[Wanted]) -> None:
    """Lower what no test has read yet, for `lowered`."""
    missing = [each for each in dict.fromkeys(wanted) if each not in _sources]
    # Started anew: the compiler's threads do not survive a fork.
    with ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("spawn")) as pool:
        _sources.update(zip(missing, pool.map(_source, missing), strict=True))


def _source(wanted: Wanted) -> str:
    name, parameters, arch = wanted
    import_module("deepinfer_kernels_nvidia.ops")  # registers the programs
    programs = import_module("deepinfer_kernels_nvidia.jit").PROGRAMS
    return programs[name].source(parameters, arch)
