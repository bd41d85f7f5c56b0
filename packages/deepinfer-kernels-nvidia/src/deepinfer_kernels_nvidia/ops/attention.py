# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Sparse attention with a sink over packed window records and selected entries; keys are values.

    l_k = q . k / sqrt(D);   o = sum_k exp(l_k) k / (sum_k exp(l_k) + exp(sink))

One block a query row and 64 of its heads (rows beyond the model's heads are zero). It walks the row's key list in tiles
of 64, window first, and never leaves a tile half done, so the order of additions depends on the row alone:

    warp group 2       packed records --decode--> K [64 keys, D] bf16 in one of two buffers (attention_keys.py)
    warp groups 0, 1   S = Q K^T [64 heads, 64 keys] (wgmma); online softmax in float32, base 2;
                       O[:, its half of D] += P K[:, its half of D]  (wgmma, P and O in registers)

Both consumers compute the whole of S: they then share nothing but the keys, and the softmax of one runs under the
products of the other. Tiles after the last visible key are skipped: they would add exact zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program
from deepinfer_kernels_nvidia.ops.attention_keys import BUFFERS, SLOTS, THREADS, TILE, key_producer

__all__ = ["TILE", "KeyLists", "attend", "plan_keys"]

_HEADS = 64  # query heads of a block: the rows of one wgmma
_LOG2_E = 1.4426950408889634
_FAR_BELOW = -1e30  # a finite start of the running maximum: exp2 of a difference with it is 0 or 1, never NaN
# Registers of a thread: together what 3 * 128 threads get at the launch, 168 each.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 208, 88


@dataclass(frozen=True)
class KeyLists:
    """Cache rows of each query row in whole tiles, and how many tiles reach its last visible key."""

    rows: Tensor  # [R, tiles, TILE] int32, -1 = invisible
    num_tiles: Tensor  # [R] int32


@program
def plan_keys_program():
    """rows [rows, width] int64 -> tiles of int32; one block a row."""
    rows, width, tiles = T.dynamic("rows"), T.dynamic("width"), T.dynamic("tiles")

    @T.prim_func
    def plan_keys(
        wanted: T.Tensor((rows, width), "int64"),
        out: T.Tensor((rows, tiles, TILE), "int32"),
        num_tiles: T.Tensor((rows,), "int32"),
    ):
        with T.Kernel(rows, threads=TILE) as row:
            used = T.alloc_fragment((TILE,), "int32")
            most = T.alloc_fragment((1,), "int32")
            T.fill(used, 0)
            for t in T.serial(tiles):
                for j in T.Parallel(TILE):
                    out[row, t, j] = -1
                    if t * TILE + j < width:
                        out[row, t, j] = T.cast(T.max(wanted[row, t * TILE + j], T.int64(-1)), "int32")
                        used[j] = T.if_then_else(wanted[row, t * TILE + j] >= 0, t + 1, used[j])
            T.reduce_max(used, most, dim=0)
            for j in T.Parallel(TILE):
                if j == 0:
                    num_tiles[row] = most[0]

    return plan_keys


@program(
    tl__disable_thread_storage_sync=True,  # groups meet at the barriers below
    tl__disable_buffer_init_check=True,
    tl__disable_safe_memory_legalize=True,  # a key's row is one of its cache, or -1
    tl__enable_fast_math=True,  # exp2 of the hardware
)
def attend_program(heads: int, dim: int, has_entries: bool, sink_dtype: str):
    """q [rows, heads, dim] bf16 and packed caches; `.._pairs` parameters are views of the same bytes."""
    rows, window_rows, entry_rows = T.dynamic("rows"), T.dynamic("window_rows"), T.dynamic("entry_rows")
    window_tiles, entry_tiles = T.dynamic("window_tiles"), T.dynamic("entry_tiles")
    window_bytes, entry_bytes = dim + dim // 32, dim // 2 + dim // 16
    to_log2 = dim**-0.5 * _LOG2_E
    by_heads = T.GemmWarpPolicy.FullRow
    half = dim // 2
    produce = key_producer(dim, has_entries)

    @T.macro
    def weigh(score, probability, old_peak, peak, decay, tile_sum, denominator):
        """Logits, hidden ones at -inf -> weights, and what the sums so far must be scaled by."""
        T.copy(peak, old_peak)
        T.reduce_max(score, peak, dim=1, clear=False)
        for h in T.Parallel(_HEADS):
            decay[h] = T.exp2(old_peak[h] - peak[h])
        for h, j in T.Parallel(_HEADS, TILE):
            score[h, j] = T.exp2(score[h, j] - peak[h])
        T.reduce_sum(score, tile_sum, dim=1)
        for h in T.Parallel(_HEADS):
            denominator[h] = denominator[h] * decay[h] + tile_sum[h]
        T.copy(score, probability)

    @T.macro
    def consume(q, sink, out, row, part, side, tiles, queries, keys, bias, full, empty):
        """Columns side * half .. of the output."""
        score = T.alloc_fragment((_HEADS, TILE), "float32")
        probability = T.alloc_fragment((_HEADS, TILE), "bfloat16")
        total = T.alloc_fragment((_HEADS, half), "float32")
        peak = T.alloc_fragment((_HEADS,), "float32")
        old_peak = T.alloc_fragment((_HEADS,), "float32")
        decay = T.alloc_fragment((_HEADS,), "float32")
        tile_sum = T.alloc_fragment((_HEADS,), "float32")
        denominator = T.alloc_fragment((_HEADS,), "float32")
        for h, d in T.Parallel(_HEADS, half):
            head = part * _HEADS + h
            queries[side, h, d] = T.if_then_else(head < heads, q[row, head, side * half + d], T.bfloat16(0))
        T.fence_proxy_async()
        T.sync_threads(1, 2 * THREADS)
        T.fill(total, 0)
        T.fill(denominator, 0)
        T.fill(peak, _FAR_BELOW)
        for t in T.serial(tiles):
            tile = t % BUFFERS
            T.mbarrier_wait_parity(full[tile], t // BUFFERS % 2)
            # wg_wait -1: the second half of the product follows without a wait for the first.
            T.gemm(
                queries[0, :, :],
                keys[tile, 0, :, :],
                score,
                transpose_B=True,
                policy=by_heads,
                clear_accum=True,
                annotations={"wg_wait": -1},
            )
            T.gemm(queries[1, :, :], keys[tile, 1, :, :], score, transpose_B=True, policy=by_heads)
            for h, j in T.Parallel(_HEADS, TILE):
                score[h, j] = score[h, j] * to_log2 + bias[t % SLOTS, j]
            weigh(score, probability, old_peak, peak, decay, tile_sum, denominator)
            for h, d in T.Parallel(_HEADS, half):
                total[h, d] *= decay[h]
            T.gemm(probability, keys[tile, side, :, :], total, policy=by_heads)
            T.mbarrier_arrive(empty[tile])
        for h in T.Parallel(_HEADS):
            head = part * _HEADS + h
            level = T.if_then_else(head < heads, T.cast(sink[T.min(head, heads - 1)], "float32"), 0.0)
            denominator[h] = 1.0 / (denominator[h] + T.exp2(level * _LOG2_E - peak[h]))
        # Out through the place of the queries, which both groups have read, so that whole lines are written.
        T.sync_threads(1, 2 * THREADS)
        for h, d in T.Parallel(_HEADS, half):
            queries[side, h, d] = total[h, d] * denominator[h]
        T.sync_threads(4 + side, THREADS)
        for h, d in T.Parallel(_HEADS, half):
            if part * _HEADS + h < heads:
                out[row, part * _HEADS + h, side * half + d] = queries[side, h, d]

    @T.prim_func
    def attend(
        q: T.Tensor((rows, heads, dim), "bfloat16"),
        window: T.Tensor((window_rows, window_bytes), "uint8"),
        window_pairs: T.Tensor((window_rows, window_bytes // 2), "uint16"),
        window_list: T.Tensor((rows, window_tiles, TILE), "int32"),
        window_used: T.Tensor((rows,), "int32"),
        entry: T.Tensor((entry_rows, entry_bytes), "uint8"),
        entry_pairs: T.Tensor((entry_rows, entry_bytes // 2), "uint16"),
        entry_list: T.Tensor((rows, entry_tiles, TILE), "int32"),
        entry_used: T.Tensor((rows,), "int32"),
        sink: T.Tensor((heads,), sink_dtype),
        out: T.Tensor((rows, heads, dim), "bfloat16"),
    ):
        with T.Kernel(rows, T.ceildiv(heads, _HEADS), threads=3 * THREADS) as (row, part):
            queries = T.alloc_shared((2, _HEADS, half), "bfloat16")
            keys = T.alloc_shared((BUFFERS, 2, TILE, half), "bfloat16")
            bias = T.alloc_shared((SLOTS, TILE), "float32")
            key_rows = T.alloc_shared((SLOTS, TILE), "int32")
            full = T.alloc_barrier([THREADS] * BUFFERS)
            empty = T.alloc_barrier([2 * THREADS] * BUFFERS)
            thread = T.get_thread_binding()
            near = window_used[row]
            far = entry_used[row] if has_entries else 0
            if thread < THREADS:
                T.set_max_nreg(_CONSUMER_REGISTERS, 1)
                consume(q, sink, out, row, part, 0, near + far, queries, keys, bias, full, empty)
            elif thread < 2 * THREADS:
                T.set_max_nreg(_CONSUMER_REGISTERS, 1)
                consume(q, sink, out, row, part, 1, near + far, queries, keys, bias, full, empty)
            else:
                T.set_max_nreg(_PRODUCER_REGISTERS, 0)
                produce(
                    window,
                    window_pairs,
                    window_list,
                    entry,
                    entry_pairs,
                    entry_list,
                    row,
                    near,
                    far,
                    keys,
                    key_rows,
                    bias,
                    full,
                    empty,
                    thread - 2 * THREADS,
                )

    return attend


def plan_keys(rows: Tensor) -> KeyLists:
    """rows [R, K] of a cache, -1 = invisible; see contract `plan_keys`."""
    count, width = rows.shape
    lists = torch.empty(count, -(-width // TILE), TILE, dtype=torch.int32, device=rows.device)
    num_tiles = torch.zeros(count, dtype=torch.int32, device=rows.device)
    if lists.numel():
        plan_keys_program()(rows.contiguous(), lists, num_tiles)
    return KeyLists(lists, num_tiles)


def attend(
    q: Tensor,
    window_cache: Tensor,
    window: KeyLists,
    entry_cache: Tensor | None,
    entries: KeyLists | None,
    sink: Tensor,
) -> Tensor:
    """q [R, H, hd] bf16, packed caches -> [R, H, hd]; see contract `attend`. Raises KernelError for another dtype."""
    if q.dtype != torch.bfloat16:
        raise KernelError(f"this attention kernel reads bfloat16 queries, not {q.dtype}; the reference takes others")
    q = aligned(q)
    out = torch.empty_like(q)
    if not q.numel():
        return out
    has_entries = entry_cache is not None and entries is not None
    if entry_cache is None or entries is None:
        dim = q.shape[2]
        entry_cache = torch.empty(0, dim // 2 + dim // 16, dtype=torch.uint8, device=q.device)
        entries = KeyLists(window.rows[:, :0], window.num_tiles)
    attend_program(q.shape[1], q.shape[2], has_entries, dtype_name(sink))(
        q,
        window_cache,
        window_cache.view(torch.uint16),
        window.rows,
        window.num_tiles,
        entry_cache,
        entry_cache.view(torch.uint16),
        entries.rows,
        entries.num_tiles,
        sink.contiguous(),
        out,
    )
    return out
