"""The provider `nvidia`: says whether this process can use NVIDIA kernels, and hands them to the engine.

    driver answers -> a GPU is visible -> all visible are supported -> torch can use the driver -> TileLang and nvcc

The first link that is missing is the reason that `probe` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Literal

import torch

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.contract import CODED_OPS, Capability, Unavailable
from deepinfer_core.kernels.reference.coded import Weight
from deepinfer_core.kernels.reference.packed import PackedWeight, Packing
from deepinfer_kernels_nvidia.coverage import OFFERED, reason_against
from deepinfer_kernels_nvidia.devices import Driver, DriverError, Gpu, ask_driver
from deepinfer_kernels_nvidia.toolchain import nvcc_problem

# By compute capability. Consumer Blackwell (12.x) is another instruction set.
SUPPORTED_ARCHES: Mapping[tuple[int, int], str] = {(9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_103"}


class NvidiaProvider:
    """Implements `deepinfer_core.kernels.contract.KernelProvider` for SM90 and SM100."""

    name: str = "nvidia"
    cache_form: Literal["plain", "packed"] = "packed"
    row_invariant_ops: frozenset[str] = OFFERED  # every kernel walks a row in one fixed order; conformance checks it
    coded_ops: frozenset[str] = CODED_OPS
    packed_ops: frozenset[str] = CODED_OPS

    def probe(self) -> Capability | Unavailable:
        """Say what can run here, or the first thing that is missing. Imports no TileLang and makes no CUDA context."""
        try:
            driver = ask_driver()
        except DriverError as error:
            return Unavailable(f"{error}; install the driver")
        problem = _device_problem(driver) or _torch_problem(driver) or _compiler_problem()
        if problem:
            return Unavailable(problem)
        arch = SUPPORTED_ARCHES[driver.gpus[0].capability]
        return Capability("cuda", arch, f"{len(driver.gpus)} x {driver.gpus[0].name} ({arch})")

    def load(self) -> Mapping[str, Callable[..., Any]]:
        """Return the operations that this package implements, by their name in the contract.

        Raises KernelError with the reason where `probe` finds one.
        """
        found = self.probe()
        if isinstance(found, Unavailable):
            raise KernelError(f"the NVIDIA kernels cannot run here: {found.reason}")
        # Both import TileLang, which takes seconds.
        from deepinfer_kernels_nvidia.libraries import library_table
        from deepinfer_kernels_nvidia.ops import TABLE

        return {**TABLE, **library_table(found.arch)}

    def unsupported(self, op: str, config: ModelConfig, dtype: torch.dtype) -> str | None:
        """Say why an operation must come from the reference for this model; None when ours can be used."""
        return reason_against(op, config, dtype)

    def library_of(self, function: Callable[..., Any]) -> str | None:
        """Say which library a function of `load` hands its work to; None for our own kernel."""
        from deepinfer_kernels_nvidia.libraries import library_of  # imports TileLang, as `load` did

        return library_of(function)

    def arranged(self, weight: PackedWeight, halves: bool) -> Weight:
        """Tiles that the kernels decode; see contract `TakesPacked`."""
        from deepinfer_kernels_nvidia.ops.packed_tiles import arranged  # imports TileLang, as `load` did

        return arranged(weight, halves)

    def warm(
        self,
        config: ModelConfig,
        progress: Callable[[int, int, str], None],
        local_experts: int | None = None,
        *,
        coded: bool = False,
        packed: Packing = "none",
    ) -> None:
        """Compile every program of this model for the current GPU; see `warm.warm`. Raises KernelError."""
        from deepinfer_kernels_nvidia.warm import warm  # imports TileLang

        warm(config, progress, local_experts, coded=coded, packed=packed)


def _device_problem(driver: Driver) -> str | None:
    if not driver.gpus:
        return "no GPU is visible: there is none, or CUDA_VISIBLE_DEVICES hides it"
    strangers = [gpu for gpu in driver.gpus if gpu.capability not in SUPPORTED_ARCHES]
    if strangers:
        wanted = ", ".join(SUPPORTED_ARCHES.values())
        return f"{_described(strangers[0])} is not supported ({wanted} are); hide it with CUDA_VISIBLE_DEVICES"
    kinds = {gpu.capability: gpu for gpu in driver.gpus}
    if len(kinds) > 1:
        named = " and ".join(_described(gpu) for gpu in kinds.values())
        return f"GPUs of several kinds are visible ({named}); choose one kind with CUDA_VISIBLE_DEVICES"
    return None


def _torch_problem(driver: Driver) -> str | None:
    built_for = torch.version.cuda
    if built_for is None:
        return f"torch {torch.__version__} is built without CUDA; install a build with CUDA"
    if int(built_for.split(".")[0]) > driver.cuda_version[0]:
        known = f"{driver.cuda_version[0]}.{driver.cuda_version[1]}"
        return (
            f"the NVIDIA driver knows CUDA {known}, torch {torch.__version__} needs {built_for}; install a newer driver"
        )
    return None


def _compiler_problem() -> str | None:
    if find_spec("tilelang") is None:
        return "TileLang, which compiles the kernels, is not installed; install deepinfer-core[nvidia]"
    return nvcc_problem()


def _described(gpu: Gpu) -> str:
    return f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"
