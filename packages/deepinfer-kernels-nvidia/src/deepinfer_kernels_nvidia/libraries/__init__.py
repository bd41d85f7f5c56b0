"""Vendor libraries that take over an operation where they are installed and made for the GPU. None is required.

    deepinfer-flashmla 1.0   flash_mla      SM100, SM103   attend
    deepinfer-gemm 2.8       deep_gemm      SM100, SM103   linear, run_experts, shared_expert
    tile-kernels 2.1         tile_kernels   SM100, SM103   rms_norm, mhc_collapse, mhc_expand, engram_gate

Each module here binds one library: which functions it needs, what is set once, and one function an operation with the
signature of the contract, which hands shapes that the library does not take to our own kernel. An operation is bound
only if by the library's sources a row is walked in one order in every batch, since the provider promises that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from deepinfer_kernels_nvidia.libraries import deep_gemm, flash_mla, tile_kernels

__all__ = ["LIBRARIES", "Library", "library_of", "library_table"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """What is bound of one library."""

    distribution: str
    module: str
    arches: tuple[str, ...]  # as in `Capability.arch`
    needs: tuple[str, ...]  # attributes, dotted; older distributions of the same module name lack them
    operations: Mapping[str, Callable[..., Any]]  # by their name in the contract
    prepare: Callable[[Any], None] | None = None  # called once with the module


_ARCHES = ("sm_100", "sm_103")
LIBRARIES = (
    Library(
        "deepinfer-flashmla 1.0",
        "flash_mla",
        _ARCHES,
        ("flash_mla_with_kvcache", "get_mla_metadata", "fused_norm_rope_attn_rope_cast"),
        {"attend": flash_mla.attend},
    ),
    Library(
        "deepinfer-gemm 2.8",
        "deep_gemm",
        _ARCHES,
        deep_gemm.NEEDS,
        {
            "linear": deep_gemm.linear,
            "run_experts": deep_gemm.run_experts,
            "shared_expert": deep_gemm.shared_expert,
        },
        deep_gemm.prepare,
    ),
    Library(
        "tile-kernels 2.1",
        "tile_kernels",
        _ARCHES,
        tile_kernels.NEEDS,
        {
            "rms_norm": tile_kernels.rms_norm,
            "mhc_collapse": tile_kernels.mhc_collapse,
            "mhc_expand": tile_kernels.mhc_expand,
            "engram_gate": tile_kernels.engram_gate,
        },
    ),
)


def library_table(arch: str) -> Mapping[str, Callable[..., Any]]:
    """Operations that installed libraries take over on this architecture, by their name in the contract.

    A library that is installed and cannot be used is named in a warning; our own kernels run then.
    """
    table: dict[str, Callable[..., Any]] = {}
    for library in LIBRARIES:
        if arch in library.arches and find_spec(library.module) is not None:
            problem = _problem(library)
            if problem is None:
                _log.info("%s: %s where the shape fits", library.distribution, ", ".join(library.operations))
                table |= library.operations
            else:
                _log.warning("%s is not used, our own kernels run: %s", library.distribution, problem)
    return table


def library_of(function: Callable[..., Any]) -> str | None:
    """The distribution that `function` binds; None for a kernel of this package."""
    return next((library.distribution for library in LIBRARIES if function in library.operations.values()), None)


def _problem(library: Library) -> str | None:
    """Import and prepare the library; the reason why it cannot be used."""
    try:
        module = import_module(library.module)
        missing = [name for name in library.needs if not _has(module, name)]
        if missing:
            return f"the installed module {library.module} has no {', '.join(missing)}: it is another distribution"
        if library.prepare is not None:
            library.prepare(module)
    except Exception as error:  # building or loading another project's extension fails in many ways
        return f"{type(error).__name__}: {error}"
    return None


def _has(module: Any, name: str) -> bool:
    try:
        attrgetter(name)(module)
    except AttributeError:
        return False
    return True
