# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""The draw of a token: argmax_v (x_v + G(seed, position, v)), the lowest id of equals; G is defined in the core's
kernels/reference/philox.py.

    words of ids 4 c .. 4 c + 3 = Philox4x32-10(counter (c, position low, high, stream), key (seed low, high))
    G = float32(-ln(-ln((w + 0.5) 2^-32))), both logarithms in float64

    row   | block 0: 8192 ids | block 1 | ..      every thread: 32 sums with G in float32, kept in registers
                                                  the block:    their largest
                                                  every thread: G in float64 for sums within MARGIN of it, one or two

The noise never goes through memory: a row is read once. Two logarithms in float64 for every id would take four times
as long as reading it, so only what can win has them; which one wins is decided by the true G alone. A block's best is
one integer: the ordered bits of the value, then 2^31 - 1 - id, so the largest of them is the largest value with the
lowest id. A NaN counts as infinite, so that it is found; a row without a finite best has failed.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, program
from deepinfer_kernels_nvidia.ops.block_values import WARP, largest_of_block

__all__ = ["draw_token"]

_THREADS = 256
_WARPS = _THREADS // WARP
_COUNTERS = 8  # of one thread, four ids each
_HELD = 4 * _COUNTERS
_IDS = _THREADS * _HELD  # of one block
_ROUNDS, _MASK = 10, 0xFFFFFFFF
_LAST_ID = 0x7FFFFFFF
_INFINITY = 0x7F800000  # as an integer that is ordered as floats are; that of -inf is its complement
_LARGEST = 3e38
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
# Twice the error of `nearly_gumbel` (2e-5, most of it the device's fast logarithm), and of two roundings of the sum.
_MARGIN, _RELATIVE_MARGIN = 1e-4, 2.0**-21
_NEAR_ONE = 1.0 / 16.0


def nearly_gumbel(word):
    """-ln(-ln u) in float32, to 2e-5. Near u = 1, where -ln u cancels, it is a series of 1 - u, which is exact."""
    u = (T.cast(word, "float32") + T.float32(0.5)) * T.float32(2.0**-32)
    rest = (T.cast(~word, "float32") + T.float32(0.5)) * T.float32(2.0**-32)
    series = rest * (1.0 + rest * (0.5 + rest * (T.float32(1 / 3) + rest * 0.25)))
    return -T.__log(T.if_then_else(rest < T.float32(_NEAR_ONE), series, -T.__log(u)))


@program(tl__disable_thread_storage_sync=True)  # barriers are placed by hand
def draw_blocks_program():
    """scores [rows, num_ids] with any row stride -> the best of every block of ids."""
    rows, num_ids, blocks = T.dynamic("rows"), T.dynamic("num_ids"), T.dynamic("blocks")
    stride = T.dynamic("stride", "int64")

    @T.macro
    def philox(word, counter, position, stream, seed):
        """One call of Philox4x32-10: word is the counter, then the result."""
        word[0] = T.cast(counter, "uint32")
        word[1] = T.cast(position, "uint32")
        word[2] = T.cast(position >> T.int64(32), "uint32")
        word[3] = T.cast(stream, "uint32")
        for turn in range(_ROUNDS):
            first = T.cast(word[0], "uint64") * T.uint64(_MULTIPLIER_0)
            second = T.cast(word[2], "uint64") * T.uint64(_MULTIPLIER_1)
            key_low = T.cast(seed, "uint32") + T.uint32(turn * _WEYL_0 & _MASK)
            key_high = T.cast(seed >> T.int64(32), "uint32") + T.uint32(turn * _WEYL_1 & _MASK)
            word[4] = T.cast(second >> T.uint64(32), "uint32") ^ word[1] ^ key_low
            word[5] = T.cast(first >> T.uint64(32), "uint32") ^ word[3] ^ key_high
            word[1] = T.cast(second, "uint32")
            word[3] = T.cast(first, "uint32")
            word[0] = word[4]
            word[2] = word[5]

    @T.prim_func
    def draw_blocks(
        scores: T.StridedTensor((rows, num_ids), (stride, 1), "float32"),
        seed: T.Tensor((rows,), "int64"),
        position: T.Tensor((rows,), "int64"),
        out: T.Tensor((rows, blocks), "int64"),
        stream: T.int32,
    ):
        with T.Kernel(blocks, rows, threads=_THREADS) as (block, row):
            thread = T.get_thread_binding()
            word = T.alloc_local((6,), "uint32")
            near = T.alloc_local((_HELD,), "float32")
            warp_best = T.alloc_shared((_WARPS,), "float32")
            warp_key = T.alloc_shared((_WARPS,), "int64")
            best = T.alloc_var("float32")
            best_id = T.alloc_var("int32")
            score = T.alloc_var("float32")
            noise = T.alloc_var("float64")
            least = T.alloc_var("float32")
            chosen = T.alloc_var("uint32")
            bits = T.alloc_var("int32")
            key = T.alloc_var("int64")
            best = -T.infinity("float32")
            for i in T.unroll(_COUNTERS):
                counter = block * (_IDS // 4) + i * _THREADS + thread
                least = -T.infinity("float32")
                for j in T.unroll(4):
                    near[i * 4 + j] = -T.infinity("float32")
                    if counter * 4 + j < num_ids:
                        score = scores[row, counter * 4 + j]
                        near[i * 4 + j] = T.if_then_else(T.isnan(score), T.infinity("float32"), score)
                    least = T.max(least, near[i * 4 + j])
                if least > -T.infinity("float32"):
                    philox(word, counter, position[row], stream, seed[row])
                    for j in T.unroll(4):
                        near[i * 4 + j] += nearly_gumbel(word[j])
                        best = T.max(best, near[i * 4 + j])
            largest_of_block(best, warp_best, _WARPS, thread)
            least = best - (T.float32(_MARGIN) + T.float32(_RELATIVE_MARGIN) * T.min(T.abs(best), T.float32(_LARGEST)))
            chosen = T.uint32(0)
            for n in T.unroll(_HELD):
                if near[n] >= least and near[n] > -T.infinity("float32"):
                    chosen = chosen | T.uint32(1 << n)
            best = -T.infinity("float32")
            best_id = num_ids
            for n in T.serial(_HELD):
                if ((chosen >> T.cast(n, "uint32")) & T.uint32(1)) == T.uint32(1):
                    counter = block * (_IDS // 4) + n // 4 * _THREADS + thread
                    philox(word, counter, position[row], stream, seed[row])
                    for j in T.unroll(4):
                        if n % 4 == j:
                            noise = (T.cast(word[j], "float64") + T.float64(0.5)) * T.float64(2.0**-32)
                    noise = -T.log(-T.log(noise))
                    score = scores[row, counter * 4 + n % 4] + T.cast(noise, "float32")
                    score = T.if_then_else(T.isnan(score), T.infinity("float32"), score)
                    if score > best:
                        best = score
                        best_id = counter * 4 + n % 4
            bits = T.reinterpret(T.if_then_else(best == 0.0, 0.0, best), "int32")
            bits = T.if_then_else(bits < 0, bits ^ T.int32(0x7FFFFFFF), bits)
            key = (T.cast(bits, "int64") << T.int64(32)) | T.cast(_LAST_ID - best_id, "int64")
            largest_of_block(key, warp_key, _WARPS, thread)
            if thread == 0:
                out[row, block] = key

    return draw_blocks


@program
def draw_best_program():
    """The best of every block [rows, blocks] -> ids, failed [rows]; one thread a row."""
    rows, blocks = T.dynamic("rows"), T.dynamic("blocks")

    @T.prim_func
    def draw_best(
        keys: T.Tensor((rows, blocks), "int64"),
        ids: T.Tensor((rows,), "int64"),
        failed: T.Tensor((rows,), "uint8"),
        num_ids: T.int32,
    ):
        with T.Kernel(T.ceildiv(rows, _THREADS), threads=_THREADS) as part:
            row = part * _THREADS + T.get_thread_binding()
            key = T.alloc_var("int64")
            value = T.alloc_var("int32")
            if row < rows:
                key = keys[row, 0]
                for block in T.serial(1, blocks):
                    key = T.max(key, keys[row, block])
                value = T.cast(key >> T.int64(32), "int32")
                ids[row] = T.min(T.int64(_LAST_ID) - (key & T.int64(_LAST_ID)), T.cast(num_ids - 1, "int64"))
                failed[row] = T.if_then_else(value >= _INFINITY or value <= ~_INFINITY, T.uint8(1), T.uint8(0))

    return draw_best


def draw_token(scores: Tensor, seed: Tensor, position: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """scores [R, V] float32, seed and position [R] int64 -> ids [R] int64, failed [R]; see contract `draw_token`."""
    rows, num_ids = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    keys = torch.empty(rows, -(-num_ids // _IDS), dtype=torch.int64, device=scores.device)
    ids = torch.empty(rows, dtype=torch.int64, device=scores.device)
    failed = torch.empty(rows, dtype=torch.bool, device=scores.device)
    if rows:
        draw_blocks_program()(scores, seed.contiguous(), position.contiguous(), keys, int(stream))
        draw_best_program()(keys, ids, failed.view(torch.uint8), num_ids)
    return ids, failed
