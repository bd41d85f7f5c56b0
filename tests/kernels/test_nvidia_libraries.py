"""Bindings to optional vendor libraries, against fakes that check what their sources check; never run on SM100."""

from __future__ import annotations

import importlib.machinery
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.records import COMPRESSED, WINDOW, pack

WIDTH = 64  # B_TOPK of the library's kernel for 64 heads


@dataclass
class FlashMla:
    """deepinfer-flashmla 1.0.0: parameters of flash_mla_interface.py, checks of sparse_decode.cpp."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    schedules: list[object] = field(default_factory=list)

    def get_mla_metadata(self, *_: object) -> tuple[object, None]:
        self.schedules.append(object())
        return self.schedules[-1], None

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor | None,
        cache_seqlens: Tensor | None,
        head_dim_v: int,
        tile_scheduler_metadata: object,
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool = True,
        indices: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_k_cache: Tensor | None = None,
        extra_indices_in_kvcache: Tensor | None = None,
        topk_length: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
        enable_batch_invariant: bool = False,
    ) -> tuple[Tensor, Tensor]:
        rows, per_row, heads, dim = q.shape
        assert (q.dtype, dim, head_dim_v) == (torch.bfloat16, 512, 512)
        assert heads in (64, 128)
        assert (block_table, cache_seqlens, num_splits, topk_length, extra_topk_length) == (None,) * 5
        assert is_fp8_kvcache
        assert not causal
        assert enable_batch_invariant
        assert softmax_scale == 512**-0.5
        assert tile_scheduler_metadata in self.schedules
        assert indices is not None
        for cache, lists, size in ((k_cache, indices, 528), (extra_k_cache, extra_indices_in_kvcache, 288)):
            assert (cache is None) == (lists is None)
            if cache is None or lists is None:
                continue
            pages, page, key_heads, record = cache.shape
            assert (cache.dtype, key_heads, record, cache.stride(1)) == (torch.uint8, 1, size, size)
            assert (lists.dtype, lists.stride(-1)) == (torch.int32, 1)
            assert lists.shape == (rows, per_row, lists.shape[2])
            assert lists.shape[2] % WIDTH == 0
            assert -1 <= int(lists.min()) <= int(lists.max()) < pages * page, "there is no bounds check on the device"
        assert attn_sink is not None
        assert (attn_sink.dtype, attn_sink.shape, attn_sink.is_contiguous()) == (torch.float32, (heads,), True)
        self.calls.append({"heads": heads, "extra": extra_k_cache is not None})
        plan = REFERENCE.plan_keys(indices[:, 0].long())
        extra_plan = (
            None if extra_indices_in_kvcache is None else REFERENCE.plan_keys(extra_indices_in_kvcache[:, 0].long())
        )
        extra = None if extra_k_cache is None else extra_k_cache[0, :, 0]
        out = REFERENCE.attend(q[:, 0], k_cache[0, :, 0], plan, extra, extra_plan, attn_sink)
        return out[:, None], torch.zeros(rows, heads, per_row)


@pytest.fixture
def flash_mla(monkeypatch: pytest.MonkeyPatch) -> FlashMla:
    from deepinfer_kernels_nvidia import libraries

    fake, module = FlashMla(), ModuleType("flash_mla")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_mla", None)
    vars(module).update(flash_mla_with_kvcache=fake.flash_mla_with_kvcache, get_mla_metadata=fake.get_mla_metadata)
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    libraries._schedule.cache_clear()
    return fake


def tiles(rows: Tensor) -> Any:
    """What plan_keys makes on a GPU: whole tiles of int32, -1 behind the last key."""
    from deepinfer_kernels_nvidia.ops.attention import TILE, KeyLists

    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % TILE), value=-1)
    return KeyLists(padded.to(torch.int32).unflatten(1, (-1, TILE)), torch.ones(len(rows), dtype=torch.int32))


@pytest.mark.parametrize("with_entries", [True, False])
def test_flash_mla_gets_our_caches_as_one_page(flash_mla: FlashMla, with_entries: bool) -> None:
    from deepinfer_kernels_nvidia.libraries import flash_mla_attend

    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 64, 512, generator=g).bfloat16()
    window, entries = (pack(torch.randn(90, 512, generator=g), fmt) for fmt in (WINDOW, COMPRESSED))
    seen = torch.randint(-1, 90, (3, 70), generator=g)
    chosen = torch.randint(-1, 90, (3, 130), generator=g)
    sink = torch.randn(64, generator=g)
    ours = (entries, tiles(chosen)) if with_entries else (None, None)
    theirs = (entries, REFERENCE.plan_keys(chosen)) if with_entries else (None, None)
    got = [flash_mla_attend(q, window, tiles(seen), *ours, sink) for _ in range(2)]
    want = REFERENCE.attend(q, window, REFERENCE.plan_keys(seen), *theirs, sink)
    assert got[0].shape == want.shape
    assert (got[0].float() - want.float()).abs().max() < 2e-2
    assert flash_mla.calls == [{"heads": 64, "extra": with_entries}] * 2
    assert len(flash_mla.schedules) == 1, "one schedule serves equal shapes"


def test_shapes_that_the_library_refuses_run_our_kernel(flash_mla: FlashMla, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_kernels_nvidia import libraries

    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(libraries.attention, "attend", lambda q, *_: asked.append(tuple(q.shape)))
    lists, cache = tiles(torch.zeros(2, 5, dtype=torch.int64)), torch.zeros(9, 528, dtype=torch.uint8)
    for shape in ((2, 32, 512), (2, 64, 128), (0, 64, 512)):
        libraries.flash_mla_attend(torch.zeros(shape).bfloat16(), cache, lists, None, None, torch.zeros(shape[1]))
    assert asked == [(2, 32, 512), (2, 64, 128), (0, 64, 512)]
    assert flash_mla.calls == []


def test_a_library_is_chosen_only_where_it_is_installed_and_made_for_the_gpu(
    flash_mla: FlashMla, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_kernels_nvidia.libraries import flash_mla_attend, library_table

    assert library_table("sm_100") == library_table("sm_103") == {"attend": flash_mla_attend}
    assert library_table("sm_90") == {}
    monkeypatch.delitem(sys.modules, "flash_mla")
    assert library_table("sm_100") == {}
