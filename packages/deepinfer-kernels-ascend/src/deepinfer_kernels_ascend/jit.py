"""TileLang programs in the Ascend dialect: written for a set of parameters, lowered to Ascend C, compiled at first use.

    @program
    def copy_rows_program(words, dtype): ... return prim_func   one Ascend C source for each (words, dtype)
    copy_rows_program(132, "int32")(cache, to, from)            compiled by CANN's bisheng, then launched
    copy_rows_program.source((132, "int32"))                    Ascend C, without a device and without CANN

Vector programs are SIMT: a fixed grid of BLOCKS x THREADS threads walks over the units of work, whatever their number,

    for step in ceil(units / (BLOCKS * THREADS)):   unit = (step * BLOCKS + block) * THREADS + thread

and no value crosses a thread, so a row's bits depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from deepinfer_core.errors import KernelError

__all__ = ["BLOCKS", "PROGRAMS", "THREADS", "Program", "T", "dtype_name", "each_unit", "program"]

# Their annotations describe Python values where programs handle expressions: to the type checker they are untyped.
tilelang: Any = import_module("tilelang")
T: Any = import_module("tilelang.ascend.language")

BLOCKS = 64  # vector cores of an Ascend 950; more or fewer would change the speed only
THREADS = 256
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_TARGET = {"kind": "ascend"}

PROGRAMS: dict[str, Program] = {}


class Program:
    """A function from parameters to a TileLang `prim_func`, and its compiled forms."""

    def __init__(self, build: Callable[..., Any]) -> None:
        self.name = build.__name__.removesuffix("_program")
        self.build = build
        self._compiled: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, *parameters: Any) -> Callable[..., None]:
        """The program for these parameters, compiled for Ascend 950. Raises KernelError where bisheng fails."""
        launch = self._compiled.get(parameters)
        if launch is None:
            launch = self._compiled[parameters] = self._compile(parameters)
        return launch

    def source(self, parameters: tuple[Any, ...]) -> str:
        """Ascend C of the device side."""
        target: Any = import_module("tvm.target").Target(_TARGET)
        with tilelang.transform.PassContext(opt_level=3), target:
            return str(tilelang.lower(self.build(*parameters), target=target).kernel_source)

    def _compile(self, parameters: tuple[Any, ...]) -> Callable[..., None]:
        try:
            return tilelang.compile(self.build(*parameters), target=_TARGET, execution_backend="tvm_ffi")
        except Exception as error:
            raise KernelError(
                f"kernel {self.name}{parameters} did not compile for Ascend 950: {error}; `deepinfer doctor` checks "
                "CANN, DEEPINFER_ACCELERATOR=cpu runs without it"
            ) from error


def program(build: Callable[..., Any]) -> Program:
    """Decorator: register a builder as a `Program`."""
    made = Program(build)
    PROGRAMS[made.name] = made
    return made


def each_unit(units: Any) -> Any:
    """Number of steps in which the whole grid walks over `units`."""
    return T.ceildiv(units, BLOCKS * THREADS)


def dtype_name(tensor: torch.Tensor) -> str:
    """TileLang's name of a tensor's dtype. Raises KernelError for one that no kernel here takes."""
    name = _DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise KernelError(f"the Ascend kernels compute in bfloat16 or float32, not {tensor.dtype}")
    return name
