# ruff: noqa: I002 - the annotations of a TileLang macro are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""One value of all threads of a block: the largest of theirs, their sum, the sums before each; in one order whatever
the row.

    lanes    five shuffles, with lane ^ 1, ^ 2, .. ^ 16 (for sums before, with lane - 1, - 2, .. - 16)
    warps    through shared memory, in their order: every thread of the block holds the result

For programs that place their barriers by hand: there is one between writing and reading `by_warp` [warps], which may be
written again behind the next.
"""

from deepinfer_kernels_nvidia.jit import T

__all__ = ["WARP", "largest_of_block", "sum_of_block", "sums_before"]

WARP = 32
_STEPS = 5  # 2^5 lanes


@T.macro
def _post(value, by_warp, thread):
    if thread % WARP == 0:
        by_warp[thread // WARP] = value
    T.sync_threads()


@T.macro
def largest_of_block(value: T.Ref, by_warp, warps, thread):
    for step in T.unroll(_STEPS):
        value = T.max(value, T.shfl_xor(value, 1 << step))
    _post(value, by_warp, thread)
    for w in T.unroll(warps):
        value = T.max(value, by_warp[w])


@T.macro
def sum_of_block(value: T.Ref, by_warp, warps, thread):
    for step in T.unroll(_STEPS):
        value += T.shfl_xor(value, 1 << step)
    _post(value, by_warp, thread)
    value = T.cast(0, value.dtype)
    for w in T.unroll(warps):
        value += by_warp[w]


@T.macro
def sums_before(own, before: T.Ref, total: T.Ref, by_warp, warps, thread):
    """before: the sum of what the threads with lower numbers own; total: of all."""
    before = own
    for step in T.unroll(_STEPS):
        below = T.shfl_up(before, 1 << step)
        before += T.if_then_else(thread % WARP >= (1 << step), below, T.cast(0, own.dtype))
    if thread % WARP == WARP - 1:
        by_warp[thread // WARP] = before
    T.sync_threads()
    before -= own
    total = T.cast(0, own.dtype)
    for w in T.unroll(warps):
        before += T.if_then_else(w < thread // WARP, by_warp[w], T.cast(0, own.dtype))
        total += by_warp[w]
