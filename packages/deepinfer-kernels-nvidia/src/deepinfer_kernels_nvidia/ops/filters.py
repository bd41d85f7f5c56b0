# ruff: noqa: I002, SIM102 - annotations of a TileLang program are its signature; `and` reads both of its sides
# pyright: basic, reportInvalidTypeForm=false
"""Temperature, top-k, top-p and min-p of a row, without sorting it (the order is that of the contract).

    key of an entry  = (order-preserving bits of x / T, id inverted): no two are equal, so a cut is a threshold on keys
    top-k            keeps the k largest keys                                    amount of an entry: 1
    top-p            keeps the fewest largest keys whose weights reach p         amount: exp(x - max) in units of 2^-44

Both are one search: the largest key down to which the amounts reach what is needed. Digit by digit, 11 bits at a time,
a histogram of amounts tells in which bin that key lies:

    value | 11 | 11 | 10 |   then, where only some of the equal values enter,   | 11 | 11 | of the id

One block of threads a row, which it reads once for each digit; its second read is from L2. Weights are integers, so
their sums have no order: rows are invariant, whatever the atomic additions do. An integer of 64 bits is added as two
words, the carry of the first by its old value, because shared memory adds words only. Against the reference's float64
sums a set differs where its weight comes within about 1e-11 of top_p. A row with a NaN or an infinite logit is left as
it is: its draw fails, as the reference's.
"""

import torch
from torch import Tensor

from deepinfer_core.kernels.reference import filters as reference
from deepinfer_core.kernels.reference.columns import to_device
from deepinfer_core.kernels.reference.filters import RowFilters
from deepinfer_kernels_nvidia.jit import T, program
from deepinfer_kernels_nvidia.ops.block_values import WARP, largest_of_block, sums_before
from deepinfer_kernels_nvidia.ops.select import HIDDEN, ordered_bits

__all__ = ["filter_logits"]

_THREADS, _LOADS = 512, 8
_STEP = _THREADS * _LOADS  # ids that a block has under way
_WARPS = _THREADS // WARP
_BINS, _DIGIT_BITS = 2048, 11
_OWN = _BINS // _THREADS  # bins that a thread adds up
_VALUE_DIGITS, _DIGITS = 3, 5
_ID_BITS = 2 * _DIGIT_BITS
_UNIT = 2.0**44
_NO_WEIGHT = -32.0  # exp of it is less than half a unit
_MOST_IDS = 1 << 19  # so many units of 2^44 fit into 63 bits


def _inverted(index):
    return T.uint32((1 << _ID_BITS) - 1) - T.cast(index, "uint32")


def _probability(value, largest):
    """exp(value - largest) in float64, where the difference is exact."""
    return T.exp(T.cast(value, "float64") - T.cast(largest, "float64"))


def _weight(value, largest):
    units = T.cast(_probability(value, largest) * T.float64(_UNIT) + T.float64(0.5), "uint64")
    return T.if_then_else(value - largest > T.float32(_NO_WEIGHT), units, T.uint64(0))


@program(tl__disable_thread_storage_sync=True, tl__disable_buffer_init_check=True)  # barriers are placed by hand
def filter_rows_program():
    """logits [rows, num_ids] with any row stride -> out [rows, num_ids]."""
    rows, num_ids, stride = T.dynamic("rows"), T.dynamic("num_ids"), T.dynamic("stride", "int64")

    @T.macro
    def load(values, row, step, thread, held):
        for u in T.unroll(_LOADS):
            held[u] = -T.infinity("float32")  # never stays
            if step * _STEP + u * _THREADS + thread < num_ids:
                held[u] = values[row, step * _STEP + u * _THREADS + thread]

    @T.macro
    def add(low, high, place, amount, scratch):
        scratch[0] = T.atomic_add(low[place], T.cast(amount, "uint32"), return_prev=True)
        scratch[1] = T.cast(amount >> T.uint64(32), "uint32")
        if scratch[0] + T.cast(amount, "uint32") < scratch[0]:
            scratch[1] += T.uint32(1)
        if scratch[1] > T.uint32(0):
            T.atomic_add(high[place], scratch[1])

    @T.macro
    def find_bin(thread, low, high, warp_total, found, needed, own, before, total):
        """found: number of the bin with which, from above, the amounts reach `needed`; those above it; its own."""
        own[0] = T.uint64(0)
        for i in T.unroll(_OWN):
            place = _BINS - 1 - thread * _OWN - i
            own[0] += (T.cast(high[place], "uint64") << T.uint64(32)) | T.cast(low[place], "uint64")
        sums_before(own[0], before[0], total[0], warp_total, _WARPS, thread)
        for i in T.unroll(_OWN):
            place = _BINS - 1 - thread * _OWN - i
            held = (T.cast(high[place], "uint64") << T.uint64(32)) | T.cast(low[place], "uint64")
            if before[0] < needed[0] and needed[0] <= before[0] + held:
                found[0] = T.cast(place, "uint64")
                found[1] = before[0]
                found[2] = held
            before[0] += held
        T.sync_threads()

    @T.macro
    def cut(
        by_weight, share, out, row, thread, largest, least, known, low, high, warp_total, found, needed, own,
        before, total, number, active, held, key,
    ):  # fmt: skip
        """Raise `least`, the smallest key that stays (value bits, inverted id), until the amounts just reach needed."""
        active[0] = 1
        for i in T.unroll(4):
            known[i] = T.uint32(0)  # digits of the value and their mask, of the id and theirs
        for digit in T.serial(_DIGITS):
            if active[0] == 1:
                number[0] = T.if_then_else(
                    digit < _VALUE_DIGITS, T.max(21 - digit * _DIGIT_BITS, 0), (_DIGITS - 1 - digit) * _DIGIT_BITS
                )  # where the digit stands
                number[1] = T.if_then_else(digit == _VALUE_DIGITS - 1, _BINS // 2 - 1, _BINS - 1)
                for i in T.unroll(_OWN):
                    low[i * _THREADS + thread] = T.uint32(0)
                    high[i * _THREADS + thread] = T.uint32(0)
                T.sync_threads()
                for step in T.serial(T.ceildiv(num_ids, _STEP)):
                    load(out, row, step, thread, held)
                    for u in T.unroll(_LOADS):
                        key[0] = ordered_bits(held[u])
                        key[1] = _inverted(step * _STEP + u * _THREADS + thread)
                        stays = key[0] > least[0] or (key[0] == least[0] and key[1] >= least[1])
                        if stays and (key[0] & known[1]) == known[0] and (key[1] & known[3]) == known[2]:
                            number[2] = (
                                T.cast(
                                    T.if_then_else(digit < _VALUE_DIGITS, key[0], key[1])
                                    >> T.cast(number[0], "uint32"),
                                    "int32",
                                )
                                & number[1]
                            )
                            if by_weight and digit < _VALUE_DIGITS:
                                own[0] = _weight(held[u], largest)
                            else:
                                own[0] = T.uint64(1)
                            add(low, high, number[2], own[0], key)
                T.sync_threads()
                if digit == 0 and by_weight:
                    find_bin(thread, low, high, warp_total, found, needed, own, before, total)
                    needed[0] = T.max(T.cast(T.ceil(share * T.cast(total[0], "float64")), "uint64"), T.uint64(1))
                find_bin(thread, low, high, warp_total, found, needed, own, before, total)
                if total[0] < needed[0]:  # everything stays
                    active[0] = 0
                else:
                    if digit < _VALUE_DIGITS:
                        known[0] = known[0] | (T.cast(found[0], "uint32") << T.cast(number[0], "uint32"))
                        known[1] = known[1] | (T.cast(number[1], "uint32") << T.cast(number[0], "uint32"))
                    else:
                        known[2] = known[2] | (T.cast(found[0], "uint32") << T.cast(number[0], "uint32"))
                        known[3] = known[3] | (T.cast(number[1], "uint32") << T.cast(number[0], "uint32"))
                    needed[0] = needed[0] - found[1]
                    if digit == _VALUE_DIGITS - 1:
                        if known[0] > least[0]:
                            least[1] = T.uint32(0)
                        least[0] = known[0]
                        # All that are left have one value; so many of them enter.
                        own[0] = T.uint64(1)
                        if by_weight:
                            bits = T.reinterpret(
                                T.if_then_else(
                                    (known[0] >> T.uint32(31)) > T.uint32(0), known[0] ^ T.uint32(1 << 31), ~known[0]
                                ),
                                "float32",
                            )
                            own[0] = _weight(bits, largest)
                        needed[0] = (needed[0] + own[0] - T.uint64(1)) // own[0]
                        if found[2] // own[0] <= needed[0]:
                            active[0] = 0
                    if digit == _DIGITS - 1:
                        least[1] = known[2]
                T.sync_threads()

    @T.prim_func
    def filter_rows(
        logits: T.StridedTensor((rows, num_ids), (stride, 1), "float32"),
        temperature: T.Tensor((rows,), "float32"),
        top_k: T.Tensor((rows,), "int64"),
        top_p: T.Tensor((rows,), "float64"),
        min_p: T.Tensor((rows,), "float64"),
        out: T.Tensor((rows, num_ids), "float32"),
    ):
        with T.Kernel(rows, threads=_THREADS) as row:
            thread = T.get_thread_binding()
            low = T.alloc_shared((_BINS,), "uint32")
            high = T.alloc_shared((_BINS,), "uint32")
            warp_total = T.alloc_shared((_WARPS,), "uint64")
            found = T.alloc_shared((3,), "uint64")
            warp_largest = T.alloc_shared((_WARPS,), "float32")
            largest = T.alloc_var("float32")
            is_odd = T.alloc_var("int32")
            least = T.alloc_local((2,), "uint32")
            known = T.alloc_local((4,), "uint32")
            needed = T.alloc_local((1,), "uint64")
            own = T.alloc_local((1,), "uint64")
            before = T.alloc_local((1,), "uint64")
            total = T.alloc_local((1,), "uint64")
            number = T.alloc_local((3,), "int32")  # where a digit stands, its mask, the digit of an entry
            active = T.alloc_local((1,), "int32")
            held = T.alloc_local((_LOADS,), "float32")
            key = T.alloc_local((2,), "uint32")
            largest = -T.infinity("float32")
            is_odd = 0
            for step in T.serial(T.ceildiv(num_ids, _STEP)):
                load(logits, row, step, thread, held)
                for u in T.unroll(_LOADS):
                    held[u] = held[u] / temperature[row]
                    largest = T.max(largest, held[u])
                    if T.isnan(held[u]) or held[u] == T.infinity("float32"):
                        is_odd = 1
                    if step * _STEP + u * _THREADS + thread < num_ids:
                        out[row, step * _STEP + u * _THREADS + thread] = held[u]
            is_odd = T.syncthreads_or(is_odd)
            largest_of_block(largest, warp_largest, _WARPS, thread)
            least[0] = T.uint32(HIDDEN + 1)
            least[1] = T.uint32(0)
            if is_odd == 0:
                if top_k[row] > T.int64(0):
                    needed[0] = T.cast(top_k[row], "uint64")
                    cut(
                        False, T.float64(0.0), out, row, thread, largest, least, known, low, high, warp_total, found,
                        needed, own, before, total, number, active, held, key,
                    )  # fmt: skip
                if top_p[row] < T.float64(1.0):
                    needed[0] = T.uint64(1)
                    cut(
                        True, top_p[row], out, row, thread, largest, least, known, low, high, warp_total, found,
                        needed, own, before, total, number, active, held, key,
                    )  # fmt: skip
                for step in T.serial(T.ceildiv(num_ids, _STEP)):
                    load(out, row, step, thread, held)
                    for u in T.unroll(_LOADS):
                        key[0] = ordered_bits(held[u])
                        key[1] = _inverted(step * _STEP + u * _THREADS + thread)
                        if key[0] < least[0] or (key[0] == least[0] and key[1] < least[1]):
                            held[u] = -T.infinity("float32")
                        elif min_p[row] > T.float64(0.0):
                            if _probability(held[u], largest) < min_p[row]:
                                held[u] = -T.infinity("float32")
                        if step * _STEP + u * _THREADS + thread < num_ids:
                            out[row, step * _STEP + u * _THREADS + thread] = held[u]

    return filter_rows


def filter_logits(logits: Tensor, filters: RowFilters) -> Tensor:
    """logits [R, V] float32 -> [R, V]; see contract `filter_logits`. Temperature alone is at most one call of torch, in
    the reference.
    """
    if not filters.chooses:
        return reference.filter_logits(logits, filters)
    device = logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = torch.empty(logits.shape, dtype=torch.float32, device=device)
    if out.numel():
        columns = (filters.temperature, filters.top_k, filters.top_p, filters.min_p)
        filter_rows_program()(logits, *(to_device(column, device) for column in columns), out)
    return out
