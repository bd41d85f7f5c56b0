"""Native CPU kernels: the operations of the contract in C, compiled at first use with the system's compiler.

    src/*.c ── cc -O3 -march=native ──► <cache folder>/native-<key>.so ── ctypes ──► table of operations
     (one file an op family)                 (compiler.py)              (library.py)   (dense, caches, experts .py)

Float32 only. Every row is computed by itself, in one order, so its bits depend neither on the number of rows nor on the
number of threads. Where it cannot be built the reference runs, and the registry says why.
"""

from __future__ import annotations

from deepinfer_core.kernels.native.provider import NativeProvider

__all__ = ["NativeProvider"]
