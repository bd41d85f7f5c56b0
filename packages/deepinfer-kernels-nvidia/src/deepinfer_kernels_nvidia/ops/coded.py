# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Products in e4m3: out[r, n] = x_scale[r] w_scale[n] sum_k x8[r, k] w8[n, k] (contract `CodedWeight`).

    rows      x [R, K] bf16 ─► x8 [R, K] e4m3, x_scale [R] the power of two that brings the largest |x| below 448
    weights   w8 [N, K] e4m3, w_scale [N] in the same way, made once
    product   tiles of 128 values of K stream through shared memory into float32 sums, which stand in registers, on
              SM100 in tensor memory (never run; `tensor_memory`); scales act at the end

One scale a row is as fine as one a group of 32: e4m3 covers 17 binades, and what lies below them adds nothing to a sum.
Tensor cores take e4m3 twice as fast as bf16 and with half the bytes. Tiles are chosen as in `linear` (`tiling`): all
walk K in one order, so rows are invariant. The expert MLP is the same with one weight an expert; `experts` describes
its slots and tiles.
"""

from typing import Any

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.reference.coded import CodedWeight
from deepinfer_kernels_nvidia.jit import T, aligned, program
from deepinfer_kernels_nvidia.ops.tensor_memory import accumulate, is_streamed, read_sums
from deepinfer_kernels_nvidia.ops.tiling import FEW_ROWS, coded_columns, few_columns

__all__ = ["linear_coded", "run_experts_coded", "shared_expert_coded"]

_ROWS, _INNER, _STAGES, _THREADS = 128, 128, 3, 256
_NARROW, _NARROW_STAGES = 192, 4  # columns of the narrower tile of a dense product
_FEW_STAGES = 8  # of tiles for few rows: 16 kB each
_TILE = 128  # slots of one expert
_GATED_COLUMNS, _DOWN_COLUMNS = 128, 256
_TENSOR_MEMORY_COLUMNS = 128
_CHUNK = 16  # codes that one thread moves
_CODERS, _VECTOR = 128, 8  # threads of a row that is coded, values that each takes at a time
_LEAST, _LARGEST = 1e-4, 448.0
_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000


def _power(largest: Any) -> Any:
    """The scale of values up to `largest`."""
    wanted = T.max(largest, T.float32(_LEAST)) * T.float32(1.0 / _LARGEST)
    return T.reinterpret((T.reinterpret(wanted, "int32") + _MANTISSA) & _EXPONENT, "float32")


@program
def code_rows_program(dim: int):
    """x [rows, dim] -> codes [rows, dim], scale [rows]. A block's threads hold the row, eight values at a time."""
    rows = T.dynamic("rows")
    vectors = dim // _VECTOR
    turns = -(-vectors // _CODERS)

    @T.prim_func
    def code_rows(
        x: T.Tensor((rows, dim), "bfloat16"),
        codes: T.Tensor((rows, dim), "float8_e4m3fn"),
        scale: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(rows, threads=_CODERS) as row:
            thread = T.get_thread_binding()
            value = T.alloc_local((turns * _VECTOR,), "float32")
            largest = T.alloc_var("float32")
            inverse = T.alloc_var("float32")
            shared = T.alloc_shared((_CODERS,), "float32")
            own = T.alloc_fragment((_CODERS,), "float32")
            top = T.alloc_fragment((1,), "float32")
            largest = 0.0
            for i in T.unroll(turns):
                if i * _CODERS + thread < vectors:
                    for v in T.vectorized(_VECTOR):
                        value[i * _VECTOR + v] = x[row, (i * _CODERS + thread) * _VECTOR + v]
                    for v in T.unroll(_VECTOR):
                        largest = T.max(largest, T.abs(value[i * _VECTOR + v]))
            shared[thread] = largest
            T.copy(shared, own)
            T.reduce_max(own, top, dim=0)
            if thread == 0:
                scale[row] = _power(top[0])
                shared[0] = _power(top[0])
            T.sync_threads()
            inverse = 1.0 / shared[0]  # of a power of two: exact
            for i in T.unroll(turns):
                if i * _CODERS + thread < vectors:
                    for v in T.vectorized(_VECTOR):
                        codes[row, (i * _CODERS + thread) * _VECTOR + v] = T.cast(
                            value[i * _VECTOR + v] * inverse, "float8_e4m3fn"
                        )

    return code_rows


@program(tensor_memory=True)
def matmul_coded_program(k: int, n: int, few: bool, *, tensor_memory: bool = False):
    """x [rows, k], w [n, k] in e4m3 -> out [rows, n] bf16. `few`: tiles for few rows."""
    rows = T.dynamic("rows")
    columns = _TENSOR_MEMORY_COLUMNS if tensor_memory else few_columns(1, n) if few else coded_columns(n)
    few = few and not tensor_memory
    stages = _FEW_STAGES if few else _NARROW_STAGES if columns == _NARROW else _STAGES
    tile_rows, threads = (64, 128) if few else (_ROWS, _THREADS)

    @T.prim_func
    def matmul_coded(
        x: T.Tensor((rows, k), "float8_e4m3fn"),
        x_scale: T.Tensor((rows,), "float32"),
        w: T.Tensor((n, k), "float8_e4m3fn"),
        w_scale: T.Tensor((n,), "float32"),
        out: T.Tensor((rows, n), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(rows, tile_rows), T.ceildiv(n, columns), threads=threads) as (bm, bn):
            x_tile = T.alloc_shared((tile_rows, _INNER), "float8_e4m3fn")
            w_tile = T.alloc_shared((columns, _INNER), "float8_e4m3fn")
            row_scale = T.alloc_shared((tile_rows,), "float32")
            column_scale = T.alloc_shared((columns,), "float32")
            out_tile = T.alloc_shared((tile_rows, columns), "bfloat16")
            total = T.alloc_fragment((tile_rows, columns), "float32")
            T.clear(total)
            sums = T.alloc_tmem((tile_rows, columns), "float32") if tensor_memory else None
            done = T.alloc_barrier(1) if tensor_memory else None
            for r in T.Parallel(tile_rows):
                row_scale[r] = x_scale[T.min(bm * tile_rows + r, rows - 1)]
            for c in T.Parallel(columns):
                column_scale[c] = w_scale[T.min(bn * columns + c, n - 1)]
            for i in T.Pipelined(T.ceildiv(k, _INNER), num_stages=stages):
                T.copy(x[bm * tile_rows : (bm + 1) * tile_rows, i * _INNER : (i + 1) * _INNER], x_tile)
                T.copy(w[bn * columns : (bn + 1) * columns, i * _INNER : (i + 1) * _INNER], w_tile)
                accumulate(x_tile, w_tile, total, sums, done, i == 0, transposed=True)
            if tensor_memory:
                read_sums(sums, total)
            for r, c in T.Parallel(tile_rows, columns):
                total[r, c] = total[r, c] * row_scale[r] * column_scale[c]
            T.copy(total, out_tile)
            T.copy(out_tile, out[bm * tile_rows : (bm + 1) * tile_rows, bn * columns : (bn + 1) * columns])

    return matmul_coded


@program
def gather_coded_program(dim: int, choices: int):
    """x [rows, dim] and x_scale [rows] -> slots [slots, dim], slot_scale [slots]; zero where a slot is empty."""
    rows, slots = T.dynamic("rows"), T.dynamic("slots")
    chunks = dim // _CHUNK

    @T.prim_func
    def gather_coded(
        x: T.Tensor((rows, dim), "uint8"),
        x_scale: T.Tensor((rows,), "float32"),
        slot_pair: T.Tensor((slots,), "int32"),
        out: T.Tensor((slots, dim), "uint8"),
        out_scale: T.Tensor((slots,), "float32"),
    ):
        with T.Kernel(T.ceildiv(slots * chunks, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            slot, first = unit // chunks, unit % chunks * _CHUNK
            if slot < slots:
                for i in T.vectorized(_CHUNK):
                    out[slot, first + i] = T.if_then_else(
                        slot_pair[slot] >= 0, x[T.max(slot_pair[slot], 0) // choices, first + i], T.uint8(0)
                    )
                if first == 0:
                    out_scale[slot] = T.if_then_else(
                        slot_pair[slot] >= 0, x_scale[T.max(slot_pair[slot], 0) // choices], 0.0
                    )

    return gather_coded


@program(tensor_memory=True)
def gated_coded_program(experts: int, k: int, width: int, routed: bool, few: bool, *, tensor_memory: bool = False):
    """x [rows, k] in tiles, w13 [experts, 2 width, k] -> act [rows, width] bf16; pairs' weights only where `routed`.
    `few`: tiles for few rows, not routed.
    """
    rows, tiles, pairs = T.dynamic("rows"), T.dynamic("tiles"), T.dynamic("pairs")
    tile_rows, columns, stages, threads = (
        (64, 32, _FEW_STAGES, 128) if few and not tensor_memory else (_TILE, _GATED_COLUMNS, _STAGES, _THREADS)
    )

    @T.prim_func
    def gated_coded(
        x: T.Tensor((rows, k), "float8_e4m3fn"),
        x_scale: T.Tensor((rows,), "float32"),
        w13: T.Tensor((experts, 2 * width, k), "float8_e4m3fn"),
        w_scale: T.Tensor((experts, 2 * width), "float32"),
        slot_pair: T.Tensor((rows,), "int32"),
        tile_expert: T.Tensor((tiles,), "int32"),
        weights: T.Tensor((pairs,), "float32"),
        act: T.Tensor((rows, width), "bfloat16"),
        limit: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows, tile_rows), T.ceildiv(width, columns), threads=threads) as (bm, bn):
            x_tile = T.alloc_shared((tile_rows, _INNER), "float8_e4m3fn")
            gate_tile = T.alloc_shared((columns, _INNER), "float8_e4m3fn")
            up_tile = T.alloc_shared((columns, _INNER), "float8_e4m3fn")
            row_scale = T.alloc_shared((tile_rows,), "float32")
            row_weight = T.alloc_shared((tile_rows,), "float32")
            gate_scale = T.alloc_shared((columns,), "float32")
            up_scale = T.alloc_shared((columns,), "float32")
            act_tile = T.alloc_shared((tile_rows, columns), "bfloat16")
            gate = T.alloc_fragment((tile_rows, columns), "float32")
            up = T.alloc_fragment((tile_rows, columns), "float32")
            expert = tile_expert[bm] if routed else 0
            T.clear(gate)
            T.clear(up)
            gate_sums = T.alloc_tmem((tile_rows, columns), "float32") if tensor_memory else None
            up_sums = T.alloc_tmem((tile_rows, columns), "float32") if tensor_memory else None
            gate_done = T.alloc_barrier(1) if tensor_memory else None
            up_done = T.alloc_barrier(1) if tensor_memory else None
            steps = T.ceildiv(k, _INNER)
            for r in T.Parallel(tile_rows):
                row_scale[r] = x_scale[T.min(bm * tile_rows + r, rows - 1)]
                if routed:
                    row_weight[r] = T.if_then_else(
                        slot_pair[bm * tile_rows + r] >= 0, weights[T.max(slot_pair[bm * tile_rows + r], 0)], 0.0
                    )
                else:
                    row_weight[r] = 1.0
            for c in T.Parallel(columns):
                gate_scale[c] = w_scale[T.max(expert, 0), T.min(bn * columns + c, width - 1)]
                up_scale[c] = w_scale[T.max(expert, 0), width + T.min(bn * columns + c, width - 1)]
            if is_streamed(expert, tensor_memory):
                for i in T.Pipelined(
                    steps if tensor_memory else T.if_then_else(expert >= 0, steps, 0), num_stages=stages
                ):
                    inner = i * _INNER
                    T.copy(x[bm * tile_rows : (bm + 1) * tile_rows, inner : inner + _INNER], x_tile)
                    T.copy(w13[expert, bn * columns : (bn + 1) * columns, inner : inner + _INNER], gate_tile)
                    T.copy(
                        w13[expert, width + bn * columns : width + (bn + 1) * columns, inner : inner + _INNER], up_tile
                    )
                    accumulate(x_tile, gate_tile, gate, gate_sums, gate_done, i == 0, transposed=True)
                    accumulate(x_tile, up_tile, up, up_sums, up_done, i == 0, transposed=True)
                if tensor_memory:
                    read_sums(gate_sums, gate)
                    read_sums(up_sums, up)
            for r, c in T.Parallel(tile_rows, columns):
                gate[r, c] = T.min(gate[r, c] * row_scale[r] * gate_scale[c], limit)
                up[r, c] = T.min(T.max(up[r, c] * row_scale[r] * up_scale[c], -limit), limit)
                gate[r, c] = gate[r, c] / (1.0 + T.exp(-gate[r, c])) * up[r, c] * row_weight[r]
            T.copy(gate, act_tile)
            T.copy(act_tile, act[bm * tile_rows : (bm + 1) * tile_rows, bn * columns : (bn + 1) * columns])

    return gated_coded


@program(tensor_memory=True)
def down_coded_program(experts: int, width: int, dim: int, *, tensor_memory: bool = False):
    """act [slots, width] in tiles, w2 [experts, dim, width] -> out [pairs, dim]; every pair stands in one slot."""
    slots, tiles, pairs = T.dynamic("slots"), T.dynamic("tiles"), T.dynamic("pairs")
    columns = _TENSOR_MEMORY_COLUMNS if tensor_memory else _DOWN_COLUMNS

    @T.prim_func
    def down_coded(
        act: T.Tensor((slots, width), "float8_e4m3fn"),
        act_scale: T.Tensor((slots,), "float32"),
        w2: T.Tensor((experts, dim, width), "float8_e4m3fn"),
        w_scale: T.Tensor((experts, dim), "float32"),
        slot_pair: T.Tensor((slots,), "int32"),
        tile_expert: T.Tensor((tiles,), "int32"),
        out: T.Tensor((pairs, dim), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(slots, _TILE), T.ceildiv(dim, columns), threads=_THREADS) as (bm, bn):
            act_tile = T.alloc_shared((_TILE, _INNER), "float8_e4m3fn")
            w_tile = T.alloc_shared((columns, _INNER), "float8_e4m3fn")
            row_scale = T.alloc_shared((_TILE,), "float32")
            column_scale = T.alloc_shared((columns,), "float32")
            pair = T.alloc_shared((_TILE,), "int32")
            out_tile = T.alloc_shared((_TILE, columns), "bfloat16")
            total = T.alloc_fragment((_TILE, columns), "float32")
            expert = tile_expert[bm]
            T.clear(total)
            sums = T.alloc_tmem((_TILE, columns), "float32") if tensor_memory else None
            done = T.alloc_barrier(1) if tensor_memory else None
            steps = T.ceildiv(width, _INNER)
            for r in T.Parallel(_TILE):
                pair[r] = slot_pair[bm * _TILE + r]
                row_scale[r] = act_scale[bm * _TILE + r]
            for c in T.Parallel(columns):
                column_scale[c] = w_scale[T.max(expert, 0), T.min(bn * columns + c, dim - 1)]
            if is_streamed(expert, tensor_memory):
                for i in T.Pipelined(
                    steps if tensor_memory else T.if_then_else(expert >= 0, steps, 0), num_stages=_STAGES
                ):
                    inner = i * _INNER
                    T.copy(act[bm * _TILE : (bm + 1) * _TILE, inner : inner + _INNER], act_tile)
                    T.copy(w2[expert, bn * columns : (bn + 1) * columns, inner : inner + _INNER], w_tile)
                    accumulate(act_tile, w_tile, total, sums, done, i == 0, transposed=True)
                if tensor_memory:
                    read_sums(sums, total)
            for r, c in T.Parallel(_TILE, columns):
                total[r, c] = total[r, c] * row_scale[r] * column_scale[c]
            T.copy(total, out_tile)
            for r, c in T.Parallel(_TILE, columns):
                if pair[r] >= 0 and bn * columns + c < dim:
                    out[pair[r], bn * columns + c] = out_tile[r, c]

    return down_coded


def _code_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K] bf16 -> e4m3 codes [R, K], scale [R]."""
    rows, dim = x.shape
    if x.dtype != torch.bfloat16 or dim % _CHUNK:
        raise KernelError(f"products in e4m3 take bfloat16 rows of a multiple of {_CHUNK}, not {x.dtype} of {dim}")
    codes = torch.empty(rows, dim, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        code_rows_program(dim)(aligned(x), codes, scale)
    return codes, scale


def linear_coded(x: Tensor, weight: CodedWeight) -> Tensor:
    """x [R, K] bf16, weight [K, N] -> [R, N]; see contract `linear`."""
    out = torch.empty(x.shape[0], weight.codes.shape[0], dtype=x.dtype, device=x.device)
    if out.numel():
        codes, scale = _code_rows(x)
        launch = matmul_coded_program(x.shape[1], weight.codes.shape[0], len(x) <= FEW_ROWS)
        launch(codes, scale, weight.codes, weight.scale, out)
    return out


def run_experts_coded(
    x: Tensor, weights: Tensor, slot_pair: Tensor, tile_expert: Tensor, w13: CodedWeight, w2: CodedWeight, limit: float
) -> Tensor:
    """x [R, D], weights [R, k], w13 [E, D, 2 I], w2 [E, I, D] -> [R, k, D]; see contract `run_experts`."""
    (rows, choices), dim, slots = weights.shape, x.shape[1], len(slot_pair)
    experts, width = w2.codes.shape[0], w2.codes.shape[2]
    out = torch.empty(rows * choices, dim, dtype=x.dtype, device=x.device)
    if out.numel():
        row_codes, row_scale = _code_rows(x)
        codes = torch.empty(slots, dim, dtype=torch.uint8, device=x.device)
        scale = torch.empty(slots, dtype=torch.float32, device=x.device)
        gather_coded_program(dim, choices)(row_codes.view(torch.uint8), row_scale, slot_pair, codes, scale)
        act = torch.empty(slots, width, dtype=x.dtype, device=x.device)
        launch = gated_coded_program(experts, dim, width, True, False)
        slot_codes, pair_weights = codes.view(torch.float8_e4m3fn), weights.float().flatten()
        launch(slot_codes, scale, w13.codes, w13.scale, slot_pair, tile_expert, pair_weights, act, limit)
        act_codes, act_scale = _code_rows(act)
        launch = down_coded_program(experts, width, dim)
        launch(act_codes, act_scale, w2.codes, w2.scale, slot_pair, tile_expert, out)
    return out.view(rows, choices, dim)


def shared_expert_coded(x: Tensor, w13: CodedWeight, w2: CodedWeight, limit: float) -> Tensor:
    """x [R, D], w13 [D, 2 I], w2 [I, D] -> [R, D]; see contract `shared_expert`."""
    rows, width = x.shape[0], w2.codes.shape[1]
    act = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        codes, scale = _code_rows(x)
        nothing = torch.empty(rows, dtype=torch.int32, device=x.device)  # not read: the rows are not routed
        launch = gated_coded_program(1, x.shape[1], width, False, rows <= FEW_ROWS)
        launch(
            codes, scale, w13.codes[None], w13.scale[None], nothing, nothing, nothing.view(torch.float32), act, limit
        )
    return linear_coded(aligned(act), w2)
