"""Runs the lowered Ascend C of SIMT programs on the host, so that their arithmetic is tested without CANN or a device.

    TileLang program -> Ascend C (as shipped) -> g++ with a dozen definitions below -> one call a block

The vector programs of the package are SIMT without barriers: a thread talks to no other, so the host runs block after
block, thread after thread. `launch` checks what a launch of the real thing would check: dtypes, shapes, contiguity.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.kernels.cuda_host import bind

# What CANN's headers define and the generated code of these programs uses. bfloat16: round to nearest, ties to even.
PRELUDE = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#define __gm__
#define __simt_vf__ static
#define __global__
#define __vector__
#define __launch_bounds__(threads)
using std::max;
using std::min;
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    bits = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
  }
  explicit operator float() const {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
};
namespace cce { struct dim3 { uint32_t x; explicit dim3(uint32_t x) : x(x) {} }; }
static struct { uint32_t x; } threadIdx;
extern "C" { int32_t block_idx; }
static void asc_init() {}
template <auto function, class... Args> static void asc_vf_call(cce::dim3 threads, Args... args) {
  for (threadIdx.x = 0; threadIdx.x < threads.x; ++threadIdx.x) function(args...);
}
"""
_SCALARS = {"float": ctypes.c_float, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}


class HostPrograms:
    """Compiles programs of the package for the host, each variant once."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self._folder = folder
        self._num_blocks = num_blocks
        self.launch_of = cache(self._launch_of)

    def _launch_of(self, program: Any, parameters: tuple[Any, ...]) -> Callable[..., None]:
        source = program.source(parameters)
        library = self._compile(source, f"{program.name}_{len(list(self._folder.iterdir()))}")
        function = getattr(library, f"{program.name}_kernel")
        block = ctypes.c_int32.in_dll(library, "block_idx")
        signature = kernel_signature(source)
        prim_func = program.build(*parameters)

        def launch(*args: Any) -> None:
            values = bind(prim_func, args)
            given = [
                ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor) else _SCALARS[kind](value)
                for name, kind in signature
                for value in (values[name],)
            ]
            for index in range(self._num_blocks):
                block.value = index
                function(*given)

        return launch

    def _compile(self, source: str, name: str) -> ctypes.CDLL:
        path = self._folder / f"{name}.cpp"
        path.write_text(PRELUDE + re.sub(r"#include <tl_templates.*", "", source), encoding="utf-8")
        compiler = shutil.which("g++") or shutil.which("c++") or "c++"
        # -fno-strict-aliasing: the generated code reinterprets through pointers.
        options = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing"]
        subprocess.run([compiler, *options, path, "-o", path.with_suffix(".so")], check=True)
        return ctypes.CDLL(str(path.with_suffix(".so")))


def kernel_signature(source: str) -> list[tuple[str, str]]:
    """(name, C type) of the entry's parameters; tensors have a pointer type."""
    match = re.search(r'extern "C" __global__ __vector__ void \w+\(([^)]*)\)', source)
    assert match is not None, "the source has no vector entry"
    parameters = [part.rsplit(" ", 1) for part in match[1].split(", ")]
    return [(name, kind.removeprefix("__gm__ ")) for kind, name in parameters]
