# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Sparse attention with a sink over packed window records and selected entries; keys are values (model.md 2.4).

    l_k = q . k / sqrt(D);   o = sum_k exp(l_k) k / (sum_k exp(l_k) + exp(sink))

One block a query row and 64 of its heads (rows beyond the model's heads are zero). It walks the row's key list in tiles
of 64, window first, and never leaves a tile half done, so the order of additions depends on the row alone:

    packed records --dequantise--> K [64 keys, D] bf16 in shared memory
    S = Q K^T  [64 heads, 64 keys]  (wgmma)     online softmax in float32, base 2     O += P K  (wgmma, O in registers)

A record's value is exact in bf16. Both products split their columns over the two warpgroups, so each holds half of O.
Tiles after the last visible key are skipped: they would add exact zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program
from deepinfer_kernels_nvidia.ops.fp4 import HALF_BIAS, half_of_code

__all__ = ["TILE", "KeyLists", "attend", "plan_keys"]

TILE = 64  # keys a step
_HEADS = 64  # query heads of a block: the rows of one wgmma
_THREADS = 256
_CHUNK = 8  # values that a thread dequantises at a time: one 16-byte store
_LOG2_E = 1.4426950408889634
_FAR_BELOW = -1e30  # a finite start of the running maximum: exp2 of a difference with it is 0 or 1, never NaN


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


@program
def attend_program(heads: int, dim: int, has_entries: bool, sink_dtype: str):
    """q [rows, heads, dim] bf16 and packed caches; `e4m3` and `word` parameters are views of the same bytes."""
    rows, window_rows, entry_rows = T.dynamic("rows"), T.dynamic("window_rows"), T.dynamic("entry_rows")
    window_tiles, entry_tiles = T.dynamic("window_tiles"), T.dynamic("entry_tiles")
    window_bytes, entry_bytes = dim + dim // 32, dim // 2 + dim // 16
    to_log2 = dim**-0.5 * _LOG2_E
    both_columns = T.GemmWarpPolicy.FullCol

    units = TILE * dim // _CHUNK // _THREADS  # chunks of a tile that one thread dequantises
    chunks = dim // _CHUNK

    @T.macro
    def add_tile(q_tile, keys, probability, index, score, out_sum, peak, old_peak, decay, tile_sum, denominator):
        T.gemm(q_tile, keys, score, transpose_B=True, policy=both_columns, clear_accum=True)
        for h, j in T.Parallel(_HEADS, TILE):
            score[h, j] = T.if_then_else(index[j] >= 0, score[h, j] * to_log2, -T.infinity("float32"))
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
        for h, d in T.Parallel(_HEADS, dim):
            out_sum[h, d] *= decay[h]
        T.gemm(probability, keys, out_sum, policy=both_columns)

    @T.macro
    def fetch_window(e4m3, byte, key_list, row, t, thread, codes, powers):
        for i in T.unroll(units):
            unit = i * _THREADS + thread
            key = T.max(key_list[row, t, unit // chunks], 0)
            for v in T.vectorized(_CHUNK):
                codes[i, v] = e4m3[key, unit % chunks * _CHUNK + v]
            powers[i] = byte[key, dim + unit % chunks * _CHUNK // 32]

    @T.macro
    def fetch_entries(word, e4m3, key_list, used, row, t, thread, words, scales):
        if t < used[row]:
            for i in T.unroll(units):
                unit = i * _THREADS + thread
                key = T.max(key_list[row, t, unit // chunks], 0)
                words[i] = word[key, unit % chunks]
                scales[i] = e4m3[key, dim // 2 + unit % chunks * _CHUNK // 16]

    @T.prim_func
    def attend(
        q: T.Tensor((rows, heads, dim), "bfloat16"),
        window_e4m3: T.Tensor((window_rows, window_bytes), "float8_e4m3fn"),
        window_byte: T.Tensor((window_rows, window_bytes), "uint8"),
        window_list: T.Tensor((rows, window_tiles, TILE), "int32"),
        window_used: T.Tensor((rows,), "int32"),
        entry_word: T.Tensor((entry_rows, entry_bytes // 4), "int32"),
        entry_e4m3: T.Tensor((entry_rows, entry_bytes), "float8_e4m3fn"),
        entry_list: T.Tensor((rows, entry_tiles, TILE), "int32"),
        entry_used: T.Tensor((rows,), "int32"),
        sink: T.Tensor((heads,), sink_dtype),
        out: T.Tensor((rows, heads, dim), "bfloat16"),
    ):
        with T.Kernel(rows, T.ceildiv(heads, _HEADS), threads=_THREADS) as (row, part):
            q_tile = T.alloc_shared((_HEADS, dim), "bfloat16")
            keys = T.alloc_shared((TILE, dim), "bfloat16")
            probability = T.alloc_shared((_HEADS, TILE), "bfloat16")
            index = T.alloc_shared((TILE,), "int32")
            score = T.alloc_fragment((_HEADS, TILE), "float32")
            out_sum = T.alloc_fragment((_HEADS, dim), "float32")
            peak = T.alloc_fragment((_HEADS,), "float32")
            old_peak = T.alloc_fragment((_HEADS,), "float32")
            decay = T.alloc_fragment((_HEADS,), "float32")
            tile_sum = T.alloc_fragment((_HEADS,), "float32")
            denominator = T.alloc_fragment((_HEADS,), "float32")
            for h, d in T.Parallel(_HEADS, dim):
                head = part * _HEADS + h
                q_tile[h, d] = T.if_then_else(head < heads, q[row, head, d], T.bfloat16(0))
            T.fill(out_sum, 0)
            T.fill(denominator, 0)
            T.fill(peak, _FAR_BELOW)
            thread = T.get_thread_binding()
            codes = T.alloc_local((units, _CHUNK), "float8_e4m3fn")
            powers = T.alloc_local((units,), "uint8")
            for t in T.serial(window_used[row]):
                fetch_window(window_e4m3, window_byte, window_list, row, t, thread, codes, powers)
                for j in T.Parallel(TILE):
                    index[j] = window_list[row, t, j]
                for i in T.unroll(units):
                    power = T.reinterpret(T.cast(powers[i], "int32") << 23, "float32")
                    for v in T.vectorized(_CHUNK):
                        keys[(i * _THREADS + thread) // chunks, (i * _THREADS + thread) % chunks * _CHUNK + v] = (
                            T.cast(codes[i, v], "float32") * power
                        )
                add_tile(q_tile, keys, probability, index, score, out_sum, peak, old_peak, decay, tile_sum, denominator)
            if has_entries:
                words = T.alloc_local((units,), "int32")
                scales = T.alloc_local((units,), "float8_e4m3fn")
                fetch_entries(entry_word, entry_e4m3, entry_list, entry_used, row, 0, thread, words, scales)
                for t in T.serial(entry_used[row]):
                    for j in T.Parallel(TILE):
                        index[j] = entry_list[row, t, j]
                    for i in T.unroll(units):
                        scale = T.cast(scales[i], "float32") * HALF_BIAS
                        for v in T.vectorized(_CHUNK):
                            code = words[i] >> (v * 4)
                            keys[(i * _THREADS + thread) // chunks, (i * _THREADS + thread) % chunks * _CHUNK + v] = (
                                T.cast(half_of_code(code), "float32") * scale
                            )
                    fetch_entries(entry_word, entry_e4m3, entry_list, entry_used, row, t + 1, thread, words, scales)
                    add_tile(
                        q_tile, keys, probability, index, score, out_sum, peak, old_peak, decay, tile_sum, denominator
                    )
            for h in T.Parallel(_HEADS):
                head = part * _HEADS + h
                level = T.if_then_else(head < heads, T.cast(sink[T.min(head, heads - 1)], "float32"), 0.0)
                denominator[h] = 1.0 / (denominator[h] + T.exp2(level * _LOG2_E - peak[h]))
            for h, d in T.Parallel(_HEADS, dim):
                if part * _HEADS + h < heads:
                    out[row, part * _HEADS + h, d] = out_sum[h, d] * denominator[h]

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
        window_cache.view(torch.float8_e4m3fn),
        window_cache,
        window.rows,
        window.num_tiles,
        entry_cache.view(torch.int32),
        entry_cache.view(torch.float8_e4m3fn),
        entries.rows,
        entries.num_tiles,
        sink.contiguous(),
        out,
    )
    return out
