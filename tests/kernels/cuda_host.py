"""Runs the lowered CUDA of programs without tensor cores on the host, so that their arithmetic is tested without a GPU.

    TileLang program -> CUDA (as shipped) -> g++ with the definitions below -> one call a launch

Blocks run one after the other. The threads of a block are fibres that take turns: one runs until it waits at a barrier
or in a shuffle for the others of its block or warp. So a missing barrier shows as a wrong result, not as a rare one,
and atomic operations need nothing. What it does not show: bulk copies, tensor cores, speed.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.kernels.lowering import lowered

PRELUDE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#include <ucontext.h>
using std::max; using std::min; using std::isnan;
typedef unsigned char uchar; typedef unsigned int uint;
struct dim3 { uint x = 1, y = 1, z = 1; };
struct alignas(16) float4 { float x, y, z, w; };
#define CUDART_INF_F std::numeric_limits<float>::infinity()
#define __global__
#define __launch_bounds__(...)
#define __restrict__
#define __uint_as_float(word) host::bits<float>(uint32_t(word))
#define __float_as_uint(value) host::bits<uint32_t>(float(value))
namespace host {
constexpr int kMostThreads = 1024, kStack = 1 << 16, kWarp = 32;
struct Meeting { int arrived = 0, turn = 0; };
struct Fibre { ucontext_t context; dim3 thread; bool done; std::vector<char> stack; };
static std::vector<Fibre> fibres;
static ucontext_t scheduler;
static int self, threads, steps;  // steps: meetings that came about, and fibres that ended
static dim3 block;
alignas(1024) static uchar shared[232448];
alignas(16) static char cells[kMostThreads][16];
static Meeting everybody, warps[kMostThreads / kWarp];
static void (*body)(void**);
static void** given;
template <class To, class From> To bits(From value) { To to; std::memcpy(&to, &value, sizeof(To)); return to; }
static void meet(Meeting& meeting, int size) {
  int turn = meeting.turn;
  if (++meeting.arrived == size) { meeting.arrived = 0; ++meeting.turn; ++steps; return; }
  while (meeting.turn == turn) swapcontext(&fibres[self].context, &scheduler);
}
static void run_fibre() { body(given); fibres[self].done = true; }
static void meet_warp() { meet(warps[self / kWarp], min(kWarp, threads - self / kWarp * kWarp)); }
template <class T> T exchange(T value, int from) {
  std::memcpy(cells[self], &value, sizeof(T));
  meet_warp();
  T other; std::memcpy(&other, cells[from], sizeof(T));
  meet_warp();
  return other;
}
// Returns false where the threads wait for each other: a barrier that not all of them reach.
static bool run_block() {
  everybody = {}; for (Meeting& warp : warps) warp = {};
  for (self = 0; self < threads; ++self) {
    Fibre& fibre = fibres[self];
    fibre.done = false; fibre.thread = {uint(self), 0, 0}; fibre.stack.resize(kStack);
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.data(); fibre.context.uc_stack.ss_size = kStack;
    fibre.context.uc_link = &scheduler;
    makecontext(&fibre.context, run_fibre, 0);
  }
  for (int left = threads; left;) {
    int before = steps;
    for (self = 0; self < threads; ++self)
      if (!fibres[self].done) {
        swapcontext(&scheduler, &fibres[self].context);
        left -= fibres[self].done; steps += fibres[self].done;
      }
    if (steps == before) return false;
  }
  return true;
}
}  // namespace host
#define threadIdx (host::fibres[host::self].thread)
#define blockIdx (host::block)
static void __syncthreads() { host::meet(host::everybody, host::threads); }
static int __syncthreads_or(int predicate) {
  static int any; __syncthreads(); any = 0; __syncthreads(); any |= predicate != 0; __syncthreads(); return any;
}
template <class T> T __shfl_xor_sync(uint, T value, int mask, int = 32) {
  return host::exchange(value, host::self ^ mask);
}
template <class T> T __shfl_up_sync(uint, T value, int delta, int = 32) {
  return host::exchange(value, host::self % 32 >= delta ? host::self - delta : host::self);
}
template <class T, class U> T AtomicAddRet(T* at, U value, int = 0) { T old = *at; *at += T(value); return old; }
template <class T, class U> void AtomicAdd(T* at, U value, int = 0) { *at += T(value); }
static float __fmul_rn(float a, float b) { return a * b; }
#define __logf(x) std::log(float(x))
namespace tl {
struct MaxOp { template <class T> T operator()(T a, T b) { return max(a, b); } };
struct SumOp { template <class T> T operator()(T a, T b) { return a + b; } };
template <int count> struct NamedBarrier {};
template <class Op, int count, int scale, int offset = 0, class Barrier = void> struct AllReduce {
  static_assert(scale == 1 && offset == 0);
  template <class T> static T run(T value, T* = nullptr) {
    std::memcpy(host::cells[host::self], &value, sizeof(T));
    __syncthreads();
    int first = host::self / count * count;
    T all; std::memcpy(&all, host::cells[first], sizeof(T));
    for (int i = first + 1; i < first + count; ++i) {
      T one; std::memcpy(&one, host::cells[i], sizeof(T));
      all = Op()(all, one);
    }
    __syncthreads();
    return all;
  }
};
}  // namespace tl
"""
_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bfloat16": torch.bfloat16,
}
_SCALARS = {"float": ctypes.c_float, "int": ctypes.c_int32, "int64_t": ctypes.c_int64}


class HostPrograms:
    """Compiles programs of the package for the host, each variant once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.launch_of = cache(self._launch_of)

    def _launch_of(self, program: Any, parameters: tuple[Any, ...]) -> Callable[..., None]:
        source = lowered(program.name, parameters, "sm_90a")
        name = f"{program.name}_{len(list(self._folder.iterdir()))}"
        signature, threads = _signature(source)
        launch_block = self._compile(source, name, program.name, signature)
        prim_func = program._build(*parameters)
        grid = _grid(prim_func)

        def launch(*args: Any) -> None:
            values = bind(prim_func, args)
            cells = [_cell(kind, values[parameter]) for parameter, kind in signature]
            pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
            extents = [_evaluate(extent, values) for extent in grid]
            stuck = launch_block((ctypes.c_int * 3)(*extents), threads, pointers)
            assert not stuck, f"{program.name}: some threads wait at a barrier that others do not reach"

        return launch

    def _compile(self, source: str, name: str, kernel: str, signature: list[tuple[str, str]]) -> Any:
        source = re.sub(
            r"#if defined\(_MSC_VER\).*?#endif\n|#include <.*?>\n|#ifdef.*?#endif\n", "", source, flags=re.S
        )
        shared = r"extern __shared__ __align__\(1024\) (\w+) (\w+)\[\];"
        source = re.sub(shared, r"\1* \2 = (\1*)host::shared;", source)
        arguments = ", ".join(f"*({kind}*)cells[{i}]" for i, (_, kind) in enumerate(signature))
        entry = f"""
extern "C" int launch(int* grid, int threads, void** cells) {{
  host::body = [](void** cells) {{ {kernel}_kernel({arguments}); }};
  host::given = cells; host::threads = threads; host::fibres.resize(threads);
  for (int z = 0; z < grid[2]; ++z) for (int y = 0; y < grid[1]; ++y) for (int x = 0; x < grid[0]; ++x) {{
    host::block = {{uint(x), uint(y), uint(z)}};
    if (!host::run_block()) return 1;
  }}
  return 0;
}}"""
        path = self._folder / f"{name}.cpp"
        path.write_text(PRELUDE + source + entry, encoding="utf-8")
        compiler = shutil.which("g++") or shutil.which("c++") or "c++"
        # -fno-strict-aliasing: the generated code reinterprets through pointers.
        options = ["-std=c++17", "-O0", "-w", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing"]
        subprocess.run([compiler, *options, path, "-o", path.with_suffix(".so")], check=True)
        return ctypes.CDLL(str(path.with_suffix(".so"))).launch


def _signature(source: str) -> tuple[list[tuple[str, str]], int]:
    """(name, C type) of the kernel's parameters, and its threads."""
    match = re.search(r'extern "C" __global__ void __launch_bounds__\((\d+).*?\) \w+\(([^)]*)\) \{', source)
    assert match is not None, "the source has no kernel"
    parameters = [re.fullmatch(r"(?:const )?(\w+\*?)(?: __restrict__)? (\w+)", part) for part in match[2].split(", ")]
    return [(found[2], found[1]) for found in parameters if found is not None], int(match[1])


def _cell(kind: str, value: Any) -> Any:
    return ctypes.c_void_p(value.data_ptr()) if kind.endswith("*") else _SCALARS[kind](value)


def _grid(prim_func: Any) -> list[Any]:
    """Numbers of blocks along x, y and z, as expressions."""
    extents: dict[str, Any] = {}

    def visit(node: Any) -> None:
        if getattr(node, "thread_binding", None) is not None:
            extents[str(node.thread_binding.thread_tag)] = node.extent

    import_module("tvm.tirx.stmt_functor").post_order_visit(prim_func.body, visit)
    return [extents.get(f"blockIdx.{axis}", 1) for axis in "xyz"]


def _evaluate(extent: Any, values: dict[str, Any]) -> int:
    """The extent with the sizes of a launch in it."""
    if isinstance(extent, int):
        return extent
    functor, arith = import_module("tvm.tirx.stmt_functor"), import_module("tvm.arith")
    known: dict[Any, Any] = {}

    def visit(node: Any) -> None:
        if type(node).__name__ == "Var":
            known[node] = values[node.name]

    functor.post_order_visit(extent, visit)
    return int(arith.Analyzer().simplify(functor.substitute(extent, known)))


def bind(prim_func: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Values of a launch by name: tensors, scalars and the dynamic sizes that follow from the tensors' shapes."""
    assert len(args) == len(prim_func.params), f"{len(args)} arguments for {len(prim_func.params)} parameters"
    values: dict[str, Any] = {}
    for parameter, value in zip(prim_func.params, args, strict=True):
        if parameter not in prim_func.buffer_map:
            assert not isinstance(value, torch.Tensor), f"{parameter.name} is a number"
            values[parameter.name] = value
            continue
        buffer = prim_func.buffer_map[parameter]
        assert value.dtype == _DTYPES[str(buffer.dtype)], f"{buffer.name} is {value.dtype}, not {buffer.dtype}"
        assert value.dim() == len(buffer.shape), f"{buffer.name} has shape {tuple(value.shape)}"
        values[buffer.name] = value
        strides = buffer.strides or [None] * value.dim()
        for size, extent, step, stride in zip(value.shape, buffer.shape, value.stride(), strides, strict=True):
            wanted = values.setdefault(extent.name, size) if hasattr(extent, "name") else int(extent)
            assert size == wanted, f"{buffer.name} has shape {tuple(value.shape)}, not {buffer.shape}"
            if hasattr(stride, "name"):
                values[stride.name] = step
        assert buffer.strides or value.is_contiguous(), f"{buffer.name} is not contiguous"
    return values
