# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Products with packed weights: out^T = w^T x^T, whose tiles of w are decoded into the registers of the tensor core.

    weights   tiles of e2m1 or e4m3 (packed_tiles) ─bulk copy─► shared memory ─decode─► A operand, bf16 in registers
    rows      x [16, 64 or 128, 64] bf16           ─bulk copy─► shared memory ─────────► B operand
    sums      float32 in registers: 64 columns of the product by the rows of a tile for each warp group

A block of threads has four warp groups, each with 64 columns for up to 128 rows, so a weight is decoded once for all
rows of the block, and while one group decodes, the others multiply. Where there are few rows a block is one group and
64 rows: decoding sets the time, and small blocks spread it over the chip. How many rows a block has in use, up to 16,
64 or 128, decides how wide its products are; all walk K in the order of `linear` and `experts`, with instructions of
the same depth, so the bits are those of bf16 weights, whatever else is in the batch.

The first warp asks for a stage when all groups have left it. `gated`: gate and up columns stand octet by octet in a
tile, so a thread has both sums of a column and makes silu(gate) up of them itself. On SM100 the products are mma
(compiled and read, never run).
"""

from dataclasses import dataclass

import tilelang
import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.reference.packed import ArrangedWeight
from deepinfer_kernels_nvidia.jit import T, aligned, program
from deepinfer_kernels_nvidia.ops.packed_tiles import (
    TILE,
    code_words,
    power_of_scales,
    registers_of_word,
    scaled,
    tile_counts,
    tile_words,
)
from deepinfer_kernels_nvidia.ops.tiling import FEW_ROWS

__all__ = ["PairTiles", "experts_packed", "gated_packed", "linear_packed"]

SLOTS = 128  # of one expert
_GROUP, _WARP = 128, 32  # threads
_STAGES = 4  # of rows and weights under way
_PAD = 8  # columns of padding: eight rows by eight columns of a warp then stand in 32 banks
_SWIZZLE_128, _ATOM = 1, 64  # of a wgmma descriptor: the kind, and 8 rows of 128 bytes in units of 16


@dataclass(frozen=True)
class PairTiles:
    """Pairs in tiles of 128 slots, one expert a tile (`expert_slots`)."""

    slot_pair: Tensor  # [tiles * 128] int32 number of the pair, -1 = empty
    tile_expert: Tensor  # [tiles] int32 expert, -1 = unused tile
    weights: Tensor  # [pairs] float32


@program(
    tensor_memory=True,
    tl__disable_thread_storage_sync=True,  # barriers are placed by hand
    tl__disable_buffer_init_check=True,
    tl__disable_safe_memory_legalize=True,  # and so are bounds
)
def multiply_packed_program(
    experts: int, k: int, n: int, bits: int, gated: bool, routed: bool, few: bool, *, tensor_memory: bool = False
):
    """x [rows, k] bf16, w [experts, n' / 64, k' / 64, words] -> out [out_rows, n], or [.., n / 2] where `gated`.
    `routed`: 128 rows have an expert; gated rows are weighted, others leave for their pair's row. `few`: small blocks.
    """
    rows, tiles, pairs, out_rows = T.dynamic("rows"), T.dynamic("tiles"), T.dynamic("pairs"), T.dynamic("out_rows")
    groups, block_rows, lag = (1, 64, 1) if few else (4, 128, 2)  # lag: steps from a product to the refill of its stage
    threads, stages = groups * _GROUP, _STAGES
    column_tiles, steps = tile_counts(k, n)
    words, own = tile_words(bits), code_words(bits) // _GROUP
    tile_width = TILE // 2 if gated else TILE
    width, columns = (n // 2 if gated else n), groups * tile_width
    has_wgmma = not tensor_memory

    @T.macro
    def fetch(x, w, bm, bn, expert, step, used, x_tile, w_tile, full, thread):
        """A step's rows and weights, by the first warp."""
        if thread < _WARP:
            stage = step % stages
            T.tma_copy(
                x[bm * block_rows : bm * block_rows + used, step * TILE : (step + 1) * TILE],
                x_tile[stage, 0:used, :],
                barrier=full[stage],
                leader_scope_threads=_WARP,
            )
            if thread == 0:
                T.mbarrier_arrive_expect_tx(full[stage], groups * words * 4)
                for g in T.unroll(groups):
                    T.call_extern(
                        "handle",
                        "tl::tma_load",
                        T.access_ptr(w_tile[stage, g, 0], "r"),  # "w" would fence every product from it
                        T.access_ptr(w[expert, bn * groups + g, step, 0], "r"),
                        full[stage],
                        words * 4,
                    )

    @T.macro
    def decode(w_tile, stage, group, member, word, power, a):
        """The thread's part of the group's tile: a[4 step of 16 + 2 half + side], two bf16 each."""
        for q in T.unroll(own // 4):
            for v in T.vectorized(4):
                word[4 * q + v] = w_tile[stage, group, (q * _GROUP + member) * 4 + v]
        scales = w_tile[stage, group, code_words(bits) + member // 4]
        for i in T.unroll(4):
            power[i] = power_of_scales(scales, i)
        for v in T.unroll(own):
            if bits == 4:
                first, second, third, fourth = registers_of_word(bits, word[v])
                a[4 * v] = scaled(first, power[v // 2 * 2])
                a[4 * v + 1] = scaled(second, power[v // 2 * 2 + 1])
                a[4 * v + 2] = scaled(third, power[v // 2 * 2])
                a[4 * v + 3] = scaled(fourth, power[v // 2 * 2 + 1])
            else:
                first, second = registers_of_word(bits, word[v])
                a[2 * v] = scaled(first, power[v // 4 * 2])
                a[2 * v + 1] = scaled(second, power[v // 4 * 2 + 1])

    @T.macro
    def add_products(a, x_tile, descriptor, stage, used, member, pair, sums):
        """sums[4 n + 2 side + c] += the tile x rows 8 n + 2 lane + c."""
        if has_wgmma:
            T.warpgroup_fence_operand(a, num_regs=16)
            T.warpgroup_fence_operand(sums, num_regs=used // 2)
            T.warpgroup_arrive()
            for s in T.unroll(4):
                operands = ("bf16", "bf16", "fp32", a.data, 4 * s, descriptor.data)
                start = stage * (block_rows * TILE * 2 // 16) + 2 * s
                T.ptx_wgmma_rs("float32", f"m64n{used}k16", True, *operands, start, sums.data, 0, 1, 1, 1)
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(sums, num_regs=used // 2)
        else:
            for n8 in T.unroll(used // 8):
                for s in T.unroll(4):
                    for h in T.unroll(2):
                        for v in T.vectorized(2):
                            row, inner = 8 * n8 + member % _WARP // 4, 16 * s + 8 * h + 2 * (member % 4)
                            pair[2 * h + v] = x_tile[stage, row, inner + v]
                    word = T.view(pair, (2,), "uint32")
                    operands = ("bf16", "bf16", "fp32", a.data, 4 * s, word.data, 0, sums.data, 4 * n8)
                    T.ptx_mma("float32", "m16n8k16", "row", "col", *operands, T.bool(False))

    @T.macro
    def finish(sums, out_tile, row_weight, limit, used, group, member):
        """Sums to the block's tile of the result, row by row."""
        lane, octet, warp = member % 4, member % _WARP // 4, member // _WARP
        for n8 in T.unroll(used // 8):
            for c in T.unroll(2):
                row = 8 * n8 + 2 * lane + c
                if gated:
                    gate = T.min(sums[4 * n8 + c], limit)
                    up = T.min(T.max(sums[4 * n8 + 2 + c], -limit), limit)
                    act = gate / (1.0 + T.exp(-gate)) * up * row_weight[row]
                    out_tile[row, group * tile_width + warp * 8 + octet] = T.cast(act, "bfloat16")
                else:
                    for side in T.unroll(2):
                        column = group * tile_width + warp * 16 + side * 8 + octet
                        out_tile[row, column] = T.cast(sums[4 * n8 + 2 * side + c], "bfloat16")

    @T.macro
    def stream(x, w, bm, bn, expert, used, x_tile, w_tile, out_tile, row_weight, full, empty, limit, thread):
        """All of K for the tile's `used` rows."""
        sums = T.alloc_local((used // 2,), "float32")
        a = T.alloc_local((16,), "uint32")
        word = T.alloc_local((own,), "uint32")
        power = T.alloc_local((4,), "uint32")
        pair = T.alloc_local((4,), "bfloat16")
        descriptor = T.alloc_wgmma_desc()
        group, member = thread // _GROUP, thread % _GROUP
        for i in T.unroll(used // 2):
            sums[i] = T.float32(0)
        if has_wgmma:
            start = T.access_ptr(x_tile[0, 0, 0], "r")
            T.initialize_wgmma_descriptor(descriptor, start, _SWIZZLE_128, 1, _ATOM)
        for step in T.serial(min(stages, steps)):
            fetch(x, w, bm, bn, expert, step, used, x_tile, w_tile, full, thread)
        for step in T.serial(steps):
            stage = step % stages
            T.mbarrier_wait_parity(full[stage], step // stages % 2)
            decode(w_tile, stage, group, member, word, power, a)
            add_products(a, x_tile, descriptor, stage, used, member, pair, sums)
            T.mbarrier_arrive(empty[stage])
            if step >= lag and step - lag + stages < steps:
                if thread < _WARP:
                    T.mbarrier_wait_parity(empty[(step - lag) % stages], (step - lag) // stages % 2)
                fetch(x, w, bm, bn, expert, step - lag + stages, used, x_tile, w_tile, full, thread)
        finish(sums, out_tile, row_weight, limit, used, group, member)
        T.sync_threads()

    @T.macro
    def write(out, out_tile, pair, bm, bn, used, thread):
        """Rows of the block's tile, 16 bytes a thread."""
        chunks = columns // 8
        for i in T.serial(T.ceildiv(used * chunks, threads)):
            row, column = (i * threads + thread) // chunks, (i * threads + thread) % chunks * 8
            to = pair[row] if routed and not gated else bm * block_rows + row
            if to >= 0 and to < out_rows and bn * columns + column < width:
                for v in T.vectorized(8):
                    out[to, bn * columns + column + v] = out_tile[row, column + v]

    @T.prim_func
    def multiply_packed(
        x: T.Tensor((rows, k), "bfloat16"),
        w: T.Tensor((experts, column_tiles, steps, words), "uint32"),
        slot_pair: T.Tensor((rows,), "int32"),
        tile_expert: T.Tensor((tiles,), "int32"),
        weights: T.Tensor((pairs,), "float32"),
        out: T.Tensor((out_rows, width), "bfloat16"),
        limit: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows, block_rows), T.ceildiv(width, columns), threads=threads) as (bm, bn):
            x_tile = T.alloc_shared((stages, block_rows, TILE), "bfloat16")
            w_tile = T.alloc_shared((stages, groups, words), "uint32")
            out_tile = T.alloc_shared((block_rows, columns + _PAD), "bfloat16")
            row_weight = T.alloc_shared((block_rows,), "float32")
            pair = T.alloc_shared((block_rows,), "int32")
            full = T.alloc_barrier([1] * stages)
            empty = T.alloc_barrier([threads] * stages)
            used = T.alloc_var("int32")
            T.annotate_layout({x_tile: tilelang.layout.make_swizzled_layout(x_tile)})
            thread = T.get_thread_binding()
            expert = tile_expert[bm * block_rows // SLOTS] if routed else 0
            used = T.min(rows - bm * block_rows, block_rows)
            if routed:  # an expert's slots are filled from the first on
                for end in (64, 16, 0):
                    if end < block_rows:
                        used = T.if_then_else(slot_pair[bm * block_rows + end] < 0, end, used)
            if expert >= 0 and used > 0:
                if routed and thread < block_rows:
                    number = slot_pair[bm * block_rows + thread]
                    pair[thread] = number
                    row_weight[thread] = T.if_then_else(number >= 0, weights[T.max(number, 0)], 0.0)
                elif thread < block_rows:
                    row_weight[thread] = 1.0
                T.sync_threads()
                arguments = (x_tile, w_tile, out_tile, row_weight, full, empty, limit, thread)
                if used <= 16:
                    stream(x, w, bm, bn, expert, 16, *arguments)
                elif used <= 64:
                    stream(x, w, bm, bn, expert, 64, *arguments)
                elif not few:
                    stream(x, w, bm, bn, expert, 128, *arguments)
                write(out, out_tile, pair, bm, bn, used, thread)

    return multiply_packed


def linear_packed(x: Tensor, weight: ArrangedWeight) -> Tensor:
    """x [R, K] @ weight [K, N] -> [R, N]; see contract `linear`."""
    out = torch.empty(len(x), weight.shape[1], dtype=x.dtype, device=x.device)
    _multiply(x, weight, None, out, len(x))
    return out


def gated_packed(x: Tensor, w13: ArrangedWeight, limit: float) -> Tensor:
    """x [R, K], w13 [K, 2 I] -> silu(gate) up [R, I]; see contract `shared_expert`."""
    act = torch.empty(len(x), w13.shape[1] // 2, dtype=x.dtype, device=x.device)
    _multiply(x, w13, None, act, len(x), limit)
    return act


def experts_packed(
    slots: Tensor,
    tiles: PairTiles,
    w13: ArrangedWeight,
    w2: ArrangedWeight,
    out: Tensor,
    num_rows: int,
    limit: float,
) -> None:
    """slots [tiles * 128, D] rows of pairs, w13 [E, D, 2 I], w2 [E, I, D] -> out [pairs, D]; see contract
    `run_experts`. `num_rows`: of which the pairs are.
    """
    act = torch.empty(len(slots), w2.shape[1], dtype=slots.dtype, device=slots.device)
    _multiply(slots, w13, tiles, act, num_rows, limit)
    _multiply(act, w2, tiles, out, num_rows)


def _multiply(
    x: Tensor, weight: ArrangedWeight, tiles: PairTiles | None, out: Tensor, num_rows: int, limit: float | None = None
) -> None:
    """`num_rows` of the batch decide the shape of blocks; `limit`: of a gated product."""
    if x.dtype != torch.bfloat16 or x.shape[1] != weight.shape[-2]:
        raise KernelError(f"this product takes bfloat16 of width {weight.shape[-2]}, not {x.dtype} of {x.shape[1]}")
    if not out.numel():
        return
    w = weight.tiles.view(torch.uint32).view(-1, *weight.tiles.shape[-3:])
    shape = (len(w), *weight.shape[-2:], weight.form.value_bits, limit is not None, tiles is not None)
    launch = multiply_packed_program(*shape, num_rows <= FEW_ROWS)
    if tiles is None:  # not read: the rows are not routed
        nothing = torch.empty(len(x), dtype=torch.int32, device=x.device)
        tiles = PairTiles(nothing, nothing, nothing.view(torch.float32))
    launch(aligned(x), w, tiles.slot_pair, tiles.tile_expert, tiles.weights, out, limit or 0.0)
