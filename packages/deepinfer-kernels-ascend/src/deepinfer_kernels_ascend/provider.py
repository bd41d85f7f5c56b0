"""The provider `ascend`: says whether this process can use Ascend kernels, and hands them to the engine.

    driver's device nodes -> a device is visible -> CANN 9.2 -> torch-npu and TileLang -> (load) chip is an Ascend 950

The first link that is missing is the reason that `probe` gives. Only torch-npu can name the chip, and asking it starts
the device, so that question waits for `load`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.contract import Capability, Unavailable
from deepinfer_kernels_ascend.coverage import ROW_INVARIANT, reason_against
from deepinfer_kernels_ascend.toolchain import cann_problem

SUPPORTED_CHIP = "Ascend950"
_DEVICE_FOLDER = Path("/dev")


class AscendProvider:
    """Implements `deepinfer_core.kernels.contract.KernelProvider` for Ascend 950."""

    name: str = "ascend"
    cache_form: Literal["plain", "packed"] = "packed"
    row_invariant_ops: frozenset[str] = ROW_INVARIANT
    coded_ops: frozenset[str] = frozenset()  # none takes coded weights

    def __init__(self, device_folder: Path = _DEVICE_FOLDER) -> None:
        self._device_folder = device_folder

    def probe(self) -> Capability | Unavailable:
        """Say what can run here, or the first thing that is missing. Imports neither TileLang nor torch-npu."""
        nodes = [node for node in self._device_folder.glob("davinci*") if node.name.removeprefix("davinci").isdecimal()]
        problem = _device_problem(len(nodes)) or cann_problem() or _package_problem()
        if problem:
            return Unavailable(problem)
        return Capability(
            "npu", "ascend950", f"{len(nodes)} x Ascend (the chip's kind is checked when kernels are loaded)"
        )

    def load(self) -> Mapping[str, Callable[..., Any]]:
        """Return the operations that this package implements, by their name in the contract.

        Raises KernelError with the reason where `probe` finds one, or where the chip is no Ascend 950.
        """
        found = self.probe()
        if isinstance(found, Unavailable):
            raise KernelError(f"the Ascend kernels cannot run here: {found.reason}")
        chip: str = import_module("torch_npu").npu.get_device_name(0)
        if not chip.startswith(SUPPORTED_CHIP):
            raise KernelError(f"the Ascend kernels cannot run here: the device is {chip}, {SUPPORTED_CHIP} is needed")
        from deepinfer_kernels_ascend.dispatch import register
        from deepinfer_kernels_ascend.ops import TABLE  # imports TileLang, which takes seconds

        register()
        return TABLE

    def unsupported(self, op: str, config: ModelConfig, dtype: torch.dtype) -> str | None:
        """Say why an operation must come from the reference for this model; None when ours can be used."""
        return reason_against(op, config, dtype)

    def warm(
        self, config: ModelConfig, progress: Callable[[int, int, str], None], local_experts: int | None = None
    ) -> None:
        """Compile every program of this model; see `warm.warm`. Raises KernelError."""
        from deepinfer_kernels_ascend.warm import warm  # imports TileLang

        warm(config, progress, local_experts)


def _device_problem(num_nodes: int) -> str | None:
    if num_nodes == 0:
        return "no Ascend device: the driver's nodes /dev/davinci* are missing; install the driver"
    if os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "0").strip() in {"", "-1"}:
        return "ASCEND_RT_VISIBLE_DEVICES hides every device; unset it"
    return None


def _package_problem() -> str | None:
    for module, package in (("torch_npu", "torch-npu"), ("tilelang", "TileLang")):
        if find_spec(module) is None:
            return f"{package} is not installed; install deepinfer-core[ascend]"
    return None
