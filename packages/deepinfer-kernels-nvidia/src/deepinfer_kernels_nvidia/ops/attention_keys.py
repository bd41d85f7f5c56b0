# ruff: noqa: I002 - TileLang macros are parsed, not run
# pyright: basic, reportInvalidTypeForm=false
"""Packed cache records -> tiles of bf16 keys in shared memory: the work of the producing warp group of `attend`.

    window       | dim e4m3 codes            | dim / 32 bytes, powers of two |     528 bytes for dim = 512
    compressed   | dim / 2 bytes, e2m1 codes | dim / 16 e4m3 scales          |     288 bytes

    list of keys --> rows and visibility, 2 tiles ahead, in a ring of shared memory
    records --> registers, 1 tile ahead --decode--> keys[buffer]

128 threads share a tile in units of 32 values. Eight neighbours decode the same part of eight keys: their 16-byte
stores fall into eight swizzled places of a column, so they meet no bank twice. The next tile is loaded when the present
one has been handed over, not between its units: a warp counts its loads in six scoreboards, and a wait for one unit
would wait for the newest load of another. Values are exact in bf16: a code has at most four significant bits, a
scale four.
"""

from collections.abc import Callable
from typing import Any

from deepinfer_kernels_nvidia.jit import T
from deepinfer_kernels_nvidia.ops.fp4 import bf16_of_codes
from deepinfer_kernels_nvidia.ops.fp8 import TWO_TO_120, bf16_of_e4m3, bf16_of_scale, pair_of_power, times

__all__ = ["BUFFERS", "SLOTS", "THREADS", "TILE", "key_producer"]

TILE = 64  # keys
THREADS = 128  # of a warp group
BUFFERS = 2  # tiles of keys in shared memory
SLOTS = 4  # tiles whose rows and visibility are: two ahead of the decoder, two that consumers may still read
_UNIT = 32  # values that a thread decodes at a time
_HALF = _UNIT // 2  # what one load of 16 bytes brings of a window record
_LANES = 8
_BARRIER = 3  # number of the group's own barrier


def _unit(i: Any, thread: Any, units_of_a_key: int) -> tuple[Any, Any]:
    """Key within the tile, and unit within the key, of a thread's unit i."""
    group = i * (THREADS // _LANES) + thread // _LANES
    return thread % _LANES + group // units_of_a_key * _LANES, group % units_of_a_key


def _window_macros(dim: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """fetch, decode: the left (0) or right (1) half of every unit; a whole tile would take twice the registers."""
    count = dim // _UNIT

    @T.macro
    def fetch(cache, cache_pairs, rows, n, right, codes, scales, thread):
        for i in T.unroll(TILE * count // THREADS):
            key, unit = _unit(i, thread, count)
            for v in T.vectorized(_HALF):
                codes[i, v] = cache[rows[n % SLOTS, key], unit * _UNIT + right * _HALF + v]
            scales[i] = cache_pairs[rows[n % SLOTS, key], (dim + unit) // 2]

    @T.macro
    def decode(codes, scales, right, keys, buffer, thread):
        word = T.view(codes, (TILE * count // THREADS, 4), "uint32")
        decoded = T.alloc_local((_HALF // 2,), "uint32")
        value = T.view(decoded, (_HALF,), "bfloat16")
        for i in T.unroll(TILE * count // THREADS):
            key, unit = _unit(i, thread, count)
            power = pair_of_power(T.cast(scales[i], "uint32") >> T.cast(unit % 2 * 8, "uint32") & T.uint32(255))
            for w in T.unroll(4):
                for place, pair in tuple(enumerate(bf16_of_e4m3(word[i, w]))):
                    decoded[2 * w + place] = times(times(pair, T.uint32(TWO_TO_120)), power)
            for c in T.unroll(_HALF // 8):
                for v in T.vectorized(8):
                    column = unit % (count // 2) * _UNIT + right * _HALF + c * 8 + v
                    keys[buffer, unit // (count // 2), key, column] = value[c * 8 + v]

    return fetch, decode


def _entry_macros(dim: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """fetch, decode: whole units."""
    count = dim // _UNIT

    @T.macro
    def fetch(cache, cache_pairs, rows, n, codes, scales, thread):
        for i in T.unroll(TILE * count // THREADS):
            key, unit = _unit(i, thread, count)
            for v in T.vectorized(_UNIT // 2):
                codes[i, v] = cache[rows[n % SLOTS, key], unit * (_UNIT // 2) + v]
            scales[i] = cache_pairs[rows[n % SLOTS, key], dim // 4 + unit]

    @T.macro
    def decode(codes, scales, keys, buffer, thread):
        word = T.view(codes, (TILE * count // THREADS, 4), "uint32")
        decoded = T.alloc_local((_UNIT // 2,), "uint32")
        value = T.view(decoded, (_UNIT,), "bfloat16")
        for i in T.unroll(TILE * count // THREADS):
            key, unit = _unit(i, thread, count)
            for w in T.unroll(4):
                scale = times(bf16_of_scale(T.cast(scales[i], "uint32"), w // 2), T.uint32(TWO_TO_120))
                for place, pair in tuple(enumerate(bf16_of_codes(word[i, w]))):
                    decoded[4 * w + place] = times(pair, scale)
            for c in T.unroll(_UNIT // 8):
                for v in T.vectorized(8):
                    column = unit % (count // 2) * _UNIT + c * 8 + v
                    keys[buffer, unit // (count // 2), key, column] = value[c * 8 + v]

    return fetch, decode


@T.macro
def _look_up(window_list, entry_list, row, near, far, t, place, ahead, thread):
    """ahead[place] = this thread's key of the row's tile t, -1 where there is none."""
    ahead[place] = -1
    if t < near:
        ahead[place] = window_list[row, t, thread % TILE]
    else:
        if t < near + far:
            ahead[place] = entry_list[row, t - near, thread % TILE]


@T.macro
def _post(ahead, place, rows, bias, n, thread):
    """Rows to read, and what hides the invisible ones, of the row's tile n."""
    if thread < TILE:
        rows[n % SLOTS, thread] = T.max(ahead[place], 0)
        bias[n % SLOTS, thread] = T.if_then_else(ahead[place] >= 0, 0.0, -T.infinity("float32"))


def key_producer(dim: int, has_entries: bool) -> Callable[..., None]:
    """Macro of a warp group that fills `keys` with a row's tiles, window before entries: `near` and `far` of them. It
    waits on `empty` and arrives on `full`.
    """
    units = TILE * dim // _UNIT // THREADS
    fetch_window, decode_window = _window_macros(dim)
    fetch_entries, decode_entries = _entry_macros(dim)

    @T.macro
    def wait_for_buffer(empty, t):
        T.mbarrier_wait_parity(empty[t % BUFFERS], (t // BUFFERS + 1) % 2)

    @T.macro
    def hand_over(window_list, entry_list, row, near, far, t, ahead, rows, bias, full, thread):
        """Tile t to the consumers; then the lists two and three tiles ahead."""
        T.fence_proxy_async()
        T.mbarrier_arrive(full[t % BUFFERS])
        _post(ahead, 2, rows, bias, t + 2, thread)
        _look_up(window_list, entry_list, row, near, far, t + 3, 2, ahead, thread)
        T.sync_threads(_BARRIER, THREADS)

    @T.macro
    def fetch_tile(window, window_pairs, entry, entry_pairs, near, far, t, rows, codes, scales, thread):
        if t < near:
            fetch_window(window, window_pairs, rows, t, 0, codes, scales, thread)
        else:
            if t < near + far:
                fetch_entries(entry, entry_pairs, rows, t, codes, scales, thread)

    @T.macro
    def produce(
        window,
        window_pairs,
        window_list,
        entry,
        entry_pairs,
        entry_list,
        row,
        near,
        far,
        keys,
        rows,
        bias,
        full,
        empty,
        thread,
    ):
        ahead = T.alloc_local((3,), "int32")
        codes = T.alloc_local((units, 16), "uint8")
        scales = T.alloc_local((units,), "uint16")
        for t in T.unroll(3):
            _look_up(window_list, entry_list, row, near, far, t, t, ahead, thread)
        for t in T.unroll(2):
            _post(ahead, t, rows, bias, t, thread)
        T.sync_threads(_BARRIER, THREADS)
        fetch_tile(window, window_pairs, entry, entry_pairs, near, far, 0, rows, codes, scales, thread)
        for t in T.serial(near):
            wait_for_buffer(empty, t)
            # A loop, not two copies: ptxas keeps the longer code within its registers only with a spill.
            for right in T.serial(2):
                decode_window(codes, scales, right, keys, t % BUFFERS, thread)
                if right == 0:
                    fetch_window(window, window_pairs, rows, t, 1, codes, scales, thread)
            hand_over(window_list, entry_list, row, near, far, t, ahead, rows, bias, full, thread)
            fetch_tile(window, window_pairs, entry, entry_pairs, near, far, t + 1, rows, codes, scales, thread)
        if has_entries:
            for e in T.serial(far):
                t = near + e
                wait_for_buffer(empty, t)
                decode_entries(codes, scales, keys, t % BUFFERS, thread)
                hand_over(window_list, entry_list, row, near, far, t, ahead, rows, bias, full, thread)
                if e + 1 < far:
                    fetch_entries(entry, entry_pairs, rows, t + 1, codes, scales, thread)

    return produce
