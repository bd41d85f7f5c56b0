"""The provider `native`: fused CPU kernels. It is no entry point, since it serves the CPU as the reference does."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.contract import OPS, Capability, Unavailable
from deepinfer_core.kernels.native.caches import CacheOps
from deepinfer_core.kernels.native.compiler import default_cache_dir, find_compiler
from deepinfer_core.kernels.native.dense import DenseOps
from deepinfer_core.kernels.native.draw import DrawOps
from deepinfer_core.kernels.native.experts import ExpertOps
from deepinfer_core.kernels.native.library import load_library

__all__ = ["NativeProvider"]

_MOST_STREAMS = 8  # streams.c
_SCALE_GROUP = 32  # caches.c
_ROUNDING_OPS = ("write_window", "write_entries", "write_index_keys", "round_index")


class NativeProvider:
    """Implements `deepinfer_core.kernels.contract.KernelProvider` with the C library."""

    name: str = "native"
    cache_form: Literal["plain", "packed"] = "plain"
    row_invariant_ops: frozenset[str] = frozenset(OPS)
    coded_ops: frozenset[str] = frozenset()

    def __init__(self, cache_dir: str | Path | None = None) -> None:
        self._cache_dir = None if cache_dir is None else Path(cache_dir).absolute()

    def probe(self) -> Capability | Unavailable:
        """Whether there is a compiler; nothing is compiled."""
        try:
            compiler = find_compiler()
        except KernelError as error:
            return Unavailable(str(error))
        return Capability("cpu", platform.machine(), f"compiled with {compiler.version} ({compiler.path})")

    def load(self) -> Mapping[str, Callable[..., Any]]:
        """Compile if the cache folder has no library for this machine, and load it. Raises KernelError."""
        library = load_library(self._cache_dir or default_cache_dir())
        families = (DenseOps(library), CacheOps(library), ExpertOps(library), DrawOps(library))
        return {op: getattr(family, op) for family in families for op in OPS if hasattr(family, op)}

    def unsupported(self, op: str, config: ModelConfig, dtype: torch.dtype) -> str | None:
        """Why the reference must run an operation for this model; None when the C function can."""
        if dtype != torch.float32:
            return f"the native kernels compute in float32, not {str(dtype).removeprefix('torch.')}"
        if op == "mhc_mix" and config.hc_mult > _MOST_STREAMS:
            return f"{config.hc_mult} residual streams, at most {_MOST_STREAMS}"
        if op in _ROUNDING_OPS and (config.head_dim % _SCALE_GROUP or config.index_head_dim % _SCALE_GROUP):
            return f"head sizes {config.head_dim} and {config.index_head_dim} are no multiples of {_SCALE_GROUP}"
        return None
