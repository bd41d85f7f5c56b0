# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Index scores over packed FP4 keys (model.md 2.4): s_j = sum_h w_h relu(iq_h . ik_j), -inf where not to be selected.

    threads    a group of query rows (128 / heads of them) x a run of 8 cache blocks
    keys       cache block --dequantise--> [entries, Di] bf16 in shared memory
    product    keys [entries, Di] x queries [64, Di]^T  (wgmma), twice; then relu, weights, sum over the heads of a row

Rows of one request stand together and share their blocks, so a group mostly dequantises a block once; for each further
block number in the group it makes one more pass of the same shape. Every pass computes all rows of the group and keeps
those that the block belongs to: a row's bits depend neither on the number of passes nor on its place in the group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_kernels_nvidia.jit import T, aligned, dtype_name, program
from deepinfer_kernels_nvidia.ops.fp4 import HALF_BIAS, half_of_code

__all__ = ["IndexBlocks", "index_scores", "plan_index"]

COLUMNS = 128  # rows * heads of a group
_PART = 64  # of these columns, in one product: as many as keep two blocks of threads on a multiprocessor
_RUN = 8  # cache blocks that one block of threads walks, for one load of its queries
_THREADS = 256
_CHUNK = 8  # values that a thread dequantises at a time


@dataclass(frozen=True)
class IndexBlocks:
    """Cache blocks of each query row and how many entries it sees."""

    blocks: Tensor  # [R, B] int32, -1 = none
    entries_per_block: int
    num_visible: Tensor  # [R] int32


@program
def index_scores_program(heads: int, dim: int, entries: int, weight_dtype: str, with_candidates: bool):
    """iq [rows, heads, dim] bf16, cache [cache_rows, record] -> scores [rows, blocks, entries]."""
    rows, num_blocks, cache_rows = T.dynamic("rows"), T.dynamic("num_blocks"), T.dynamic("cache_rows")
    marks = T.dynamic("marks")
    group = COLUMNS // heads
    record = dim // 2 + dim // 32
    chunks = dim // _CHUNK
    units = entries * chunks // _THREADS

    in_part = _PART // heads  # rows of a product

    @T.macro
    def find_passes(blocks, first_row, run, sight, block_of, leads):
        for step, g in T.Parallel(_RUN, group):
            b = T.min(run * _RUN + step, num_blocks - 1)
            block_of[step, g] = blocks[T.min(first_row + g, rows - 1), b]
        for step, g in T.Parallel(_RUN, group):
            seen = (run * _RUN + step) * entries < sight[g]
            leads[step, g] = T.if_then_else(seen and block_of[step, g] >= 0, 1, 0)
            for other in T.serial(g):
                hidden = (run * _RUN + step) * entries >= sight[other]
                leads[step, g] = T.if_then_else(hidden or block_of[step, other] != block_of[step, g], leads[step, g], 0)

    @T.macro
    def dequantise(cache, block, keys, codes, powers, value):
        thread = T.get_thread_binding()
        for i in T.unroll(units):  # all loads before the first store
            unit = i * _THREADS + thread
            place = block * entries + unit // chunks
            for v in T.vectorized(_CHUNK // 2):
                codes[i, v] = cache[place, unit % chunks * (_CHUNK // 2) + v]
            powers[i] = cache[place, dim // 2 + unit % chunks * _CHUNK // 32]
        for i in T.unroll(units):
            power = T.reinterpret(T.cast(powers[i], "int32") << 23, "float32")
            for v in T.unroll(_CHUNK):
                code = T.cast(codes[i, v // 2], "int32") >> (v % 2 * 4)
                value[v] = T.cast(half_of_code(code), "float32") * HALF_BIAS * power
            unit = i * _THREADS + thread
            for v in T.vectorized(_CHUNK):
                keys[unit // chunks, unit % chunks * _CHUNK + v] = value[v]

    @T.macro
    def score_part(half_group, keys, queries, weight, dots, weighted, score):
        T.gemm(
            keys,
            queries[half_group * _PART : (half_group + 1) * _PART, :],
            dots,
            transpose_B=True,
            policy=T.GemmWarpPolicy.FullRow,
            clear_accum=True,
        )
        for j, r, h in T.Parallel(entries, in_part, heads):
            weighted[j, r, h] = T.max(dots[j, r * heads + h], 0.0) * weight[half_group * _PART + r * heads + h]
        T.reduce_sum(weighted, score, dim=2)

    @T.prim_func
    def index_scores(
        iq: T.Tensor((rows, heads, dim), "bfloat16"),
        weights: T.Tensor((rows, heads), weight_dtype),
        cache: T.Tensor((cache_rows, record), "uint8"),
        blocks: T.Tensor((rows, num_blocks), "int32"),
        num_visible: T.Tensor((rows,), "int32"),
        candidates: T.Tensor((rows, marks), "uint8"),
        scores: T.Tensor((rows, num_blocks, entries), "float32"),
        candidate_block: T.int32,
    ):
        with T.Kernel(T.ceildiv(rows, group), T.ceildiv(num_blocks, _RUN), threads=_THREADS) as (part, run):
            queries = T.alloc_shared((COLUMNS, dim), "bfloat16")
            keys = T.alloc_shared((entries, dim), "bfloat16")
            weight = T.alloc_shared((COLUMNS,), "float32")
            sight = T.alloc_shared((group,), "int32")  # entries that each row of the group sees, 0 beyond the last row
            block_of = T.alloc_shared((_RUN, group), "int32")
            leads = T.alloc_shared((_RUN, group), "int32")  # 1: the first row with this block, where a pass is made
            dots = T.alloc_fragment((entries, _PART), "float32")
            weighted = T.alloc_fragment((entries, in_part, heads), "float32")
            score = T.alloc_fragment((entries, in_part), "float32")
            codes = T.alloc_local((units, _CHUNK // 2), "uint8")
            powers = T.alloc_local((units,), "uint8")
            value = T.alloc_local((_CHUNK,), "float32")
            first_row = part * group
            for c, d in T.Parallel(COLUMNS, dim):
                row = first_row + c // heads
                queries[c, d] = T.if_then_else(row < rows, iq[T.min(row, rows - 1), c % heads, d], T.bfloat16(0))
            for c in T.Parallel(COLUMNS):
                row = T.min(first_row + c // heads, rows - 1)
                weight[c] = T.cast(weights[row, c % heads], "float32")
            for g in T.Parallel(group):
                sight[g] = T.if_then_else(first_row + g < rows, num_visible[T.min(first_row + g, rows - 1)], 0)
            find_passes(blocks, first_row, run, sight, block_of, leads)
            for step in T.serial(T.min(_RUN, num_blocks - run * _RUN)):
                b = run * _RUN + step
                for g, j in T.Parallel(group, entries):
                    if first_row + g < rows:
                        scores[first_row + g, b, j] = -T.infinity("float32")
                for g in T.serial(group):
                    if leads[step, g] > 0:
                        block = block_of[step, g]
                        dequantise(cache, block, keys, codes, powers, value)
                        for half_group in T.serial(COLUMNS // _PART):
                            score_part(half_group, keys, queries, weight, dots, weighted, score)
                            for j, r in T.Parallel(entries, in_part):
                                member = half_group * (in_part) + r
                                entry = b * entries + j
                                if block_of[step, member] == block and entry < sight[member]:
                                    if with_candidates:
                                        if candidates[first_row + member, entry // candidate_block] > 0:
                                            scores[first_row + member, b, j] = score[j, r]
                                    else:
                                        scores[first_row + member, b, j] = score[j, r]

    return index_scores


def plan_index(blocks: Tensor, entries_per_block: int, num_visible: Tensor) -> IndexBlocks:
    """blocks [R, B] block numbers, -1 = none; num_visible [R]; see contract `plan_index`."""
    return IndexBlocks(blocks.to(torch.int32), entries_per_block, num_visible.to(torch.int32))


def index_scores(
    iq: Tensor, weights: Tensor, cache: Tensor, plan: IndexBlocks, candidates: Tensor | None, candidate_block: int
) -> Tensor:
    """iq [R, Hi, Di] bf16, weights [R, Hi], packed cache -> scores [R, B * entries] float32; see contract
    `index_scores`. Raises KernelError for other dtypes and for numbers of heads that don't divide 64.
    """
    rows, heads, dim = iq.shape
    if iq.dtype != torch.bfloat16 or _PART % heads:
        raise KernelError(f"the index kernel takes bfloat16 and 1, 2, 4 .. 64 heads, not {iq.dtype} and {heads}")
    num_blocks = plan.blocks.shape[1]
    scores = torch.empty(rows, num_blocks, plan.entries_per_block, dtype=torch.float32, device=iq.device)
    if scores.numel():
        marks = plan.blocks[:, :0] if candidates is None else candidates
        launch = index_scores_program(heads, dim, plan.entries_per_block, dtype_name(weights), candidates is not None)
        launch(
            aligned(iq),
            weights.contiguous(),
            cache,
            plan.blocks.contiguous(),
            plan.num_visible,
            marks.to(torch.uint8).contiguous(),
            scores,
            candidate_block,
        )
    return scores.view(rows, -1)
