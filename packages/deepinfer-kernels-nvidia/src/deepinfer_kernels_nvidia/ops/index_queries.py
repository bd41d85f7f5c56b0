# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Index queries as the product of `indexer` takes them: e5m2 in groups of rows, weights in f16.

    group      whole rows, all heads of each: a column of the product for a head of a row
    codes      [groups, Di / 16, columns, 16] bytes: 8 columns of 16 values lie together, as wgmma reads an operand that
               is not swizzled
    value      a power of two taken out of each vector; e2m1 values and their powers are exact in e5m2 as long as the
               powers of one vector span no more than 2^16
    weight     times that power; then the largest power of a row's weights is taken out into the row's factor

The order of a product's inner dimension is free as long as both sides share it. A lane of the other side decodes whole
words of eight codes, so value d = 8 (n t + w) + 4 h + i of n words a lane stands where mma wants lane t's bytes:

    place      32 w + 16 h + 4 t + i           t = lane 0 .. 3, w = word of the lane, h = half of the word, i = byte
"""

from math import ceil, log2

from deepinfer_kernels_nvidia.jit import T, program

__all__ = ["LANES", "MOST_COLUMNS", "STEP", "group_shape", "query_headroom", "value_at"]

MOST_COLUMNS = 128  # rows * heads of a group
STEP = 32  # values of one mma, and values that share a scale
LANES = 4  # of a warp, that share a row of an mma operand
_GROUP_ROWS = 8  # columns of the mma that sums over the heads
_LEAST_COLUMNS = 16  # inner dimension of that mma
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100  # of what powers are taken out of
_WEIGHT_HEADROOM = 14  # the largest weight of a row lies in [2^14, 2^15), below f16's 65,504
_EXPONENT_BITS = 0x7F800000


def group_shape(heads: int) -> tuple[int, int]:
    """Rows of a group and its columns: all heads of these rows, and empty ones up to 16."""
    rows = min(_GROUP_ROWS, MOST_COLUMNS // heads)
    return rows, max(_LEAST_COLUMNS, rows * heads)


def query_headroom(dim: int) -> int:
    """h, where the largest magnitude of a query lies in [2^h, 2^(h + 1)): dim products of it with a key's largest, 24,
    stay below f16's 65,504.
    """
    return 3 - max(0, ceil(log2(dim / 128)))


def value_at(place: int, dim: int) -> int:
    """Which value of a vector stands at this place of its codes."""
    w, h, t, i = place // 32, place // 16 % 2, place // 4 % LANES, place % 4
    return 8 * (dim // STEP * t + w) + 4 * h + i


def _power_of(value):
    """The largest power of two that is not above a positive float32 expression, within bounds."""
    bounded = T.min(T.max(value, T.float32(_SMALLEST)), T.float32(_LARGEST))
    return T.reinterpret(T.reinterpret(bounded, "int32") & _EXPONENT_BITS, "float32")


@program
def encode_queries_program(heads: int, dim: int, weight_dtype: str):
    """iq [rows * heads, dim] bf16, weights [rows * heads] -> codes, weights and factors of groups. Values and weights
    beyond the last row are zero, and no value exceeds the headroom: a column never spoils its neighbours' sums.
    """
    vectors, groups = T.dynamic("vectors"), T.dynamic("groups")
    group, columns = group_shape(heads)
    headroom = query_headroom(dim)
    bound = 2.0 ** (headroom + 1)

    @T.prim_func
    def encode_queries(
        iq: T.Tensor((vectors, dim), "bfloat16"),
        weights: T.Tensor((vectors,), weight_dtype),
        codes: T.Tensor((groups, dim // 16, columns, 16), "float8_e5m2"),
        scaled: T.Tensor((groups, columns), "float16"),
        factors: T.Tensor((groups, group), "float32"),
    ):
        with T.Kernel(groups, threads=MOST_COLUMNS) as part:
            column = T.get_thread_binding()
            vector = part * group * heads + column
            held = T.alloc_local((dim,), "bfloat16")
            code = T.alloc_local((16,), "float8_e5m2")
            size = T.alloc_shared((MOST_COLUMNS,), "float32")
            largest = T.alloc_var("float32")
            weight = T.alloc_var("float32")
            weight = 0.0
            for d in T.unroll(dim):
                held[d] = T.bfloat16(0)
            if column < group * heads and vector < vectors:
                for chunk in T.unroll(dim // 8):
                    for v in T.vectorized(8):
                        held[chunk * 8 + v] = iq[vector, chunk * 8 + v]
                weight = T.cast(weights[vector], "float32")
            largest = 0.0
            for d in T.unroll(dim):
                largest = T.max(largest, T.abs(T.cast(held[d], "float32")))
            power = _power_of(largest)
            if column < columns:
                for chunk in T.unroll(dim // 16):
                    for i in T.unroll(16):
                        value = T.cast(held[value_at(16 * chunk + i, dim)], "float32") * (
                            T.float32(2.0**headroom) / power
                        )
                        code[i] = T.cast(T.max(T.min(value, T.float32(bound)), T.float32(-bound)), "float8_e5m2")
                    for i in T.vectorized(16):
                        codes[part, chunk, column, i] = code[i]
            size[column] = T.abs(weight * power)
            T.sync_threads()
            largest = 0.0
            for h in T.serial(heads):
                largest = T.max(largest, size[column // heads * heads + h])
            row_power = _power_of(largest)
            share = weight * power * (T.float32(2.0**_WEIGHT_HEADROOM) / row_power)
            if column < columns:
                scaled[part, column] = T.cast(share, "float16")
            if column < group * heads and column % heads == 0:
                factors[part, column // heads] = row_power * T.float32(2.0 ** (-_WEIGHT_HEADROOM - headroom))

    return encode_queries
