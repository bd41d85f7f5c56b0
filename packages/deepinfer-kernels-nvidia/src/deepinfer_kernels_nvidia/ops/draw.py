# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""The draw of a token: argmax_v (x_v + G(seed, position, v)), the lowest id of equals; G is defined in the core's
kernels/reference/philox.py.

    words of ids 4 c .. 4 c + 3 = Philox4x32-10(counter (c, position low, high, stream), key (seed low, high))
    G = float32(-ln(-ln((w + 0.5) 2^-32))), both logarithms in float64

    row   | block 0: 8192 ids | block 1 | ..      a block's threads make four ids at a time and keep the best of theirs

The noise never goes through memory: a row is read once. A block's best is one integer: the ordered bits of the value,
then 2^31 - 1 - id, so the largest of them is the largest value with the lowest id. A NaN counts as infinite, so that it
is found; a row without a finite best has failed.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, program

__all__ = ["draw_token"]

_THREADS = 256
_COUNTERS = 8  # of one thread, four ids each
_IDS = _THREADS * _COUNTERS * 4  # of one block
_ROUNDS, _MASK = 10, 0xFFFFFFFF
_LAST_ID = 0x7FFFFFFF
_INFINITY = 0x7F800000  # as an integer that is ordered as floats are; that of -inf is its complement
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


@program
def draw_blocks_program():
    """scores [rows, num_ids] with any row stride -> the best of every block of ids."""
    rows, num_ids, blocks = T.dynamic("rows"), T.dynamic("num_ids"), T.dynamic("blocks")
    stride = T.dynamic("stride", "int64")

    @T.macro
    def philox(word, low, high):
        """One call of Philox4x32-10 in place: word is the counter, then the result."""
        for turn in range(_ROUNDS):
            first = T.cast(word[0], "uint64") * T.uint64(_MULTIPLIER_0)
            second = T.cast(word[2], "uint64") * T.uint64(_MULTIPLIER_1)
            key_low = low + T.uint32(turn * _WEYL_0 & _MASK)
            key_high = high + T.uint32(turn * _WEYL_1 & _MASK)
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
            best = T.alloc_var("float32")
            best_id = T.alloc_var("int32")
            score = T.alloc_var("float32")
            uniform = T.alloc_var("float64")
            bits = T.alloc_var("int32")
            keys = T.alloc_shared((_THREADS,), "int64")
            own_key = T.alloc_fragment((_THREADS,), "int64")
            top = T.alloc_fragment((1,), "int64")
            best = -T.infinity("float32")
            best_id = num_ids
            for i in T.serial(_COUNTERS):
                counter = block * (_IDS // 4) + i * _THREADS + thread
                if counter * 4 < num_ids:
                    word[0] = T.cast(counter, "uint32")
                    word[1] = T.cast(position[row], "uint32")
                    word[2] = T.cast(position[row] >> T.int64(32), "uint32")
                    word[3] = T.cast(stream, "uint32")
                    philox(word, T.cast(seed[row], "uint32"), T.cast(seed[row] >> T.int64(32), "uint32"))
                    for j in T.unroll(4):
                        if counter * 4 + j < num_ids:
                            uniform = (T.cast(word[j], "float64") + T.float64(0.5)) * T.float64(2.0**-32)
                            uniform = -T.log(-T.log(uniform))
                            score = scores[row, counter * 4 + j] + T.cast(uniform, "float32")
                            score = T.if_then_else(T.isnan(score), T.infinity("float32"), score)
                            if score > best:
                                best = score
                                best_id = counter * 4 + j
            bits = T.reinterpret(T.if_then_else(best == 0.0, 0.0, best), "int32")
            bits = T.if_then_else(bits < 0, bits ^ T.int32(0x7FFFFFFF), bits)
            keys[thread] = (T.cast(bits, "int64") << T.int64(32)) | T.cast(_LAST_ID - best_id, "int64")
            T.copy(keys, own_key)
            T.reduce_max(own_key, top, dim=0)
            if thread == 0:
                out[row, block] = top[0]

    return draw_blocks


def draw_token(scores: Tensor, seed: Tensor, position: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """scores [R, V] float32, seed and position [R] int64 -> ids [R] int64, failed [R]; see contract `draw_token`."""
    rows, num_ids = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    keys = torch.empty(rows, -(-num_ids // _IDS), dtype=torch.int64, device=scores.device)
    if rows:
        draw_blocks_program()(scores, seed.contiguous(), position.contiguous(), keys, int(stream))
    best = keys.amax(1)
    value = best >> 32
    return (_LAST_ID - (best & _LAST_ID)).clamp_max(num_ids - 1), (value >= _INFINITY) | (value <= ~_INFINITY)
