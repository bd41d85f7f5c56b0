"""TileLang programs: written for a set of parameters, compiled at the first call, kept on disk.

    @program
    def rms_norm_program(dim, dtype): ... return prim_func     one CUDA source for each (dim, dtype)
    rms_norm_program(5120, "bfloat16")(x, weight, out, eps)    compiled for this device's architecture, then launched
    rms_norm_program.source((5120, "bfloat16"), "sm_100a")     CUDA source for any architecture, without a GPU

Numbers of rows are dynamic: one compiled program serves every batch, so its arithmetic cannot depend on the batch.
Compiled programs lie in DEEPINFER_JIT_CACHE_DIR (TileLang's own folder when it is unset), keyed by their source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from deepinfer_core.config.env import read_text
from deepinfer_core.errors import KernelError

__all__ = ["PROGRAMS", "Program", "T", "aligned", "device_arch", "dtype_name", "program"]

# TileLang and its language. Their annotations describe Python values where programs handle expressions, so to the type
# checker they are untyped.
tilelang: Any = import_module("tilelang")
T: Any = import_module("tilelang.language")

_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_ROW_UNIT = 8  # elements: 16 bytes of bf16
_VECTOR_BYTES = 16  # the widest access of one thread
_TENSOR_MEMORY_ARCHES = ("sm_100a", "sm_103a")
# With a warp group of its own for the copies TileLang 0.1.15 lets that group free the memory while the other reads it.
_TENSOR_MEMORY_PASSES = {"tl.disable_warp_specialized": True}
# Who places barriers by hand cannot see which shared buffers TileLang would put in one place, one after the other.
_BY_HAND = "tl.disable_thread_storage_sync"
_OWN_PLACES = {"tl.disable_shared_memory_reuse": True}

PROGRAMS: dict[str, Program] = {}


class Program:
    """A function from parameters to a TileLang `prim_func`, and its compiled forms."""

    def __init__(self, build: Callable[..., Any], pass_configs: dict[str, Any], tensor_memory: bool = False) -> None:
        self.name = build.__name__.removesuffix("_program")
        self._build = build
        self._pass_configs = pass_configs
        self._tensor_memory = tensor_memory
        self._compiled: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, *parameters: Any) -> Callable[..., None]:
        """The program for these parameters, compiled for the current device. Raises KernelError where nvcc fails."""
        launch = self._compiled.get(parameters)
        if launch is None:
            launch = self._compiled[parameters] = self._compile(parameters)
        return launch

    def source(self, parameters: tuple[Any, ...], arch: str) -> str:
        """CUDA source for `arch` (sm_90a, sm_100a ..); needs no GPU and no nvcc."""
        target: Any = import_module("tvm.target").Target({"kind": "cuda", "arch": arch})
        build, pass_configs = self._for_arch(arch)
        with tilelang.transform.PassContext(opt_level=3, config=pass_configs), target:
            return str(tilelang.lower(build(*parameters), target=target).kernel_source)

    def _for_arch(self, arch: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Builder and pass settings: those of tensor memory where the program has that form and `arch` the memory."""
        if self._tensor_memory and arch in _TENSOR_MEMORY_ARCHES:
            return partial(self._build, tensor_memory=True), self._pass_configs | _TENSOR_MEMORY_PASSES
        return self._build, self._pass_configs

    def _compile(self, parameters: tuple[Any, ...]) -> Callable[..., None]:
        use_cache_folder()
        build, pass_configs = self._for_arch(device_arch())
        try:
            return tilelang.compile(
                build(*parameters),
                target={"kind": "cuda", "arch": device_arch()},
                execution_backend="tvm_ffi",
                pass_configs=pass_configs,
            )
        except Exception as error:
            raise KernelError(
                f"kernel {self.name}{parameters} did not compile for {device_arch()}: {error}; `deepinfer doctor` "
                "checks nvcc, DEEPINFER_ACCELERATOR=cpu runs without it"
            ) from error


def program(build: Callable[..., Any] | None = None, *, tensor_memory: bool = False, **pass_configs: Any) -> Any:
    """Decorator: register a builder as a `Program`; other keywords are TileLang pass settings. `tensor_memory`: the
    builder has a keyword of that name, which is true for architectures that have this memory. Where barriers are placed
    by hand, each shared buffer has memory of its own.
    """

    def register(function: Callable[..., Any]) -> Program:
        settings = {key.replace("__", "."): value for key, value in pass_configs.items()}
        if settings.get(_BY_HAND):
            settings |= _OWN_PLACES
        made = Program(function, settings, tensor_memory)
        PROGRAMS[made.name] = made
        return made

    return register if build is None else register(build)


@cache
def device_arch() -> str:
    """Architecture of the current GPU with its own instructions: the `a` unlocks wgmma and tcgen05."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


@cache
def use_cache_folder() -> None:
    """Let TileLang keep compiled programs in DEEPINFER_JIT_CACHE_DIR, where it is set."""
    folder = read_text("DEEPINFER_JIT_CACHE_DIR")
    if folder:
        tilelang.env.TILELANG_CACHE_DIR = str(Path(folder).expanduser())


def dtype_name(tensor: torch.Tensor) -> str:
    """TileLang's name of a tensor's dtype. Raises KernelError for one that no kernel here takes."""
    name = _DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise KernelError(f"the NVIDIA kernels compute in bfloat16 or float32, not {tensor.dtype}")
    return name


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself where it is contiguous and starts at 16 bytes, as vector accesses need; else a copy."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _VECTOR_BYTES == 0 else tensor.clone()


def tma_ready(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] and weight [..., K, N] with zeros appended where K or N is no multiple of 8: the bulk copy engine
    wants rows of whole 16-byte units.
    """
    inner, columns = -weight.shape[-2] % _ROW_UNIT, -weight.shape[-1] % _ROW_UNIT
    if inner or columns:
        return F.pad(x, (0, inner)), F.pad(weight, (0, columns, 0, inner))
    return x, weight
