# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Index scores over packed FP4 keys (model.md 2.4): s_j = sum_h w_h relu(iq_h . ik_j), -inf where not to be selected.

    queries    [128 rows x heads, Di] e4m3, a power of two taken out of each and put into its weight
    keys       units of records --bulk copy--> 128 records --decode--> [128, Di] e4m3, a power of two taken out of each
    product    keys x queries^T  (wgmma in fp8);  then relu, weights, sum over the heads of a row, times the key's power

Both sides are e2m1 values with a power of two for each 32, so e4m3 holds them exactly as long as the powers of one
vector span no more than 2^14 (keys) or 2^13 (queries); what is smaller is below the rounding of the product.

A block of threads has a group of query rows (128 / heads of them) and a run of cache blocks. It lists units to score:
whole cache blocks, or, where candidates are given, the parts of them that hold a candidate of some row. Rows of one
request stand together and share their blocks, so a unit mostly is listed once; another block number in the group lists
it again. A unit is scored for all rows of the group, which keep what is theirs: a row's bits depend neither on the list
nor on the row's place in the group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program
from deepinfer_kernels_nvidia.ops.fp4 import e4m3_of_codes, e4m3_table

__all__ = ["IndexBlocks", "index_scores", "plan_index"]

COLUMNS = 128  # rows * heads of a group
_KEYS = 128  # of a tile
_RUN_KEYS = 4096  # that one block of threads walks at most, for one load of its queries
_STAGES = 3  # tiles under way to shared memory
_THREADS = 256
_GROUP = 32  # values that share a scale
HEADROOM = 6  # keys: the largest code, 6, becomes 6 * 2^6, below e4m3's 448
_QUERY_HEADROOM = 7  # queries: the largest magnitude lies in [2^7, 2^8)
_SPAN = 15  # of powers; a group this far below the largest of its key counts as zero


@dataclass(frozen=True)
class IndexBlocks:
    """Cache blocks of each query row and how many entries it sees."""

    blocks: Tensor  # [R, B] int32, -1 = none
    entries_per_block: int
    num_visible: Tensor  # [R] int32


def unit_entries(record: int, entries: int, candidate_block: int | None) -> int:
    """Entries that are scored or left out together: a cache block, or the least part of it that holds whole candidate
    blocks and whole 16-byte units. 0 where there is none.
    """
    if candidate_block is None:
        return entries if entries * record % 16 == 0 else 0
    sizes = range(candidate_block, entries + 1, candidate_block)
    return next((size for size in sizes if entries % size == 0 and size * record % 16 == 0), 0)


def _piece_entries(record: int, unit: int) -> int:
    """Entries in a row of the cache as the bulk copy engine sees it: at most 256 words, whole 16-byte units."""
    sizes = range(unit, 0, -1)
    return next(size for size in sizes if unit % size == 0 and size * record % 16 == 0 and size * record <= 1024)


# below -> magnitudes of e2m1 times 2^(HEADROOM - below) in e4m3, two words
TABLES = tuple((below, *(e4m3_table(HEADROOM - below) if below < _SPAN else (0, 0))) for below in range(_SPAN + 1))


def _slot(pieces: int, piece_words: int) -> tuple[int, int]:
    """Rows and words of shared memory for a unit, padded to 128 bytes: where a bulk copy of a tensor may start."""
    if pieces == 1:
        return 1, -(-piece_words // 32) * 32
    rows = next(rows for rows in range(pieces, pieces + 32) if rows * piece_words % 32 == 0)
    return rows, piece_words


@program
def encode_queries_program(dim: int, weight_dtype: str):
    """iq [vectors, dim] bf16 -> e4m3 codes; weights [vectors] times the power that was taken out."""
    vectors = T.dynamic("vectors")
    tile = 32

    @T.prim_func
    def encode_queries(
        iq: T.Tensor((vectors, dim), "bfloat16"),
        weights: T.Tensor((vectors,), weight_dtype),
        codes: T.Tensor((vectors, dim), "float8_e4m3fn"),
        scaled: T.Tensor((vectors,), "float32"),
    ):
        with T.Kernel(T.ceildiv(vectors, tile), threads=128) as block:
            value = T.alloc_fragment((tile, dim), "float32")
            largest = T.alloc_fragment((tile,), "float32")
            power = T.alloc_fragment((tile,), "float32")
            for i, d in T.Parallel(tile, dim):
                value[i, d] = T.cast(iq[T.min(block * tile + i, vectors - 1), d], "float32")
            T.reduce_absmax(value, largest, dim=1)
            for i in T.Parallel(tile):
                bounded = T.min(T.max(largest[i], T.float32(2.0**-100)), T.float32(2.0**100))
                power[i] = T.reinterpret(T.reinterpret(bounded, "int32") & 0x7F800000, "float32")
            for i, d in T.Parallel(tile, dim):
                if block * tile + i < vectors:
                    codes[block * tile + i, d] = value[i, d] * (2.0**_QUERY_HEADROOM / power[i])
            for i in T.Parallel(tile):
                if block * tile + i < vectors:
                    scaled[block * tile + i] = (
                        T.cast(weights[block * tile + i], "float32") * power[i] * 2.0**-_QUERY_HEADROOM
                    )

    return encode_queries


@program(tl__disable_thread_storage_sync=True, tl__disable_buffer_init_check=True)  # barriers are placed by hand
def index_scores_program(heads: int, dim: int, entries: int, candidate_block: int | None):
    """codes [rows * heads, dim], cache in pieces -> scores [rows, blocks * entries]."""
    rows, num_blocks, cache_pieces = T.dynamic("rows"), T.dynamic("num_blocks"), T.dynamic("cache_pieces")
    num_marks, vectors = T.dynamic("num_marks"), T.dynamic("vectors")
    group = COLUMNS // heads
    record = dim // 2 + dim // _GROUP
    parts = _THREADS // _KEYS  # threads that decode one key
    words = dim // 8 // parts  # of eight codes, in one thread
    scales, own_scales = dim // _GROUP, max(words * 8 // _GROUP, 1)
    unit = unit_entries(record, entries, candidate_block)
    in_tile = _KEYS // unit  # units of a tile
    piece = _piece_entries(record, unit)
    pieces, piece_words = unit // piece, piece * record // 4
    slot = _slot(pieces, piece_words)  # shape of a unit in shared memory
    slot_bytes = slot[0] * slot[1] * 4
    run = max(_RUN_KEYS // entries // max(group // 8, 1), 1)  # cache blocks
    run_units = run * entries // unit
    marks_a_unit = 1 if candidate_block is None else unit // candidate_block

    @T.macro
    def fill_table(table, thread):
        for below, first, second in TABLES:
            if thread == below:
                table[below, 0] = T.uint32(first)
                table[below, 1] = T.uint32(second)

    @T.macro
    def find_leaders(blocks, first_row, first_block, thread, sight, leader):
        """leader[b, g]: the first row of the group with the same cache block b, -1 where row g sees nothing of it."""
        found = T.alloc_var("int32")
        for i in T.serial(T.ceildiv(run * group, _THREADS)):
            b, g = (i * _THREADS + thread) // group, (i * _THREADS + thread) % group
            if b < run:
                found = -1
                if (first_block + b) * entries < sight[g]:
                    found = g
                    for other in T.serial(g):
                        if (first_block + b) * entries < sight[other]:
                            same = blocks[first_row + g, first_block + b] == blocks[first_row + other, first_block + b]
                            if same and found == g:
                                found = other
                leader[b, g] = found

    @T.macro
    def list_units(candidates, first_row, first_block, thread, leader, listed, num_listed):
        """listed: unit of the run * group + leader, in any order."""
        wanted = T.alloc_var("int32")
        for i in T.serial(T.ceildiv(run_units * group, _THREADS)):
            u, g = (i * _THREADS + thread) // group, (i * _THREADS + thread) % group
            b = u * unit // entries
            if u < run_units:
                wanted = 0
                if leader[b, g] == g:
                    if candidate_block is None:
                        wanted = 1
                    else:
                        for r in T.serial(g, group):
                            if leader[b, r] == g:
                                for m in T.unroll(marks_a_unit):
                                    mark = (first_block * entries + u * unit) // candidate_block + m
                                    if mark < num_marks:
                                        wanted = wanted | T.cast(candidates[first_row + r, mark], "int32")
                if wanted != 0:
                    listed[T.atomic_add(num_listed[0], 1, return_prev=True)] = u * group + g

    @T.macro
    def fetch(cache, blocks, listed, num_listed, first_row, first_block, p, stage, raw, full):
        for i in T.unroll(in_tile):
            item = listed[T.min(p * in_tile + i, num_listed[0] - 1)]
            u, g = item // group, item % group
            block = T.max(blocks[first_row + g, first_block + u * unit // entries], 0)
            first = block * (entries // piece) + u * unit % entries // piece
            T.tma_copy(cache[first : first + pieces, :], raw[stage, i, 0:pieces, 0:piece_words], barrier=full[stage])
        if T.get_thread_binding() == 0:
            T.barrier_arrive(full[stage])

    @T.macro
    def decode(raw, stage, key, half, table, buffer, keys, power, code, exponent, out):
        """One half of a key: e2m1 codes times the powers of their groups, relative to the largest of the key."""
        record_of = T.view(raw, (_STAGES, in_tile * slot_bytes), "uint8")
        start = key // unit * slot_bytes + key % unit * record
        for i in T.vectorized(4 * words):
            code[i] = record_of[stage, start + half * 4 * words + i]
        first_scale = start + dim // 2
        largest = T.alloc_var("int32")
        largest = 0
        for s in T.unroll(scales):
            largest = T.max(largest, T.cast(record_of[stage, first_scale + s], "int32"))
        for s in T.unroll(own_scales):
            exponent[s] = T.cast(record_of[stage, first_scale + half * words * 8 // _GROUP + s], "int32")
        if half == 0:
            power[buffer, key] = T.reinterpret(largest << 23, "float32") * T.float32(2.0**-HEADROOM)
        word = T.view(code, (words,), "uint32")
        for w in T.unroll(words):
            below = T.min(largest - exponent[w * 8 // _GROUP], _SPAN)
            first, second = e4m3_of_codes(word[w], table[below, 0], table[below, 1])
            out[2 * w] = first
            out[2 * w + 1] = second
        value = T.view(out, (8 * words,), "float8_e4m3fn")
        for c in T.unroll(words // 2):
            for v in T.vectorized(16):
                keys[buffer, key, half * 8 * words + c * 16 + v] = value[c * 16 + v]

    @T.prim_func
    def index_scores(
        codes: T.Tensor((vectors, dim), "float8_e4m3fn"),
        weights: T.Tensor((vectors,), "float32"),
        cache: T.Tensor((cache_pieces, piece_words), "int32"),
        blocks: T.Tensor((rows, num_blocks), "int32"),
        num_visible: T.Tensor((rows,), "int32"),
        candidates: T.Tensor((rows, num_marks), "uint8"),
        scores: T.Tensor((rows, num_blocks * entries), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, group), T.ceildiv(num_blocks, run), threads=_THREADS) as (part, place):
            T.annotate_min_blocks_per_sm(2)
            queries = T.alloc_shared((COLUMNS, dim), "float8_e4m3fn")
            keys = T.alloc_shared((2, _KEYS, dim), "float8_e4m3fn")
            raw = T.alloc_shared((_STAGES, in_tile, *slot), "int32")
            power = T.alloc_shared((2, _KEYS), "float32")
            table = T.alloc_shared((_SPAN + 1, 2), "uint32")
            sight = T.alloc_shared((group,), "int32")  # entries that each row of the group sees, 0 beyond the last row
            leader = T.alloc_shared((run, group), "int32")
            listed = T.alloc_shared((run_units * group,), "int32")
            num_listed = T.alloc_shared((1,), "int32")
            full = T.alloc_barrier([1] * _STAGES)
            weight = T.alloc_fragment((COLUMNS,), "float32")
            dots = T.alloc_fragment((_KEYS, COLUMNS), "float32")
            weighted = T.alloc_fragment((_KEYS, group, heads), "float32")
            score = T.alloc_fragment((_KEYS, group), "float32")
            code = T.alloc_local((4 * words,), "uint8")
            exponent = T.alloc_local((own_scales,), "int32")
            out = T.alloc_local((2 * words,), "uint32")
            thread = T.get_thread_binding()
            key, half = thread % _KEYS, thread // _KEYS
            first_row, first_block = part * group, place * run
            for c, d in T.Parallel(COLUMNS, dim):
                queries[c, d] = codes[T.min(first_row * heads + c, vectors - 1), d]
            for c in T.Parallel(COLUMNS):
                weight[c] = weights[T.min(first_row * heads + c, vectors - 1)]
            fill_table(table, thread)
            if thread < group:
                seen = T.if_then_else(first_row + thread < rows, num_visible[T.min(first_row + thread, rows - 1)], 0)
                sight[thread] = T.min(seen, num_blocks * entries)
            if thread == 0:
                num_listed[0] = 0
            T.sync_threads()
            find_leaders(blocks, first_row, first_block, thread, sight, leader)
            T.sync_threads()
            list_units(candidates, first_row, first_block, thread, leader, listed, num_listed)
            for i in T.serial(run * group):
                b, g = i // group, i % group
                hidden = leader[b, g] < 0 or candidate_block is not None
                if hidden and first_row + g < rows and thread < entries and first_block + b < num_blocks:
                    scores[first_row + g, (first_block + b) * entries + thread] = -T.infinity("float32")
            T.fence_proxy_async()
            T.sync_threads()
            tiles = T.ceildiv(num_listed[0], in_tile)
            for p in T.serial(T.min(_STAGES, tiles)):
                fetch(cache, blocks, listed, num_listed, first_row, first_block, p, p, raw, full)
            for p in T.serial(tiles):
                stage, buffer = p % _STAGES, p % 2
                T.mbarrier_wait_parity(full[stage], p // _STAGES % 2)
                decode(raw, stage, key, half, table, buffer, keys, power, code, exponent, out)
                T.fence_proxy_async()
                T.sync_threads()
                if p + _STAGES < tiles:
                    fetch(cache, blocks, listed, num_listed, first_row, first_block, p + _STAGES, stage, raw, full)
                T.gemm(
                    keys[buffer, :, :],
                    queries,
                    dots,
                    transpose_B=True,
                    policy=T.GemmWarpPolicy.FullRow,
                    clear_accum=True,
                )
                for j, r, h in T.Parallel(_KEYS, group, heads):
                    weighted[j, r, h] = T.max(dots[j, r * heads + h], 0.0) * weight[r * heads + h]
                T.reduce_sum(weighted, score, dim=2)
                for j, r in T.Parallel(_KEYS, group):
                    item = listed[T.min(p * in_tile + j // unit, num_listed[0] - 1)]
                    u = item // group
                    entry = first_block * entries + u * unit + j % unit
                    if leader[u * unit // entries, r] == item % group:
                        shown = entry < sight[r]
                        if candidate_block is not None:
                            shown = shown and candidates[first_row + r, entry // candidate_block] > 0
                        scores[first_row + r, entry] = T.if_then_else(
                            shown, score[j, r] * power[buffer, j], -T.infinity("float32")
                        )

    return index_scores


def plan_index(blocks: Tensor, entries_per_block: int, num_visible: Tensor) -> IndexBlocks:
    """blocks [R, B] block numbers, -1 = none; num_visible [R]; see contract `plan_index`."""
    return IndexBlocks(blocks.to(torch.int32).contiguous(), entries_per_block, num_visible.to(torch.int32))


def index_scores(
    iq: Tensor, weights: Tensor, cache: Tensor, plan: IndexBlocks, candidates: Tensor | None, candidate_block: int
) -> Tensor:
    """iq [R, Hi, Di] bf16 as `round_index` gives it, weights [R, Hi], packed cache -> scores [R, B * entries] float32;
    see contract `index_scores`. Raises KernelError for other dtypes and shapes that `coverage` refuses.
    """
    rows, heads, dim = iq.shape
    entries = plan.entries_per_block
    if iq.dtype != torch.bfloat16 or COLUMNS % heads:
        raise KernelError(f"the index kernel takes bfloat16 and 1, 2, 4 .. 128 heads, not {iq.dtype} and {heads}")
    record = cache.shape[1]
    unit = unit_entries(record, entries, None if candidates is None else candidate_block)
    if not unit or _KEYS % entries:
        raise KernelError(
            f"the index kernel takes blocks of 16, 32, 64 or 128 entries and candidate blocks that divide them, not "
            f"{entries} and {candidate_block}"
        )
    num_blocks = plan.blocks.shape[1]
    scores = torch.empty(rows, num_blocks * entries, dtype=torch.float32, device=iq.device)
    if not scores.numel():
        return scores
    codes = torch.empty(rows * heads, dim, dtype=torch.float8_e4m3fn, device=iq.device)
    scaled = torch.empty(rows * heads, dtype=torch.float32, device=iq.device)
    encode_queries_program(dim, dtype_name(weights))(aligned(iq).flatten(0, 1), weights.flatten(), codes, scaled)
    words = cache[: cache.shape[0] // entries * entries].flatten().view(torch.int32)
    index_scores_program(heads, dim, entries, None if candidates is None else candidate_block)(
        codes,
        scaled,
        words.view(-1, _piece_entries(record, unit) * record // 4),
        plan.blocks,
        plan.num_visible,
        (plan.blocks[:, :0] if candidates is None else candidates.contiguous()).view(torch.uint8),
        scores,
    )
    return scores
