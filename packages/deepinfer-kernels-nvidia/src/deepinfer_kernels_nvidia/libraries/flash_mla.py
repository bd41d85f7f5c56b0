"""Attention by deepinfer-flashmla 1.0 (module flash_mla) over our cache records, SM100 and SM103.

    window     528-byte records as k_cache         [1 page, N, 1 head, 528]     indices [R, 1, tiles * 64] int32
    selected   288-byte records as extra_k_cache   [1 page, N, 1 head, 288]     indices likewise, -1 = invisible

Its cache formats are ours byte for byte. The whole cache is given as one page, so that an index is a cache row; lists
of keys come in our tiles of 64, which is the unit that it demands. A shape that it does not take runs our kernel.

Bound to the signature and the checks of its sources; **never run by us**: there is no SM100 device here.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.ops import attention
from deepinfer_kernels_nvidia.ops.attention import KeyLists

__all__ = ["attend"]

_HEADS = (64, 128)
_DIM = 512


def attend(
    q: Tensor,
    window_cache: Tensor,
    window: KeyLists,
    entry_cache: Tensor | None,
    entries: KeyLists | None,
    sink: Tensor,
) -> Tensor:
    """q [R, H, 512] bf16, packed caches -> [R, H, 512]; see contract `attend`.

    Splitting the keys of a row over blocks is off: a row's bits must not depend on the batch.
    """
    rows, heads, dim = q.shape
    fits = rows > 0 and heads in _HEADS and dim == _DIM and window.rows.numel() > 0
    if not fits or q.dtype != torch.bfloat16:
        return attention.attend(q, window_cache, window, entry_cache, entries, sink)
    library: Any = import_module("flash_mla")
    extra: dict[str, Tensor] = {}
    num_extra = extra_width = 0
    if entry_cache is not None and entries is not None and entries.rows.numel():
        extra = {"extra_k_cache": _one_page(entry_cache), "extra_indices_in_kvcache": _indices(entries)}
        num_extra, extra_width = len(entry_cache), extra["extra_indices_in_kvcache"].shape[2]
    indices = _indices(window)
    out, _ = library.flash_mla_with_kvcache(
        q.unsqueeze(1),
        _one_page(window_cache),
        None,
        None,
        _DIM,
        _schedule(q.device, rows, heads, len(window_cache), indices.shape[2], num_extra, extra_width),
        softmax_scale=_DIM**-0.5,
        is_fp8_kvcache=True,
        indices=indices,
        attn_sink=sink.float().contiguous(),
        enable_batch_invariant=True,
        **extra,
    )
    return out.squeeze(1)


def _one_page(cache: Tensor) -> Tensor:
    """cache [N, bytes] -> [1, N, 1, bytes]: pages, keys a page, key heads, bytes a key."""
    return cache[None, :, None]


def _indices(lists: KeyLists) -> Tensor:
    """[R, 1, tiles * 64] int32, -1 = invisible."""
    return lists.rows.flatten(1).unsqueeze(1)


@cache
def _schedule(device: torch.device, *shape: int) -> Any:
    """The library's scheduling data: made at its first call, valid for every call of the same shapes, since the number
    of keys is not given by row.
    """
    return import_module("flash_mla").get_mla_metadata()[0]
