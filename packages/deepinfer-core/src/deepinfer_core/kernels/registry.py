"""Picks the kernel provider, once a process, and fills the table of operations.

    DEEPINFER_ACCELERATOR=cpu|nvidia|ascend   names it; one that cannot run is an error, never a silent CPU run
    unset                                     the one provider whose probe succeeds, else cpu; two are an error

On the CPU the native kernels (`native/`) fill the table where they can be built, else the reference does.

Importing this module looks at nothing; `choose_provider` runs the probes, which make no device context.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from deepinfer_core.config.engine import CpuKernels
from deepinfer_core.config.env import read_text
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.contract import (
    OPS,
    SAMPLING_OPS,
    Capability,
    KernelProvider,
    Kernels,
    NamesLibraries,
    Unavailable,
)
from deepinfer_core.kernels.native import NativeProvider
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.mhc import next_of

__all__ = [
    "ENTRY_POINT_GROUP",
    "KernelChoice",
    "OpSource",
    "ProviderStatus",
    "build_kernels",
    "choose_provider",
    "native_status",
    "provider_statuses",
]

_log = logging.getLogger(__name__)
_PARTS_OF_NEXT = ("mhc_expand", "mhc_collapse", "rms_norm")  # which `mhc_next` stands for

ENTRY_POINT_GROUP = "deepinfer.kernels"
_REFERENCE_NAMES = ("cpu", "reference")


@dataclass(frozen=True)
class ProviderStatus:
    """One installed provider and what its probe said."""

    name: str
    provider: KernelProvider | None
    result: Capability | Unavailable


@dataclass(frozen=True)
class OpSource:
    """Where an operation of the table comes from, and why."""

    op: str
    provider: str
    reason: str
    row_invariant: bool  # a row's bits do not depend on the other rows
    library: str | None = None  # another project's, which the provider hands the operation to


@dataclass(frozen=True)
class KernelChoice:
    """The outcome of the choice; `provider` is None for the reference on the CPU."""

    name: str
    provider: KernelProvider | None
    device: str
    reason: str


def provider_statuses() -> list[ProviderStatus]:
    """Probe every installed provider, by name. A provider that fails to import or to probe is reported, not raised."""
    return [_status(entry) for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name)]


def choose_provider(requested: str | None, statuses: list[ProviderStatus] | None = None) -> KernelChoice:
    """`requested` is the value of DEEPINFER_ACCELERATOR or of the setting, None = look. Raises KernelError."""
    if requested in _REFERENCE_NAMES:
        return KernelChoice("cpu", None, "cpu", f"{requested!r} was asked for")
    found = provider_statuses() if statuses is None else statuses
    if requested is not None:
        return _named(requested, found)
    usable = [status for status in found if isinstance(status.result, Capability)]
    if len(usable) > 1:
        names = " and ".join(status.name for status in usable)
        raise KernelError(f"{names} can both run here; set DEEPINFER_ACCELERATOR to one of them, or to cpu")
    if not usable:
        reasons = "; ".join(f"{status.name}: {_reason(status)}" for status in found) or "no kernel package is installed"
        return KernelChoice("cpu", None, "cpu", reasons)
    return _choice(usable[0])


def build_kernels(
    choice: KernelChoice,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    cpu_kernels: CpuKernels = "auto",
    cache_dir: str | None = None,
) -> tuple[Kernels, list[OpSource]]:
    """The table for one model: the provider's function where one takes the shapes, else the reference's.

    On the CPU `cpu_kernels` says whether the native kernels run: "auto" where they can be built (the reason why not is
    logged and stands in the sources), "native" raises KernelError where they cannot, "reference" leaves them out.
    `cache_dir` keeps what is compiled; None = DEEPINFER_JIT_CACHE_DIR or the user's cache folder.
    """
    provider, why_none = choice.provider, "no provider is chosen"
    if choice.device == "cpu" and provider is None:
        provider, why_none = _native(cpu_kernels, cache_dir)
    loaded: Mapping[str, Callable[..., Any]] = {} if provider is None else provider.load()
    unknown = sorted(set(loaded) - set(OPS))
    if provider is not None and unknown:
        raise KernelError(
            f"provider {provider.name} offers operations that the contract does not have: {', '.join(unknown)}"
        )
    table: dict[str, Callable[..., Any]] = {}
    sources: list[OpSource] = []
    for op in OPS:
        why_not = why_none if provider is None else "not offered by the provider"
        if provider is not None and op in loaded:
            why_not = provider.unsupported(op, config, dtype)
        if provider is not None and why_not is None:
            table[op] = loaded[op]
            sources.append(_offered(provider, op, loaded[op]))
        else:
            table[op] = getattr(REFERENCE, op)
            # On an accelerator torch picks products and reductions by the number of rows; what is exact has one result.
            sources.append(OpSource(op, "reference", why_not or "", choice.device == "cpu" or OPS[op].exact))
    if table["mhc_next"] is REFERENCE.mhc_next:  # its parts may come from the provider
        table["mhc_next"] = next_of(*(table[op] for op in _PARTS_OF_NEXT))
        invariant = all(source.row_invariant for source in sources if source.op in _PARTS_OF_NEXT)
        at = next(i for i, source in enumerate(sources) if source.op == "mhc_next")
        sources[at] = replace(sources[at], row_invariant=invariant)
    # The reference is exact for any number of rows but pads to its tiles in every call; native code needs no tiles.
    only_native = all(source.provider == NativeProvider.name for source in sources if source.op not in SAMPLING_OPS)
    return Kernels(**table, row_multiple=1 if only_native else REFERENCE.row_multiple), sources


def _offered(provider: KernelProvider, op: str, function: Callable[..., Any]) -> OpSource:
    library = provider.library_of(function) if isinstance(provider, NamesLibraries) else None
    reason = "offered by the provider"
    if library is not None:
        reason += f", which hands it to {library} where that takes the shape"
    return OpSource(op, provider.name, reason, op in provider.row_invariant_ops, library)


def native_status(cache_dir: str | None = None) -> ProviderStatus:
    """The native CPU kernels and whether a compiler is there for them."""
    provider = NativeProvider(cache_dir or read_text("DEEPINFER_JIT_CACHE_DIR"))
    return ProviderStatus(provider.name, provider, provider.probe())


def _native(cpu_kernels: CpuKernels, cache_dir: str | None) -> tuple[KernelProvider | None, str]:
    """The native provider, compiled; or None and the reason."""
    if cpu_kernels == "reference":
        return None, "cpu_kernels is 'reference'"
    provider = NativeProvider(cache_dir or read_text("DEEPINFER_JIT_CACHE_DIR"))
    try:
        provider.load()
    except KernelError as error:
        if cpu_kernels == "native":
            raise KernelError(f"cpu_kernels is 'native' and the native kernels cannot be used: {error}") from error
        _log_once(f"the reference kernels run, several times slower than native ones: {error}")
        return None, f"native kernels: {error}"
    return provider, ""


@cache
def _log_once(message: str) -> None:
    _log.warning(message)


def _status(entry: EntryPoint) -> ProviderStatus:
    try:
        provider = entry.load()
        provider = provider() if isinstance(provider, type) else provider
        if not isinstance(provider, KernelProvider):
            return ProviderStatus(
                entry.name, None, Unavailable(f"{entry.value} is not a kernel provider; reinstall its package")
            )
        return ProviderStatus(entry.name, provider, provider.probe())
    except Exception as error:  # a broken plug-in must not break the engine
        return ProviderStatus(entry.name, None, Unavailable(f"{type(error).__name__}: {error}"))


def _named(requested: str, found: list[ProviderStatus]) -> KernelChoice:
    for status in found:
        if status.name == requested:
            if isinstance(status.result, Unavailable):
                raise KernelError(
                    f"the accelerator {requested!r} was asked for and cannot run here: {status.result.reason} "
                    "(`deepinfer doctor` explains; DEEPINFER_ACCELERATOR=cpu runs on the CPU)"
                )
            return _choice(status)
    known = ", ".join(["cpu", *(status.name for status in found)])
    raise KernelError(f"the accelerator {requested!r} has no installed provider; installed: {known}")


def _choice(status: ProviderStatus) -> KernelChoice:
    if not isinstance(status.result, Capability):
        raise KernelError(f"{status.name}: {status.result.reason}")
    return KernelChoice(status.name, status.provider, status.result.device, status.result.summary)


def _reason(status: ProviderStatus) -> str:
    return status.result.reason if isinstance(status.result, Unavailable) else status.result.summary
