# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""The best k of a row of scores, exactly: value descending, then lower index; -inf never enters.

A score and its index form one 64-bit key, so no two keys are equal and k of them is a threshold, not a choice:

    key      | order-preserving bits of the score | bits of the index, inverted |
    digits   |    11    |    11    |     10       |   11   |   11   |    10      |     of a radix select, first to last

One block of threads a row. A digit's histogram tells in which bin the k-th key lies; keys in higher bins are in, keys
in lower bins are out. As soon as the bin holds no more than CAPACITY keys they move to shared memory, and what remains
of the digits costs nothing.

    sample   some lines of a long row -> a bound that about 2 k of its scores reach
    read 1   what reaches the bound -> shared memory; if it is k scores at least and fits, only its digits are left
    else     read 2: histogram of the first digit         read 3: higher bins -> chosen, the bin -> shared memory

The sample decides what is read, never what is chosen.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, aligned, program
from deepinfer_kernels_nvidia.ops.block_values import WARP, sums_before

__all__ = ["CAPACITY", "HIDDEN", "candidate_blocks", "ordered_bits", "select_entries"]

CAPACITY = 4096  # keys that the last bin may hold to be moved to shared memory
_BINS = 2048
_THREADS = 512
_LOADS = 4  # vectors that a thread has under way
_LINE = 32  # scores of a sampled piece, 128 bytes
_SAMPLE_RANK = 16  # of the bound in the sample, at least
_VALUE_DIGITS, _DIGITS = 3, 6
HIDDEN = 0x007FFFFF  # order-preserving bits of -inf
_NO_INDEX = 0x7FFFFFFF
# what all threads of a block know alike
_VALUE, _VALUE_MASK, _INDEX, _INDEX_MASK = range(4)  # digits of the k-th key that are found, and which bits they cover
_SHIFT, _DIGIT_MASK = 4, 5  # where the present digit stands
_NEEDED, _HELD, _IS_LIST, _IS_FOUND = range(4)  # keys still to choose, keys with these digits, two flags


def ordered_bits(value):
    """uint32 that orders like the float; both zeros are equal."""
    bits = T.reinterpret(value, "int32")
    ordered = T.reinterpret(bits ^ ((bits >> 31) | T.int32(-(2**31))), "uint32")
    return ordered + T.if_then_else(ordered == T.uint32(0x7FFFFFFF), T.uint32(1), T.uint32(0))


def _inverted(index):
    return T.uint32(0xFFFFFFFF) - T.cast(index, "uint32")


def _matches(ordered, inverted, prefix):
    same_value = (ordered & prefix[_VALUE_MASK]) == prefix[_VALUE]
    same_index = (inverted & prefix[_INDEX_MASK]) == prefix[_INDEX]
    return T.And(T.And(same_value, same_index), ordered > T.uint32(HIDDEN))


def _above(ordered, inverted, prefix):
    value = ordered & prefix[_VALUE_MASK]
    higher_index = (inverted & prefix[_INDEX_MASK]) > prefix[_INDEX]
    return T.Or(value > prefix[_VALUE], T.And(value == prefix[_VALUE], higher_index))


@program(tl__disable_thread_storage_sync=True, tl__disable_buffer_init_check=True)  # barriers are placed by hand
def top_k_program(k: int, vector: int, marks: bool):
    """scores [rows, units * vector] -> [rows, k] ascending, -1 last; or, if `marks`, [rows, units] of 0 and 1."""
    rows, units = T.dynamic("rows"), T.dynamic("units")
    bins_a_thread = _BINS // _THREADS
    warps = _THREADS // WARP
    places = 1 << (k - 1).bit_length()  # what a sorting network takes
    capacity = max(CAPACITY, places)
    lanes = _LINE // vector  # threads on a sampled line
    sampled = _LOADS * _THREADS // lanes  # lines
    out_shape, out_dtype = ((rows, units), "uint8") if marks else ((rows, k), "int64")

    @T.macro
    def load(scores, row, step, thread, held):
        for u in T.unroll(_LOADS):
            unit = (step * _LOADS + u) * _THREADS + thread
            for v in T.unroll(vector):
                held[u, v] = -T.infinity("float32")
            if unit < units:
                for v in T.vectorized(vector):
                    held[u, v] = scores[row, unit, v]

    @T.macro
    def count(ordered, inverted, prefix, digit, histogram):
        if _matches(ordered, inverted, prefix):
            bits = T.if_then_else(digit < _VALUE_DIGITS, ordered, inverted)
            T.atomic_add(histogram[T.cast((bits >> prefix[_SHIFT]) & prefix[_DIGIT_MASK], "int32")], 1)

    @T.macro
    def find_bin(thread, histogram, warp_total, needed, found, own, before, total):
        """found: the bin with the needed-th key, keys above it, keys in it; total: all keys counted."""
        own[0] = 0
        for i in T.unroll(bins_a_thread):
            own[0] += histogram[_BINS - 1 - thread * bins_a_thread - i]
        sums_before(own[0], before[0], total[0], warp_total, warps, thread)
        for i in T.unroll(bins_a_thread):
            held = histogram[_BINS - 1 - thread * bins_a_thread - i]
            if before[0] < needed and needed <= before[0] + held:
                found[0] = _BINS - 1 - thread * bins_a_thread - i
                found[1] = before[0]
                found[2] = held
            before[0] += held
        T.sync_threads()

    @T.macro
    def narrow(digit, prefix, state, found, total):
        if total[0] <= state[_NEEDED]:  # everything that has these digits is among the best
            state[_IS_FOUND] = 1
            state[_HELD] = total[0]
        else:
            bits, mask = T.cast(found[0], "uint32") << prefix[_SHIFT], prefix[_DIGIT_MASK] << prefix[_SHIFT]
            if digit < _VALUE_DIGITS:
                prefix[_VALUE] = prefix[_VALUE] | bits
                prefix[_VALUE_MASK] = prefix[_VALUE_MASK] | mask
            else:
                prefix[_INDEX] = prefix[_INDEX] | bits
                prefix[_INDEX_MASK] = prefix[_INDEX_MASK] | mask
            state[_NEEDED] = state[_NEEDED] - found[1]
            state[_HELD] = found[2]
            if found[2] == state[_NEEDED]:
                state[_IS_FOUND] = 1

    @T.macro
    def start_digit(digit, thread, prefix, histogram):
        prefix[_SHIFT] = T.cast(T.max(21 - digit % _VALUE_DIGITS * 11, 0), "uint32")
        prefix[_DIGIT_MASK] = T.if_then_else(
            digit % _VALUE_DIGITS == _VALUE_DIGITS - 1, T.uint32(_BINS // 2 - 1), T.uint32(_BINS - 1)
        )
        for i in T.unroll(bins_a_thread):
            histogram[i * _THREADS + thread] = 0
        T.sync_threads()

    @T.macro
    def bound(scores, row, thread, held, prefix, state, histogram, warp_total, found, own, before, total):
        """prefix: digits of a score that about 2 k of the row reach, by a sample; no digits where it has too few."""
        stride = T.ceildiv(T.ceildiv(units, lanes), sampled)
        state[_NEEDED] = T.max(2 * k // stride, _SAMPLE_RANK)
        for u in T.unroll(_LOADS):
            line = (u * _THREADS + thread) // lanes
            unit = (line * stride + line % stride) * lanes + thread % lanes
            for v in T.unroll(vector):
                held[u, v] = -T.infinity("float32")
            if unit < units:
                for v in T.vectorized(vector):
                    held[u, v] = scores[row, unit, v]
        for digit in T.serial(2):
            start_digit(digit, thread, prefix, histogram)
            for u in T.unroll(_LOADS):
                for v in T.unroll(vector):
                    count(ordered_bits(held[u, v]), T.uint32(0), prefix, digit, histogram)
            T.sync_threads()
            find_bin(thread, histogram, warp_total, state[_NEEDED], found, own, before, total)
            if total[0] >= state[_NEEDED]:
                state[_NEEDED] = state[_NEEDED] - found[1]
                prefix[_VALUE] = prefix[_VALUE] | (T.cast(found[0], "uint32") << prefix[_SHIFT])
                prefix[_VALUE_MASK] = prefix[_VALUE_MASK] | (prefix[_DIGIT_MASK] << prefix[_SHIFT])

    @T.macro
    def gather(scores, row, thread, held, prefix, candidate, candidate_index, filled):
        """What reaches the bound, as far as it fits; filled[1] counts all of it."""
        for step in T.serial(T.ceildiv(units, _LOADS * _THREADS)):
            load(scores, row, step, thread, held)
            for u in T.unroll(_LOADS):
                for v in T.unroll(vector):
                    ordered = ordered_bits(held[u, v])
                    if T.And(ordered >= prefix[_VALUE], ordered > T.uint32(HIDDEN)):
                        place = T.atomic_add(filled[1], 1, return_prev=True)
                        if place < capacity:
                            candidate[place] = held[u, v]
                            candidate_index[place] = ((step * _LOADS + u) * _THREADS + thread) * vector + v
        T.sync_threads()

    @T.macro
    def collect(scores, row, thread, held, prefix, chosen, candidate, candidate_index, filled):
        for step in T.serial(T.ceildiv(units, _LOADS * _THREADS)):
            load(scores, row, step, thread, held)
            for u in T.unroll(_LOADS):
                for v in T.unroll(vector):
                    index = ((step * _LOADS + u) * _THREADS + thread) * vector + v
                    ordered, inverted = ordered_bits(held[u, v]), _inverted(index)
                    if _matches(ordered, inverted, prefix):
                        place = T.atomic_add(filled[1], 1, return_prev=True)
                        candidate[place] = held[u, v]
                        candidate_index[place] = index
                    elif _above(ordered, inverted, prefix):
                        place = T.atomic_add(filled[0], 1, return_prev=True)
                        chosen[place] = index
        T.sync_threads()

    @T.macro
    def sort(thread, chosen):
        """Ascending, by a bitonic network."""
        for size in T.serial(1, places.bit_length()):
            for step in T.serial(size):
                log_distance = size - 1 - step
                distance = 1 << log_distance
                for half in T.unroll(-(-places // 2 // _THREADS)):
                    pair = half * _THREADS + thread
                    if pair < places // 2:
                        low = ((pair >> log_distance) << (log_distance + 1)) + (pair & (distance - 1))
                        first, second = chosen[low], chosen[low + distance]
                        smaller, larger = T.min(first, second), T.max(first, second)
                        descending = ((low >> size) & 1) == 1
                        chosen[low] = T.if_then_else(descending, larger, smaller)
                        chosen[low + distance] = T.if_then_else(descending, smaller, larger)
                T.sync_threads()

    @T.prim_func
    def top_k(scores: T.Tensor((rows, units, vector), "float32"), out: T.Tensor(out_shape, out_dtype)):
        with T.Kernel(rows, threads=_THREADS) as row:
            thread = T.get_thread_binding()
            histogram = T.alloc_shared((_BINS,), "int32")
            candidate = T.alloc_shared((capacity,), "float32")
            candidate_index = T.alloc_shared((capacity,), "int32")
            chosen = T.alloc_shared((places,), "int32")
            warp_total = T.alloc_shared((warps,), "int32")
            found = T.alloc_shared((3,), "int32")
            filled = T.alloc_shared((2,), "int32")  # of chosen, of candidate
            held = T.alloc_local((_LOADS, vector), "float32")
            prefix = T.alloc_local((6,), "uint32")
            state = T.alloc_local((4,), "int32")
            own = T.alloc_local((1,), "int32")
            before = T.alloc_local((1,), "int32")
            total = T.alloc_local((1,), "int32")
            for i in T.unroll(4):
                prefix[i] = T.uint32(0)
                state[i] = 0
            state[_NEEDED] = k
            if thread < 2:
                filled[thread] = 0
            for i in T.serial(T.ceildiv(places, _THREADS)):
                if i * _THREADS + thread < places:
                    chosen[i * _THREADS + thread] = _NO_INDEX
            if not marks:
                T.sync_threads()
                if units * vector > capacity:
                    bound(
                        scores,
                        row,
                        thread,
                        held,
                        prefix,
                        state,
                        histogram,
                        warp_total,
                        found,
                        own,
                        before,
                        total,
                    )
                gather(scores, row, thread, held, prefix, candidate, candidate_index, filled)
                state[_NEEDED] = k
                state[_HELD] = filled[1]
                least = T.if_then_else(prefix[_VALUE] == T.uint32(0), 0, k)  # without a bound all there is was taken
                state[_IS_LIST] = T.if_then_else(T.And(filled[1] >= least, filled[1] <= capacity), 1, 0)
                for i in T.unroll(4):
                    prefix[i] = T.uint32(0)
                T.sync_threads()
                if thread == 0 and state[_IS_LIST] == 0:
                    filled[1] = 0
                T.sync_threads()
            for digit in T.serial(_DIGITS):
                if state[_IS_FOUND] == 0:
                    start_digit(digit, thread, prefix, histogram)
                    if state[_IS_LIST] == 1:
                        for i in T.serial(T.ceildiv(filled[1] - thread, _THREADS)):
                            place = i * _THREADS + thread
                            inverted = _inverted(candidate_index[place])
                            count(ordered_bits(candidate[place]), inverted, prefix, digit, histogram)
                    else:
                        for step in T.serial(T.ceildiv(units, _LOADS * _THREADS)):
                            load(scores, row, step, thread, held)
                            for u in T.unroll(_LOADS):
                                for v in T.unroll(vector):
                                    index = ((step * _LOADS + u) * _THREADS + thread) * vector + v
                                    count(ordered_bits(held[u, v]), _inverted(index), prefix, digit, histogram)
                    T.sync_threads()
                    find_bin(thread, histogram, warp_total, state[_NEEDED], found, own, before, total)
                    narrow(digit, prefix, state, found, total)
                    if not marks and state[_IS_LIST] == 0 and state[_HELD] <= capacity:
                        collect(scores, row, thread, held, prefix, chosen, candidate, candidate_index, filled)
                        state[_IS_LIST] = 1
            if marks:
                for step in T.serial(T.ceildiv(units, _THREADS)):
                    index = step * _THREADS + thread
                    if index < units:
                        ordered, inverted = ordered_bits(scores[row, index, 0]), _inverted(index)
                        enters = _matches(ordered, inverted, prefix) or _above(ordered, inverted, prefix)
                        out[row, index] = T.if_then_else(enters and ordered > T.uint32(HIDDEN), T.uint8(1), T.uint8(0))
            else:
                for i in T.serial(T.ceildiv(filled[1] - thread, _THREADS)):
                    place = i * _THREADS + thread
                    ordered, inverted = ordered_bits(candidate[place]), _inverted(candidate_index[place])
                    if _matches(ordered, inverted, prefix) or _above(ordered, inverted, prefix):
                        chosen[T.atomic_add(filled[0], 1, return_prev=True)] = candidate_index[place]
                T.sync_threads()
                sort(thread, chosen)
                for i in T.serial(T.ceildiv(k, _THREADS)):
                    place = i * _THREADS + thread
                    if place < k:
                        out[row, place] = T.if_then_else(
                            chosen[place] == _NO_INDEX, T.int64(-1), T.cast(chosen[place], "int64")
                        )

    return top_k


@program
def block_best_program(block: int):
    """scores [rows, n], num_visible [rows] -> the best of each block [rows, blocks]; +inf where the newest entry is."""
    rows, n, blocks = T.dynamic("rows"), T.dynamic("n"), T.dynamic("blocks")

    @T.prim_func
    def block_best(
        scores: T.Tensor((rows, n), "float32"),
        num_visible: T.Tensor((rows,), "int32"),
        best: T.Tensor((rows, blocks), "float32"),
    ):
        with T.Kernel(rows, T.ceildiv(blocks, _THREADS), threads=_THREADS) as (row, part):
            b = part * _THREADS + T.get_thread_binding()
            most = T.alloc_var("float32")
            if b < blocks:
                most = -T.infinity("float32")
                for i in T.unroll(block):
                    if b * block + i < n:
                        most = T.max(most, scores[row, b * block + i])
                newest = T.if_then_else(num_visible[row] > 0, (num_visible[row] - 1) // block, -1)
                best[row, b] = T.if_then_else(b == newest, T.infinity("float32"), most)

    return block_best


def select_entries(scores: Tensor, k: int) -> Tensor:
    """scores [R, N] float32 -> the k best of a row [R, k] int64, ascending, -1 last; see contract `select_entries`."""
    rows, n = scores.shape
    chosen = torch.empty(rows, k, dtype=torch.int64, device=scores.device)
    if not n:
        return chosen.fill_(-1)
    if chosen.numel():
        vector = 4 if n % 4 == 0 else 1
        top_k_program(k, vector, False)(aligned(scores).view(rows, -1, vector), chosen)
    return chosen


def candidate_blocks(scores: Tensor, num_visible: Tensor, block: int, top_blocks: int) -> Tensor:
    """scores [R, N], -inf where invisible -> marked blocks [R, ceil(N / block)]; see contract `candidate_blocks`."""
    rows, n = scores.shape
    best = torch.empty(rows, -(-n // block), dtype=torch.float32, device=scores.device)
    marks = torch.empty_like(best, dtype=torch.uint8)
    if best.numel():
        block_best_program(block)(scores.contiguous(), num_visible.to(torch.int32), best)
        top_k_program(top_blocks, 1, True)(best[..., None], marks)
    return marks.view(torch.bool)
