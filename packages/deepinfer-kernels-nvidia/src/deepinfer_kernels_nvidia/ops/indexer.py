# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Index scores over packed FP4 keys (docs/model.md: Attention).

    s_j = sum_h w_h relu(iq_h . ik_j);   -inf where not to be selected

    keys       units of records --bulk copy--> 64 records --decode--> A operand of the first product, in registers:
               [64, Di] e5m2, a power of two taken out of each key
    queries    B operand, in shared memory: [columns, Di] e5m2, a column for a head of a row (index_queries)
    dots       keys x queries^T        wgmma in fp8, float32 sums in registers
    sums       relu(dots) x weights    mma in f16: where wgmma leaves a sum, the next mma wants its A operand
    score      sum x factor of the row x power of the key

Keys and queries are e2m1 values with a power of two for each 32, so e5m2 holds them exactly as long as the powers of
one vector span no more than 2^17 (keys) or 2^16 (queries); what is smaller is below the rounding of the product. A dot
product is rounded to the 11 bits of f16 before it is weighted, the original's to 8 bits. It cannot overflow.

A block of threads has a group of query rows and a run of cache blocks. It lists units to score: up to 64 entries of a
cache block, or, where candidates are given, the parts of it that hold a candidate of some row. Rows of one request
stand together and share their blocks, so a unit mostly is listed once; another block number in the group lists it
again. A unit is scored for all rows of the group, and `shown` says whose scores they are: a row's bits depend neither
on the list nor on the row's place in the group.

    warp    16 keys of a tile    lane 4 g + t: keys g and g + 8, of each the t-th fourth of its words
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program
from deepinfer_kernels_nvidia.ops.fp4 import e5m2_table, octets_of_codes
from deepinfer_kernels_nvidia.ops.index_queries import (
    LANES,
    MOST_COLUMNS,
    STEP,
    encode_queries_program,
    group_shape,
)

__all__ = ["IndexBlocks", "index_scores", "plan_index"]

_KEYS = 64  # of a tile: the rows of one wgmma
_WARP_KEYS = 16
_RUN_KEYS = 2048  # that one block of threads walks at most, for one load of its queries
_CANDIDATE_RUN_KEYS = 4096
_STAGES = 4  # tiles under way to shared memory
_THREADS, _WARP = 128, 32  # one warp group
_BLOCKS = 4  # of threads on a multiprocessor: one decodes and sums while others multiply
_HEADROOM = 2  # keys: the largest code, 6, becomes 6 * 2^2
_SPAN = 18  # of powers; a group this far below the largest of its key counts as zero
_DEFINITIONS = """
#include <tl_templates/cuda/copy_sm90.h>
static __device__ __forceinline__ unsigned relu_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
"""

# below -> magnitudes of e2m1 times 2^(_HEADROOM - below) in e5m2, two words
TABLES = tuple((below, *(e5m2_table(_HEADROOM - below) if below < _SPAN else (0, 0))) for below in range(_SPAN + 1))


@dataclass(frozen=True)
class IndexBlocks:
    """Cache blocks of each query row and how many entries it sees."""

    blocks: Tensor  # [R, B] int32, -1 = none
    entries_per_block: int
    num_visible: Tensor  # [R] int32


def unit_entries(record: int, entries: int, candidate_block: int | None) -> int:
    """Entries that are fetched together, in whole 16-byte units, no more than a tile holds: the largest part of a cache
    block, or the least that holds whole candidate blocks. 0 where there is none.
    """
    sizes = range(min(entries, _KEYS), 0, -1)
    if candidate_block is not None:
        step = min(candidate_block, _KEYS)
        sizes = range(step, min(entries, _KEYS) + 1, step)
    return next((size for size in sizes if entries % size == 0 == size * record % 16 and _KEYS % size == 0), 0)


@program(
    tensor_memory=True,
    tl__disable_thread_storage_sync=True,  # barriers are placed by hand
    tl__disable_buffer_init_check=True,
    tl__disable_safe_memory_legalize=True,  # and so are bounds
)
def index_scores_program(heads: int, dim: int, entries: int, candidate_block: int | None, tensor_memory: bool = False):
    """Groups of queries (index_queries), cache of records -> scores [rows, blocks * entries]."""
    rows, num_blocks, cache_rows = T.dynamic("rows"), T.dynamic("num_blocks"), T.dynamic("cache_rows")
    num_marks, groups = T.dynamic("num_marks"), T.dynamic("groups")
    group, columns = group_shape(heads)
    record = dim // 2 + dim // STEP
    steps = words = scales = dim // STEP  # of the product; words of eight codes of a key in a lane
    unit = unit_entries(record, entries, candidate_block)
    in_tile, unit_bytes = _KEYS // unit, unit * record
    run = max((_RUN_KEYS if candidate_block is None else _CANDIDATE_RUN_KEYS) // entries, 1)  # cache blocks
    run_units = run * entries // unit
    part = min(unit, candidate_block or unit)  # entries that are shown to a row or not
    parts, marked = unit // part, candidate_block or part
    has_wgmma = not tensor_memory  # SM100's own product would need the sums in tensor memory: there it is left to mma

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
    def list_units(candidates, blocks, first_row, first_block, thread, leader, listed, source, shown, num_listed):
        """Units that some row wants, in any order: number in the run, first entry in the cache, bits of the rows."""
        wanted = T.alloc_var("int32")
        bits = T.alloc_local((parts,), "int32")
        for i in T.serial(T.ceildiv(run_units * group, _THREADS)):
            g, u = (i * _THREADS + thread) // run_units, (i * _THREADS + thread) % run_units
            b = u * unit // entries
            if g < group and leader[b, g] == g:
                wanted = 0
                for m in T.unroll(parts):
                    bits[m] = 0
                    mark = (first_block * entries + u * unit + m * part) // marked
                    for r in T.unroll(group):
                        if leader[b, r] == g:
                            if candidate_block is None:
                                bits[m] = bits[m] | (1 << r)
                            elif mark < num_marks:
                                bits[m] = bits[m] | (T.cast(candidates[first_row + r, mark], "int32") << r)
                    wanted = wanted | bits[m]
                if wanted != 0:
                    place = T.atomic_add(num_listed[0], 1, return_prev=True)
                    listed[place] = u
                    source[place] = T.max(blocks[first_row + g, first_block + b], 0) * entries + u * unit % entries
                    for m in T.unroll(parts):
                        shown[place, m] = T.cast(bits[m], "uint8")

    @T.macro
    def hide(scores, first_row, first_block, thread, leader):
        """-inf where a row sees nothing of a block; everywhere, where candidates may leave gaps."""
        for i in T.serial(T.ceildiv(group * run * entries // 4, _THREADS)):
            g, column = (i * _THREADS + thread) * 4 // (run * entries), (i * _THREADS + thread) * 4 % (run * entries)
            b = column // entries
            is_hidden = leader[b, g] < 0 or candidate_block is not None
            if g < group and first_row + g < rows and first_block + b < num_blocks and is_hidden:
                for v in T.vectorized(4):
                    scores[first_row + g, first_block * entries + column + v] = -T.infinity("float32")

    @T.macro
    def load(to, start, barrier, num_bytes):
        """Bulk copy to shared memory; whole 16-byte units."""
        T.call_extern("handle", "tl::tma_load", T.access_ptr(to, "w"), T.access_ptr(start, "r"), barrier, num_bytes)

    @T.macro
    def fetch(cache, source, last, p, thread, raw, full):
        """The units of tile p, each by a lane of the first warp."""
        if thread < _WARP:
            if thread == 0:
                T.mbarrier_arrive_expect_tx(full[p % _STAGES], in_tile * unit_bytes)
            if in_tile > 1:
                T.sync_warp()
            if thread < in_tile:
                first = T.cast(source[T.min(p * in_tile + thread, last)], "int64")
                load(raw[p % _STAGES, thread * unit_bytes], cache[first, 0], full[p % _STAGES], unit_bytes)

    @T.macro
    def decode(raw, stage, key, lane, table, code, scale, side, power, a):
        """The lane's codes of a key, times the powers of their groups, relative to the largest of the key."""
        largest = T.alloc_var("int32")
        for i in T.vectorized(4 * words):
            code[i] = raw[stage, key * record + lane * 4 * words + i]
        for s in T.vectorized(scales):
            scale[s] = raw[stage, key * record + dim // 2 + s]
        largest = 0
        for s in T.unroll(scales):
            largest = T.max(largest, T.cast(scale[s], "int32"))
        power[side] = T.reinterpret(largest << 23, "float32") * T.float32(2.0**-_HEADROOM)
        word = T.view(code, (words,), "uint32")
        for w in T.unroll(words):
            own = T.cast(raw[stage, key * record + dim // 2 + (lane * words + w) * 8 // STEP], "int32")
            below = T.min(largest - own, _SPAN)
            first, second = octets_of_codes(word[w], table[below, 0], table[below, 1])
            a[4 * w + side] = first
            a[4 * w + 2 + side] = second

    @T.macro
    def multiply(a, queries, descriptor, dots, pair, lane, octet):
        """dots = keys x queries^T, [4 n + 2 side + c]: columns 8 n + 2 lane + c of the key of this side."""
        if has_wgmma:
            T.warpgroup_fence_operand(a, num_regs=4 * steps)
            T.warpgroup_fence_operand(dots, num_regs=columns // 2)
            T.warpgroup_arrive()
            for s in T.unroll(steps):
                operands = ("e5m2", "e5m2", "fp32", a.data, 4 * s, descriptor.data, 2 * s * columns, dots.data, 0)
                adds = T.if_then_else(s > 0, 1, 0)
                T.ptx_wgmma_rs("float32", f"m{_KEYS}n{columns}k{STEP}", True, *operands, adds, 1, 1)
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(dots, num_regs=columns // 2)
            T.warpgroup_fence_operand(a, num_regs=4 * steps)
        else:
            word = T.view(queries, (2 * steps, columns, LANES), "uint32")
            for n in T.unroll(columns // 8):
                for c in T.unroll(4):
                    dots[4 * n + c] = T.float32(0)
                for s in T.unroll(steps):
                    for h in T.unroll(2):
                        pair[h] = word[2 * s + h, 8 * n + octet, lane]
                    operands = ("e5m2", "e5m2", "fp32", a.data, 4 * s, pair.data, 0, dots.data, 4 * n)
                    T.ptx_mma("float32", f"m16n8k{STEP}", "row", "col", *operands, T.bool(False))

    @T.macro
    def sum_heads(dots, pairs, weight, sums):
        """sums[2 side + c]: row 2 lane + c of the group, in two chains of products."""
        for i in T.unroll(8):
            sums[i] = T.float32(0)
        for i in T.unroll(columns // 4):
            pairs[i] = T.call_extern("uint32", "relu_pair", dots[2 * i], dots[2 * i + 1])
        for s in T.unroll(columns // 16):
            operands = ("fp16", "fp16", "fp32", pairs.data, 4 * s, weight.data, 2 * s, sums.data, 4 * (s % 2))
            T.ptx_mma("float32", "m16n8k16", "row", "col", *operands, T.bool(False))
        for i in T.unroll(4):
            sums[i] += sums[4 + i]

    @T.macro
    def write(scores, listed, shown, last, p, key, lane, sight, factor, first_row, first_entry, sums, power):
        for side in T.unroll(2):
            j = key + 8 * side
            place = T.min(p * in_tile + j // unit, last)
            entry = first_entry + listed[place] * unit + j % unit
            bits = T.cast(shown[place, j % unit // part], "int32")
            for c in T.unroll(2):
                r = 2 * lane + c
                if (bits >> r) & 1 != 0:
                    score = sums[2 * side + c] * (factor[c] * power[side])
                    if candidate_block is None:
                        scores[first_row + r, entry] = T.if_then_else(entry < sight[c], score, -T.infinity("float32"))
                    elif entry < sight[c]:
                        scores[first_row + r, entry] = score

    @T.prim_func
    def index_scores(
        codes: T.Tensor((groups, dim * columns), "uint8"),
        weights: T.Tensor((groups, columns), "float16"),
        factors: T.Tensor((groups, group), "float32"),
        cache: T.Tensor((cache_rows, record), "uint8"),
        blocks: T.Tensor((rows, num_blocks), "int32"),
        num_visible: T.Tensor((rows,), "int32"),
        candidates: T.Tensor((rows, num_marks), "uint8"),
        scores: T.Tensor((rows, num_blocks * entries), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, group), T.ceildiv(num_blocks, run), threads=_THREADS) as (member, place):
            T.annotate_min_blocks_per_sm(_BLOCKS if has_wgmma else _BLOCKS // 2)  # mma loads both operands
            T.import_source(_DEFINITIONS)
            queries = T.alloc_shared((dim * columns,), "uint8")
            raw = T.alloc_shared((_STAGES, _KEYS * record), "uint8")
            table = T.alloc_shared((_SPAN + 1, 2), "uint32")
            sight = T.alloc_shared((group,), "int32")  # entries that each row of the group sees, 0 beyond the last row
            leader = T.alloc_shared((run, group), "int32")
            listed = T.alloc_shared((run_units * group,), "int32")
            source = T.alloc_shared((run_units * group,), "int32")
            shown = T.alloc_shared((run_units * group, parts), "uint8")
            num_listed = T.alloc_shared((1,), "int32")
            full = T.alloc_barrier([1] * _STAGES)
            ready = T.alloc_barrier([1])
            weight = T.alloc_local((columns // 8,), "uint32")  # B operand: row `octet`'s weights, zero at other rows'
            weight_pair = T.alloc_local((2,), "float16")
            dots = T.alloc_local((columns // 2,), "float32")
            pairs = T.alloc_local((columns // 4,), "uint32")
            sums = T.alloc_local((8,), "float32")
            a = T.alloc_local((4 * steps,), "uint32")
            pair = T.alloc_local((2,), "uint32")
            code = T.alloc_local((4 * words,), "uint8")
            scale = T.alloc_local((scales,), "uint8")
            power = T.alloc_local((2,), "float32")  # of keys `key` and `key + 8`
            factor = T.alloc_local((2,), "float32")  # of rows 2 lane and 2 lane + 1
            own_sight = T.alloc_local((2,), "int32")
            descriptor = T.alloc_wgmma_desc()
            last = T.alloc_var("int32")
            thread = T.get_thread_binding()
            lane, octet = thread % LANES, thread % _WARP // LANES
            key = thread // _WARP * _WARP_KEYS + octet
            first_row, first_block = member * group, place * run
            if thread == 0:
                T.mbarrier_arrive_expect_tx(ready[0], dim * columns)
                load(queries[0], codes[member, 0], ready[0], dim * columns)
            for s in T.unroll(columns // 16):
                for h in T.unroll(2):
                    for v in T.unroll(2):
                        column = 16 * s + 8 * h + 2 * lane + v
                        is_own = column // heads == octet
                        weight_pair[v] = T.if_then_else(is_own, weights[member, column], T.float16(0))
                    weight[2 * s + h] = T.view(weight_pair, (1,), "uint32")[0]
            fill_table(table, thread)
            if thread < group:
                seen = T.if_then_else(first_row + thread < rows, num_visible[T.min(first_row + thread, rows - 1)], 0)
                sight[thread] = T.min(seen, num_blocks * entries)
            if thread == 0:
                num_listed[0] = 0
            T.sync_threads()
            for c in T.unroll(2):
                factor[c] = factors[member, T.min(2 * lane + c, group - 1)]
                own_sight[c] = sight[T.min(2 * lane + c, group - 1)]
            find_leaders(blocks, first_row, first_block, thread, sight, leader)
            T.sync_threads()
            list_units(candidates, blocks, first_row, first_block, thread, leader, listed, source, shown, num_listed)
            T.sync_threads()
            last = num_listed[0] - 1
            tiles = T.ceildiv(last + 1, in_tile)
            for p in T.serial(T.min(_STAGES, tiles)):
                fetch(cache, source, last, p, thread, raw, full)
            hide(scores, first_row, first_block, thread, leader)
            T.sync_threads()
            T.mbarrier_wait_parity(ready[0], 0)
            if has_wgmma:
                T.initialize_wgmma_descriptor(descriptor, T.access_ptr(queries[0], "r"), 0, columns, 8)
            for p in T.serial(tiles):
                T.mbarrier_wait_parity(full[p % _STAGES], p // _STAGES % 2)
                for side in T.unroll(2):
                    decode(raw, p % _STAGES, key + 8 * side, lane, table, code, scale, side, power, a)
                T.sync_threads()
                if p + _STAGES < tiles:
                    fetch(cache, source, last, p + _STAGES, thread, raw, full)
                multiply(a, queries, descriptor, dots, pair, lane, octet)
                sum_heads(dots, pairs, weight, sums)
                first_entry = first_block * entries
                write(scores, listed, shown, last, p, key, lane, own_sight, factor, first_row, first_entry, sums, power)

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
    if iq.dtype != torch.bfloat16 or MOST_COLUMNS % heads:
        raise KernelError(f"the index kernel takes bfloat16 and 1, 2, 4 .. 128 heads, not {iq.dtype} and {heads}")
    if not unit_entries(cache.shape[1], entries, None if candidates is None else candidate_block):
        raise KernelError(
            f"the index kernel takes blocks of 16, 32, 64 or 128 entries and candidate blocks that divide them, not "
            f"{entries} and {candidate_block}"
        )
    num_blocks = plan.blocks.shape[1]
    scores = torch.empty(rows, num_blocks * entries, dtype=torch.float32, device=iq.device)
    if not scores.numel():
        return scores
    group, columns = group_shape(heads)
    groups = -(-rows // group)
    codes = torch.empty(groups, dim // 16, columns, 16, dtype=torch.float8_e5m2, device=iq.device)
    scaled = torch.empty(groups, columns, dtype=torch.float16, device=iq.device)
    factors = torch.empty(groups, group, dtype=torch.float32, device=iq.device)
    encode_queries_program(heads, dim, dtype_name(weights))(
        aligned(iq).flatten(0, 1), weights.flatten(), codes, scaled, factors
    )
    index_scores_program(heads, dim, entries, None if candidates is None else candidate_block)(
        codes.view(torch.uint8).view(groups, -1),
        scaled,
        factors,
        cache,
        plan.blocks,
        plan.num_visible,
        (plan.blocks[:, :0] if candidates is None else candidates.contiguous()).view(torch.uint8),
        scores,
    )
    return scores
