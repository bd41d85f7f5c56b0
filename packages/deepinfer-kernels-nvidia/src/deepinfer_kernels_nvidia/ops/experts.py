# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Expert MLPs: y = (silu(min(x w1, limit)) * clamp(x w3, -limit, limit) * weight) w2 (docs/model.md: Experts).

    pairs (row, choice) sorted by expert fill tiles of 128 slots, one expert a tile; an expert's last tile is padded

    x --gather_tiles--> slots [tiles * 128, D] --gated--> act [tiles * 128, I] --down--> out [pair, D]

The number of tiles is bounded by shapes alone, so the host never waits for a count; tiles without an expert return at
once. Both products stream through shared memory as in `linear`, on SM100 into tensor memory: the gate and the up half
of w13 share the x tile, and a pair's bits depend on its row only. The shared expert is the same gated product with one
expert and no gather, and with narrow tiles where there are few rows (`tiling`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.reference.coded import CodedWeight, Weight
from deepinfer_core.kernels.reference.packed import ArrangedWeight
from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program
from deepinfer_kernels_nvidia.ops.coded import run_experts_coded, shared_expert_coded
from deepinfer_kernels_nvidia.ops.expert_slots import plan_slots
from deepinfer_kernels_nvidia.ops.linear import linear
from deepinfer_kernels_nvidia.ops.packed import PairTiles, experts_packed, gated_packed
from deepinfer_kernels_nvidia.ops.tensor_memory import accumulate, is_streamed, read_sums
from deepinfer_kernels_nvidia.ops.tiling import FEW_ROWS

__all__ = ["ExpertTiles", "combine_experts", "plan_experts", "run_experts", "shared_expert"]

TILE = 128  # slots of one expert
_COLUMNS, _DOWN_COLUMNS, _INNER, _STAGES, _THREADS = 128, 256, 64, 4, 256
_CHUNK = 8  # values that one thread moves


@dataclass(frozen=True)
class ExpertTiles:
    """Which pair stands in which slot, and whose weights a tile takes."""

    slot_pair: Tensor  # [tiles * TILE] int32 number of the pair row * k + choice, -1 = empty
    tile_expert: Tensor  # [tiles] int32 local expert, -1 = unused tile


@program
def gather_tiles_program(dim: int, choices: int):
    """x [rows, dim] -> slots [slots, dim], zero where a slot is empty."""
    rows, slots = T.dynamic("rows"), T.dynamic("slots")
    chunks = dim // _CHUNK

    @T.prim_func
    def gather_tiles(
        x: T.Tensor((rows, dim), "bfloat16"),
        slot_pair: T.Tensor((slots,), "int32"),
        out: T.Tensor((slots, dim), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(slots * chunks, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            slot, first = unit // chunks, unit % chunks * _CHUNK
            if slot < slots:
                for i in T.vectorized(_CHUNK):
                    out[slot, first + i] = T.if_then_else(
                        slot_pair[slot] >= 0, x[T.max(slot_pair[slot], 0) // choices, first + i], T.bfloat16(0)
                    )

    return gather_tiles


def _gated_tile(few: bool) -> tuple[int, int, int, int, int]:
    """Rows, columns of each half and depth of a tile, how many are in flight, threads that multiply."""
    return (64, 32, 128, 5, 128) if few else (TILE, _COLUMNS, _INNER, _STAGES, _THREADS)


@program(tensor_memory=True)
def gated_program(experts: int, k: int, width: int, routed: bool, few: bool, *, tensor_memory: bool = False):
    """x [rows, k] in tiles, w13 [experts, k, 2 width] -> act [rows, width]; weights of pairs only where `routed`, and
    only then more than one expert. `few`: tiles for few rows, not routed.
    """
    rows, tiles, pairs = T.dynamic("rows"), T.dynamic("tiles"), T.dynamic("pairs")
    tile_rows, columns, depth, stages, threads = _gated_tile(few and not tensor_memory)

    @T.prim_func
    def gated(
        x: T.Tensor((rows, k), "bfloat16"),
        w13: T.Tensor((experts, k, 2 * width), "bfloat16"),
        slot_pair: T.Tensor((rows,), "int32"),
        tile_expert: T.Tensor((tiles,), "int32"),
        weights: T.Tensor((pairs,), "float32"),
        act: T.Tensor((rows, width), "bfloat16"),
        limit: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows, tile_rows), T.ceildiv(width, columns), threads=threads) as (bm, bn):
            x_tile = T.alloc_shared((tile_rows, depth), "bfloat16")
            gate_tile = T.alloc_shared((depth, columns), "bfloat16")
            up_tile = T.alloc_shared((depth, columns), "bfloat16")
            act_tile = T.alloc_shared((tile_rows, columns), "bfloat16")
            row_weight = T.alloc_shared((tile_rows,), "float32")
            gate = T.alloc_fragment((tile_rows, columns), "float32")
            up = T.alloc_fragment((tile_rows, columns), "float32")
            expert = tile_expert[bm] if routed else 0
            T.clear(gate)
            T.clear(up)
            gate_sums = T.alloc_tmem((tile_rows, columns), "float32") if tensor_memory else None
            up_sums = T.alloc_tmem((tile_rows, columns), "float32") if tensor_memory else None
            gate_done = T.alloc_barrier(1) if tensor_memory else None
            up_done = T.alloc_barrier(1) if tensor_memory else None
            steps = T.ceildiv(k, depth)
            for r in T.Parallel(tile_rows):
                if routed:
                    pair = slot_pair[bm * tile_rows + r]
                    row_weight[r] = T.if_then_else(pair >= 0, weights[T.max(pair, 0)], 0.0)
                else:
                    row_weight[r] = 1.0
            if is_streamed(expert, tensor_memory):
                for i in T.Pipelined(
                    steps if tensor_memory else T.if_then_else(expert >= 0, steps, 0), num_stages=stages
                ):
                    inner = i * depth
                    T.copy(x[bm * tile_rows : (bm + 1) * tile_rows, inner : inner + depth], x_tile)
                    T.copy(w13[expert, inner : inner + depth, bn * columns : (bn + 1) * columns], gate_tile)
                    T.copy(
                        w13[expert, inner : inner + depth, width + bn * columns : width + (bn + 1) * columns], up_tile
                    )
                    accumulate(x_tile, gate_tile, gate, gate_sums, gate_done, i == 0)
                    accumulate(x_tile, up_tile, up, up_sums, up_done, i == 0)
                if tensor_memory:
                    read_sums(gate_sums, gate)
                    read_sums(up_sums, up)
            for r, c in T.Parallel(tile_rows, columns):
                gate[r, c] = T.min(gate[r, c], limit)
                up[r, c] = T.min(T.max(up[r, c], -limit), limit)
                gate[r, c] = gate[r, c] / (1.0 + T.exp(-gate[r, c])) * up[r, c] * row_weight[r]
            T.copy(gate, act_tile)
            T.copy(act_tile, act[bm * tile_rows : (bm + 1) * tile_rows, bn * columns : (bn + 1) * columns])

    return gated


@program(tensor_memory=True)
def down_program(experts: int, width: int, dim: int, *, tensor_memory: bool = False):
    """act [slots, width] in tiles, w2 [experts, width, dim] -> out [pairs, dim]; every pair stands in one slot."""
    slots, tiles, pairs = T.dynamic("slots"), T.dynamic("tiles"), T.dynamic("pairs")
    columns = _COLUMNS if tensor_memory else _DOWN_COLUMNS

    @T.prim_func
    def down(
        act: T.Tensor((slots, width), "bfloat16"),
        w2: T.Tensor((experts, width, dim), "bfloat16"),
        slot_pair: T.Tensor((slots,), "int32"),
        tile_expert: T.Tensor((tiles,), "int32"),
        out: T.Tensor((pairs, dim), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(slots, TILE), T.ceildiv(dim, columns), threads=_THREADS) as (bm, bn):
            act_tile = T.alloc_shared((TILE, _INNER), "bfloat16")
            w_tile = T.alloc_shared((_INNER, columns), "bfloat16")
            out_tile = T.alloc_shared((TILE, columns), "bfloat16")  # rows leave it whole: 16 bytes a thread
            pair = T.alloc_shared((TILE,), "int32")
            total = T.alloc_fragment((TILE, columns), "float32")
            expert = tile_expert[bm]
            T.clear(total)
            sums = T.alloc_tmem((TILE, columns), "float32") if tensor_memory else None
            done = T.alloc_barrier(1) if tensor_memory else None
            steps = T.ceildiv(width, _INNER)
            for r in T.Parallel(TILE):
                pair[r] = slot_pair[bm * TILE + r]
            if is_streamed(expert, tensor_memory):
                for i in T.Pipelined(
                    steps if tensor_memory else T.if_then_else(expert >= 0, steps, 0), num_stages=_STAGES
                ):
                    T.copy(act[bm * TILE : (bm + 1) * TILE, i * _INNER : (i + 1) * _INNER], act_tile)
                    T.copy(w2[expert, i * _INNER : (i + 1) * _INNER, bn * columns : (bn + 1) * columns], w_tile)
                    accumulate(act_tile, w_tile, total, sums, done, i == 0)
                if tensor_memory:
                    read_sums(sums, total)
            T.copy(total, out_tile)
            for r, c in T.Parallel(TILE, columns):
                if pair[r] >= 0 and bn * columns + c < dim:
                    out[pair[r], bn * columns + c] = out_tile[r, c]

    return down


@program
def combine_experts_program(choices: int, dim: int, dtype: str):
    """pairs [rows, choices, dim] in order, then shared [rows, dim]; sums only, so bits equal the reference's."""
    rows = T.dynamic("rows")
    chunk = next(size for size in (8, 4, 2, 1) if dim % size == 0)
    chunks = dim // chunk

    @T.prim_func
    def combine_experts(
        pairs: T.Tensor((rows, choices, dim), dtype),
        shared: T.Tensor((rows, dim), dtype),
        out: T.Tensor((rows, dim), dtype),
    ):
        with T.Kernel(T.ceildiv(rows * chunks, _THREADS), threads=_THREADS) as block:
            unit = block * _THREADS + T.get_thread_binding()
            row, first = unit // chunks, unit % chunks * chunk
            value = T.alloc_local((choices + 1, chunk), "float32")
            if row < rows:
                for choice in T.unroll(choices):
                    for i in T.vectorized(chunk):
                        value[choice, i] = pairs[row, choice, first + i]
                for i in T.vectorized(chunk):
                    value[choices, i] = shared[row, first + i]
                for choice in T.unroll(choices):
                    for i in T.unroll(chunk):
                        value[0, i] += value[choice + 1, i]
                for i in T.vectorized(chunk):
                    out[row, first + i] = value[0, i]

    return combine_experts


def plan_experts(ids: Tensor, num_experts: int) -> ExpertTiles:
    """ids [R, k] local expert ids -> tiles, without a host synchronisation; see contract `plan_experts`."""
    return ExpertTiles(*plan_slots(ids.flatten(), num_experts, TILE))


def run_experts(x: Tensor, weights: Tensor, tiles: ExpertTiles, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """x [R, D], weights [R, k], w13 [E, D, 2 I], w2 [E, I, D], all but weights bf16, or w13 and w2 coded or arranged ->
    [R, k, D]; see contract `run_experts`. Raises KernelError for other dtypes.
    """
    if isinstance(w13, CodedWeight) and isinstance(w2, CodedWeight):
        return run_experts_coded(x, weights, tiles.slot_pair, tiles.tile_expert, w13, w2, limit)
    (rows, choices), dim = weights.shape, x.shape[1]
    experts, width = w2.shape[0], w2.shape[1]
    out = torch.empty(rows * choices, dim, dtype=x.dtype, device=x.device)
    if out.numel():
        slots = torch.empty(len(tiles.slot_pair), dim, dtype=x.dtype, device=x.device)
        gather_tiles_program(dim, choices)(aligned(x), tiles.slot_pair, slots)
        scale = weights.float().flatten()
        if isinstance(w13, ArrangedWeight) and isinstance(w2, ArrangedWeight):
            pairs = PairTiles(tiles.slot_pair, tiles.tile_expert, scale)
            experts_packed(slots, pairs, w13, w2, out, rows, limit)
            return out.view(rows, choices, dim)
        w13, w2 = _plain(x, w13, w2)
        act = torch.empty(len(tiles.slot_pair), width, dtype=x.dtype, device=x.device)
        launch = gated_program(experts, dim, width, True, False)
        launch(slots, aligned(w13), tiles.slot_pair, tiles.tile_expert, scale, act, limit)
        down_program(experts, width, dim)(act, aligned(w2), tiles.slot_pair, tiles.tile_expert, out)
    return out.view(rows, choices, dim)


def shared_expert(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """x [R, D], w13 [D, 2 I], w2 [I, D], all bf16, or w13 and w2 coded or arranged -> [R, D]; see contract
    `shared_expert`. Raises KernelError.
    """
    if isinstance(w13, CodedWeight) and isinstance(w2, CodedWeight):
        return shared_expert_coded(x, w13, w2, limit)
    if isinstance(w13, ArrangedWeight):
        return linear(gated_packed(x, w13, limit), w2)
    w13, w2 = _plain(x, w13, w2)
    rows, width = x.shape[0], w2.shape[0]
    act = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        nothing = torch.empty(rows, dtype=torch.int32, device=x.device)  # not read: the rows are not routed
        launch = gated_program(1, x.shape[1], width, False, rows <= FEW_ROWS)
        launch(aligned(x), aligned(w13)[None], nothing, nothing, nothing.view(torch.float32), act, limit)
    return linear(act, w2)


def combine_experts(pairs: Tensor, shared: Tensor) -> Tensor:
    """pairs [R, k, D] in ascending expert id, shared [R, D] -> [R, D]; see contract `combine_experts`."""
    choices, dim = pairs.shape[1:]
    out = torch.empty_like(shared)
    if out.numel():
        if pairs.dtype != shared.dtype:
            raise KernelError(f"expert outputs are {pairs.dtype} and {shared.dtype}; both need one dtype")
        combine_experts_program(choices, dim, dtype_name(shared))(aligned(pairs), aligned(shared), out)
    return out


def _plain(x: Tensor, w13: Weight, w2: Weight) -> tuple[Tensor, Tensor]:
    """The weights, which must be in bfloat16 as x is."""
    if not isinstance(w13, Tensor) or not isinstance(w2, Tensor):
        raise KernelError(f"an expert's weights are {type(w13).__name__} and {type(w2).__name__}; both need one form")
    if x.dtype != torch.bfloat16 or w13.dtype != torch.bfloat16:
        raise KernelError(f"the expert kernels take bfloat16, not {x.dtype} by {w13.dtype}")
    return w13, w2
