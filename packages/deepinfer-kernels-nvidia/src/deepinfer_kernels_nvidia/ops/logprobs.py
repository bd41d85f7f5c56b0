# ruff: noqa: I002, SIM102 - annotations of a TileLang program are its signature; `and` reads both of its sides
# pyright: basic, reportInvalidTypeForm=false
"""Log-probability and rank of a token, and the n most likely ones (contract `token_logprobs`):

    logprob(v) = x_v - max - ln(sum exp(x - max))        rank = 1 + entries with a larger key
    key        = (order-preserving bits of x, id inverted), so the n most likely are the n largest keys, in their order

    row   | t0 | t1 | .. | t511 | t0 | ..      a thread has eight ids under way, 512 apart
    sum   of a thread, in the order of its ids; of a warp, by shuffles; of the warps, in order

One block of threads a row, which it reads from memory once and then from L2: for the largest, for the sum and the rank,
and once for each of the n, which are few. Every sum has one order, so rows are invariant.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, program
from deepinfer_kernels_nvidia.ops.block_values import WARP, largest_of_block, sum_of_block
from deepinfer_kernels_nvidia.ops.select import ordered_bits

__all__ = ["token_logprobs"]

_THREADS, _LOADS = 512, 8
_STEP = _THREADS * _LOADS
_WARPS = _THREADS // WARP
_ID = 0xFFFFFFFF


def _key(value, index):
    """int64, positive: value first, then the lower id."""
    bits = T.cast(ordered_bits(value), "int64") << T.int64(31)
    return bits | (T.int64(_ID >> 1) - T.cast(index, "int64"))


@program(tl__disable_thread_storage_sync=True, tl__disable_buffer_init_check=True)  # barriers are placed by hand
def row_logprobs_program():
    """logits [rows, num_ids] with any row stride, token [rows] -> logprob, rank [rows]; top ids, theirs [rows, n]."""
    rows, num_ids, stride = T.dynamic("rows"), T.dynamic("num_ids"), T.dynamic("stride", "int64")
    n = T.dynamic("n")

    @T.prim_func
    def row_logprobs(
        logits: T.StridedTensor((rows, num_ids), (stride, 1), "float32"),
        token: T.Tensor((rows,), "int64"),
        logprob: T.Tensor((rows,), "float32"),
        rank: T.Tensor((rows,), "int64"),
        top_id: T.Tensor((rows, n), "int64"),
        top_logprob: T.Tensor((rows, n), "float32"),
        num_top: T.int32,
    ):
        with T.Kernel(rows, threads=_THREADS) as row:
            thread = T.get_thread_binding()
            warp_key = T.alloc_shared((_WARPS,), "int64")
            warp_largest = T.alloc_shared((_WARPS,), "float32")
            warp_sum = T.alloc_shared((_WARPS,), "float32")
            warp_count = T.alloc_shared((_WARPS,), "int32")
            best = T.alloc_var("int64")
            below = T.alloc_var("int64")
            own = T.alloc_var("int64")
            largest = T.alloc_var("float32")
            total = T.alloc_var("float32")
            count = T.alloc_var("int32")
            value = T.alloc_var("float32")
            largest = -T.infinity("float32")
            for step in T.serial(T.ceildiv(num_ids, _STEP)):
                for u in T.unroll(_LOADS):
                    index = step * _STEP + u * _THREADS + thread
                    if index < num_ids:
                        largest = T.max(largest, logits[row, index])
            largest_of_block(largest, warp_largest, _WARPS, thread)
            own = _key(logits[row, token[row]], token[row])
            total = 0.0
            count = 0
            for step in T.serial(T.ceildiv(num_ids, _STEP)):
                for u in T.unroll(_LOADS):
                    index = step * _STEP + u * _THREADS + thread
                    if index < num_ids:
                        value = logits[row, index]
                        total += T.exp(value - largest)
                        count += T.if_then_else(_key(value, index) > own, 1, 0)
            sum_of_block(total, warp_sum, _WARPS, thread)
            sum_of_block(count, warp_count, _WARPS, thread)
            total = T.log(total)
            if thread == 0:
                logprob[row] = logits[row, token[row]] - largest - total
                rank[row] = T.cast(count, "int64") + T.int64(1)
            below = T.int64(0x7FFFFFFFFFFFFFFF)
            for i in T.serial(num_top):
                best = T.int64(0)
                for step in T.serial(T.ceildiv(num_ids, _STEP)):
                    for u in T.unroll(_LOADS):
                        index = step * _STEP + u * _THREADS + thread
                        if index < num_ids:
                            if _key(logits[row, index], index) < below:
                                best = T.max(best, _key(logits[row, index], index))
                largest_of_block(best, warp_key, _WARPS, thread)
                T.sync_threads()  # `warp_key` is written again
                below = best
                if thread == 0:
                    index = T.int64(_ID >> 1) - (best & T.int64(_ID >> 1))
                    top_id[row, i] = index
                    top_logprob[row, i] = logits[row, index] - largest - total

    return row_logprobs


def token_logprobs(logits: Tensor, token: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [R, V] float32, token [R] -> logprob, rank [R], top ids, theirs [R, n]; see contract `token_logprobs`."""
    (rows, num_ids), device = logits.shape, logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    n = min(num_top, num_ids)
    logprob = torch.empty(rows, dtype=torch.float32, device=device)
    rank = torch.empty(rows, dtype=torch.int64, device=device)
    top_id = torch.empty(rows, max(n, 1), dtype=torch.int64, device=device)  # a tensor has an address only with a value
    top_logprob = torch.empty(rows, max(n, 1), dtype=torch.float32, device=device)
    if rows:
        row_logprobs_program()(logits, token.contiguous(), logprob, rank, top_id, top_logprob, n)
    return logprob, rank, top_id[:, :n], top_logprob[:, :n]
