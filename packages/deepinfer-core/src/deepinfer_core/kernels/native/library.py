"""The compiled library as Python functions: `library.rms_norm(x.data_ptr(), ...)`.

Arguments are addresses (p), 64-bit integers (i), C ints (n) and floats (f). A call costs about a microsecond and
releases the interpreter's lock. Functions return 0 or a code of common.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.native.compiler import build_library

__all__ = ["Library", "failure", "load_library"]

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "n": ctypes.c_int, "f": ctypes.c_float}
_SIGNATURES = {
    "linear": "pippiiiin",
    "rms_norm": "pippiif",
    "rope_table": "pppii",
    "apply_rope": "pippiiiif",
    "mhc_mix": "pppppppiiinffn",
    "mhc_collapse": "pppiii",
    "mhc_expand": "pppppiii",
    "write_rows": "pippiiin",
    "round_index": "ppii",
    "copy_rows": "pippii",
    "pool_pairs": "pppii",
    "attend": "ppipipipippiiin",
    "index_scores": "pppipiippiipiiin",
    "select_entries": "ppiiin",
    "candidate_blocks": "pppiiiin",
    "route": "pippippiiiif",
    "run_experts": "pippppp" + "iiiiifn",
    "shared_expert": "pipppiiifn",
    "combine_experts": "pppiii",
    "engram_rows": "ppppiipii",
    "engram_gate": "ppppppiiif",
    "markov_step": "pipippppppiiii",
    "draw_token": "pippippii",
}
_MEANING = {
    -1: "there is no memory for its scratch space",
    -2: "a row number lies outside its table",
    -3: "a router score is not finite",
}


class Library:
    """One loaded library; attributes are its functions."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        self.path = path
        self.num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._functions: dict[str, Callable[..., int]] = {}
        for name, letters in _SIGNATURES.items():
            function = getattr(loaded, f"di_{name}")
            function.argtypes = [_TYPES[letter] for letter in letters]
            function.restype = ctypes.c_int
            self._functions[name] = function

    def function(self, name: str) -> Callable[..., int]:
        """The C function `di_<name>`."""
        return self._functions[name]

    def threads_for(self, operations: int) -> int:
        """Threads worth starting for that many multiply-adds: each one costs about 20 microseconds to make."""
        return 1 if operations < 2 * _OPERATIONS_A_THREAD else min(self.num_threads, operations // _OPERATIONS_A_THREAD)


_OPERATIONS_A_THREAD = 4_000_000  # about 100 microseconds of one core


def failure(status: int, op: str) -> KernelError:
    """The error that a code other than 0 stands for."""
    return KernelError(f"{op}: {_MEANING.get(status, f'unknown status {status}')}")


@cache
def load_library(cache_dir: Path) -> Library:
    """Build where needed, and load. Raises KernelError."""
    path = build_library(cache_dir)
    try:
        return Library(path)
    except (OSError, AttributeError):  # a damaged file: make it once more
        path = build_library(cache_dir, rebuild=True)
    try:
        return Library(path)
    except (OSError, AttributeError) as error:
        raise KernelError(f"{path} cannot be loaded: {error}; delete it, or move the cache folder") from error
