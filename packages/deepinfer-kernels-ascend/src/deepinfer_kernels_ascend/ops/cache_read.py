# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Attention and index scores over packed records: gather and dequantise, then batched products.

    cache rows [r, K]  ->  keys [r, K, D]  ->  the reference's products, softmax and head sum on the device

The records (cache_write.py) are decoded by integer arithmetic, one thread a group of values that share a scale, so the
device needs no float8 or float4 tensors. Rows go through in passes that bound the gathered keys: 128 rows of 640 keys
of 512 dims are 84 MB.
"""

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.reference.attention import sparse_attention
from deepinfer_core.kernels.reference.cache_ops import IndexPlan, KeyPlan, plan_index, plan_keys
from deepinfer_core.kernels.reference.indexer import index_scores as scores_of_pages
from deepinfer_core.kernels.reference.indexer import mask_to_candidates
from deepinfer_kernels_ascend.jit import BLOCKS, THREADS, T, dtype_name, each_unit, program
from deepinfer_kernels_ascend.ops.cache_write import FORMATS, e2m1_value, e4m3_value

__all__ = ["attend", "index_scores", "plan_index", "plan_keys"]

_ROWS_PER_PASS = 128
_PASS_BYTES = 256 << 20  # of index keys: a row sees its whole context


@program
def read_records_program(kind: str, dim: int, dtype: str):
    """cache[where] of records -> values [count, dim]."""
    count, cache_rows = T.dynamic("count"), T.dynamic("cache_rows")
    group, bits = FORMATS[kind]
    groups, group_bytes = dim // group, group * bits // 8
    value_bytes = groups * group_bytes

    @T.prim_func
    def read_records(
        cache: T.Tensor((cache_rows, value_bytes + groups), "uint8"),
        where: T.Tensor((count,), "int64"),
        out: T.Tensor((count, dim), dtype),
    ):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            scale = T.alloc_var("float32")
            value = T.alloc_var("float32")
            code = T.alloc_var("int32")
            for step in T.serial(each_unit(count * groups)):
                unit = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if unit < count * groups:
                    row, g = unit // groups, unit % groups
                    code = T.cast(cache[where[row], value_bytes + g], "int32")
                    scale = e4m3_value(code) if kind == "compressed" else T.reinterpret(code << 23, "float32")
                    for i in T.serial(group):
                        code = T.cast(cache[where[row], g * group_bytes + i * bits // 8], "int32")
                        if kind == "window":
                            value = e4m3_value(code & 127) * scale
                            code = code >> 7
                        else:
                            code = (code >> ((i & 1) * 4)) & 15
                            value = e2m1_value(code & 7) * scale
                            code = code >> 3
                        if code != 0:
                            value = -value
                        out[row, g * group + i] = T.cast(value, dtype)

    return read_records


def attend(
    q: Tensor,
    window_cache: Tensor,
    window: KeyPlan,
    entry_cache: Tensor | None,
    entries: KeyPlan | None,
    sink: Tensor,
) -> Tensor:
    """q [R, H, hd] over packed caches -> [R, H, hd]; see contract `attend`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for start in range(0, len(q), _ROWS_PER_PASS):
        part = slice(start, start + _ROWS_PER_PASS)
        keys = _read("window", window_cache, window.rows[part], q)
        entry_keys = entry_bias = None
        if entry_cache is not None and entries is not None:
            entry_keys = _read("compressed", entry_cache, entries.rows[part], q)
            entry_bias = entries.bias[part].to(q.dtype)
        out[part] = sparse_attention(q[part], keys, window.bias[part].to(q.dtype), entry_keys, entry_bias, sink)
    return out


def index_scores(
    iq: Tensor, weights: Tensor, cache: Tensor, plan: IndexPlan, candidates: Tensor | None, candidate_block: int
) -> Tensor:
    """iq [R, Hi, Di], weights [R, Hi] over a packed cache -> [R, B * entries a block]; see contract `index_scores`."""
    rows, blocks = plan.blocks.shape
    page, dim = plan.entries_per_block, iq.shape[-1]
    out = torch.empty(rows, blocks * page, dtype=torch.float32, device=iq.device)
    rows_per_pass = max(1, _PASS_BYTES // max(1, blocks * page * dim * iq.element_size()))
    offsets = torch.arange(page, device=iq.device)
    for start in range(0, rows, rows_per_pass):
        part = slice(start, start + rows_per_pass)
        keys = _read("index", cache, plan.blocks[part][..., None] * page + offsets, iq)  # [r, B, P, Di]
        out[part] = scores_of_pages(iq[part], weights[part], keys, plan.num_visible[part])
    return out if candidates is None else mask_to_candidates(out, candidates, candidate_block)


def _read(kind: str, cache: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """cache[rows] [..., D] in the dtype of `like`, whose last dim is D."""
    if cache.dtype != torch.uint8:
        raise KernelError(f"the Ascend kernels read packed caches (uint8), not {cache.dtype}")
    dim = like.shape[-1]
    out = torch.empty(*rows.shape, dim, dtype=like.dtype, device=like.device)
    if out.numel():
        read_records_program(kind, dim, dtype_name(like))(cache, rows.flatten(), out.view(-1, dim))
    return out
