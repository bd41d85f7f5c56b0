"""Bindings to optional vendor libraries, against fakes that check what their sources check; never run on SM100."""

from __future__ import annotations

import importlib.machinery
import logging
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.contract import OPS, Capability
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.coded import code_columns
from deepinfer_core.kernels.reference.packed import FP4_ROWS, ArrangedWeight
from deepinfer_core.kernels.reference.records import COMPRESSED, WINDOW, pack
from deepinfer_core.kernels.registry import KernelChoice, build_kernels
from deepinfer_kernels_nvidia.provider import NvidiaProvider
from tests.core.model_configs import RELEASE
from tests.kernels.fake_deep_gemm import FakeDeepGemm
from tests.kernels.fake_tile_kernels import FakeTileKernels

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


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> ModuleType:
    """A module of that name which find_spec and import find."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def flash_mla(monkeypatch: pytest.MonkeyPatch) -> FlashMla:
    from deepinfer_kernels_nvidia.libraries import flash_mla

    fake = FlashMla()
    install(
        monkeypatch,
        "flash_mla",
        flash_mla_with_kvcache=fake.flash_mla_with_kvcache,
        get_mla_metadata=fake.get_mla_metadata,
        fused_norm_rope_attn_rope_cast=ModuleType("fused_norm_rope_attn_rope_cast"),
    )
    flash_mla._schedule.cache_clear()
    return fake


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> FakeDeepGemm:
    """The fake, prepared as at loading; rows are coded by the contract's rule, since the kernel for it needs a GPU."""
    from deepinfer_kernels_nvidia.libraries import deep_gemm

    fake = FakeDeepGemm(alignment=1)
    install(monkeypatch, "deep_gemm", **{name: getattr(fake, name) for name in deep_gemm.NEEDS})
    monkeypatch.setattr(deep_gemm, "code_rows_program", lambda dim: code_rows)
    deep_gemm.prepare(sys.modules["deep_gemm"])
    return fake


@pytest.fixture
def tile_kernels(monkeypatch: pytest.MonkeyPatch) -> FakeTileKernels:
    fake = FakeTileKernels()
    install(monkeypatch, "tile_kernels", **fake.modules)
    return fake


def code_rows(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    made = code_columns(x.t())
    codes.copy_(made.codes)
    scale.copy_(made.scale)


def tiles(rows: Tensor) -> Any:
    """What plan_keys makes on a GPU: whole tiles of int32, -1 behind the last key."""
    from deepinfer_kernels_nvidia.ops.attention import TILE, KeyLists

    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % TILE), value=-1)
    return KeyLists(padded.to(torch.int32).unflatten(1, (-1, TILE)), torch.ones(len(rows), dtype=torch.int32))


@pytest.mark.parametrize("with_entries", [True, False])
def test_flash_mla_gets_our_caches_as_one_page(flash_mla: FlashMla, with_entries: bool) -> None:
    from deepinfer_kernels_nvidia.libraries.flash_mla import attend

    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 64, 512, generator=g).bfloat16()
    window, entries = (pack(torch.randn(90, 512, generator=g), fmt) for fmt in (WINDOW, COMPRESSED))
    seen = torch.randint(-1, 90, (3, 70), generator=g)
    chosen = torch.randint(-1, 90, (3, 130), generator=g)
    sink = torch.randn(64, generator=g)
    ours = (entries, tiles(chosen)) if with_entries else (None, None)
    theirs = (entries, REFERENCE.plan_keys(chosen)) if with_entries else (None, None)
    got = [attend(q, window, tiles(seen), *ours, sink) for _ in range(2)]
    want = REFERENCE.attend(q, window, REFERENCE.plan_keys(seen), *theirs, sink)
    assert got[0].shape == want.shape
    assert (got[0].float() - want.float()).abs().max() < 2e-2
    assert flash_mla.calls == [{"heads": 64, "extra": with_entries}] * 2
    assert len(flash_mla.schedules) == 1, "one schedule serves equal shapes"


def test_shapes_that_flash_mla_refuses_run_our_kernel(flash_mla: FlashMla, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_kernels_nvidia.libraries import flash_mla as binding

    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(f"{binding.__name__}.attention.attend", lambda q, *_: asked.append(tuple(q.shape)))
    lists, cache = tiles(torch.zeros(2, 5, dtype=torch.int64)), torch.zeros(9, 528, dtype=torch.uint8)
    for shape in ((2, 32, 512), (2, 64, 128), (0, 64, 512)):
        binding.attend(torch.zeros(shape).bfloat16(), cache, lists, None, None, torch.zeros(shape[1]))
    assert asked == [(2, 32, 512), (2, 64, 128), (0, 64, 512)]
    assert flash_mla.calls == []


# ---- deepinfer-gemm --------------------------------------------------------------------------------------------------


def weight(shape: tuple[int, ...], coded: bool, seed: int) -> Any:
    values = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return code_columns(values) if coded else values


def rows_of(count: int, dim: int) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(9)).bfloat16()


def slots_of(ids: Tensor, num_experts: int) -> Any:
    """What plan_experts makes on a GPU: whole tiles of one expert, with an unused tile behind them."""
    from deepinfer_kernels_nvidia.ops.experts import TILE, ExpertTiles

    slots: list[int] = []
    owners: list[int] = []
    for expert in range(num_experts):
        pairs = (ids.flatten() == expert).nonzero().flatten().tolist()
        pairs += [-1] * (-len(pairs) % TILE)
        slots += pairs
        owners += [expert] * (len(pairs) // TILE)
    return ExpertTiles(
        torch.tensor([*slots, *[-1] * TILE], dtype=torch.int32), torch.tensor([*owners, -1], dtype=torch.int32)
    )


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("count", [3, 128, 200])
def test_dense_products_are_one_group_of_whole_tiles(deep_gemm: FakeDeepGemm, coded: bool, count: int) -> None:
    from deepinfer_kernels_nvidia.libraries.deep_gemm import linear

    x, w = rows_of(count, 1088), weight((1088, 48), coded, 1)  # more values of K than two words of scales cover
    got, want = linear(x, w), REFERENCE.linear(x, w)
    assert got.shape == want.shape
    assert (got.float() - want.float()).abs().max() < 2e-2 * want.float().abs().max()
    padded = -(-count // 128) * 128
    assert deep_gemm.calls == [("e4m3" if coded else "bf16", padded, 1088, 48, 1)]


@pytest.mark.parametrize("coded", [False, True])
def test_experts_go_through_two_grouped_products(deep_gemm: FakeDeepGemm, coded: bool) -> None:
    from deepinfer_kernels_nvidia.libraries.deep_gemm import run_experts

    x = rows_of(90, 64)
    ids = torch.stack([torch.arange(90) % 2, 2 + torch.arange(90) % 3], 1)  # of six experts one has no pair
    factors = torch.rand(90, 2, generator=torch.Generator().manual_seed(3))
    w13, w2 = weight((6, 64, 96), coded, 4), weight((6, 48, 64), coded, 5)
    got = run_experts(x, factors, slots_of(ids, 6), w13, w2, 1.0)
    want = REFERENCE.run_experts(x, factors, REFERENCE.plan_experts(ids, 6), w13, w2, 1.0)
    contract = OPS["run_experts"]
    tolerance = contract.coded_tolerance if coded else contract.bfloat16_tolerance
    assert got.shape == want.shape
    assert (got.float() - want.float()).abs().max() < tolerance
    kind = "e4m3" if coded else "bf16"
    assert deep_gemm.calls == [(kind, 768, 64, 96, 6), (kind, 768, 48, 64, 6)]


@pytest.mark.parametrize("coded", [False, True])
def test_the_shared_expert_is_two_products_of_one_group(deep_gemm: FakeDeepGemm, coded: bool) -> None:
    from deepinfer_kernels_nvidia.libraries.deep_gemm import shared_expert

    x, w13, w2 = rows_of(7, 64), weight((64, 96), coded, 6), weight((48, 64), coded, 7)
    got, want = shared_expert(x, w13, w2, 1.0), REFERENCE.shared_expert(x, w13, w2, 1.0)
    contract = OPS["shared_expert"]
    tolerance = contract.coded_tolerance if coded else contract.bfloat16_tolerance
    assert (got.float() - want.float()).abs().max() < tolerance
    assert [call[0] for call in deep_gemm.calls] == ["e4m3" if coded else "bf16"] * 2


def test_scales_of_a_weight_are_packed_once(deep_gemm: FakeDeepGemm) -> None:
    from deepinfer_kernels_nvidia.libraries import deep_gemm as binding

    first, second = weight((64, 48), True, 1), weight((64, 48), True, 1)
    packed = binding._scales_of(first)
    assert binding._scales_of(first) is packed
    assert binding._scales_of(second) is not packed
    assert packed.shape == (1, 48, 1)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (torch.zeros(2, 64), torch.zeros(64, 48)),
        (torch.zeros(2, 60).bfloat16(), torch.zeros(60, 48).bfloat16()),
        (torch.zeros(2, 64).bfloat16(), torch.zeros(64, 12).bfloat16()),
        (torch.zeros(0, 64).bfloat16(), torch.zeros(64, 48).bfloat16()),
        (torch.zeros(2, 64).bfloat16(), code_columns(torch.ones(64, 24).bfloat16())),
        (torch.zeros(2, 64).bfloat16(), ArrangedWeight(torch.zeros(1), FP4_ROWS, (64, 48), torch.bfloat16)),
    ],
    ids=["float32", "inner side", "columns", "no rows", "columns of codes", "packed"],
)
def test_products_that_deep_gemm_refuses_run_our_kernel(
    deep_gemm: FakeDeepGemm, monkeypatch: pytest.MonkeyPatch, x: Tensor, w: Any
) -> None:
    from deepinfer_kernels_nvidia.libraries import deep_gemm as binding

    monkeypatch.setattr(binding, "own_linear", lambda *arguments: arguments)
    assert binding.linear(x, w) == (x, w)
    assert deep_gemm.calls == []


def test_experts_of_two_kinds_of_weights_are_left_to_our_kernel(
    deep_gemm: FakeDeepGemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_kernels_nvidia.libraries import deep_gemm as binding

    def own(*_: object) -> str:
        return "ours"

    monkeypatch.setattr(f"{binding.__name__}.own_experts.shared_expert", own)
    monkeypatch.setattr(f"{binding.__name__}.own_experts.run_experts", own)
    w13, w2 = weight((64, 96), False, 1), weight((48, 64), True, 2)
    assert binding.shared_expert(rows_of(2, 64), w13, w2, 1.0) == "ours"
    tiles = slots_of(torch.zeros(2, 1, dtype=torch.int64), 1)
    assert binding.run_experts(rows_of(2, 64), torch.ones(2, 1), tiles, w13, w2, 1.0) == "ours"


# ---- tile-kernels ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowCase:
    """One operation with inputs that tile-kernels takes, and inputs that it refuses."""

    op: str
    call: str
    taken: tuple[Any, ...]
    refused: tuple[tuple[Any, ...], ...]


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def row_cases() -> list[RowCase]:
    f32 = torch.float32
    mixes, dead = drawn(5, 4, 4, dtype=f32), torch.tensor([False, True, False, False, True])
    wide, narrow = drawn(5, 4, 512), drawn(5, 4, 96)
    half_columns = drawn(5, 2 * 512)[:, :512]  # rows that are parts of longer ones
    return [
        RowCase(
            "rms_norm",
            "norm_forward",
            (half_columns, drawn(512), 1e-6),
            ((wide, drawn(512, dtype=f32), 1e-6), (drawn(5, 24), drawn(24), 1e-6), (drawn(0, 512), drawn(512), 1e-6)),
        ),
        RowCase(
            "mhc_collapse",
            "mhc_pre_apply_mix_fwd",
            (wide.transpose(0, 1).contiguous().transpose(0, 1), drawn(5, 4, dtype=f32)),
            ((narrow, drawn(5, 4, dtype=f32)), (wide.float(), drawn(5, 4, dtype=f32))),
        ),
        RowCase(
            "mhc_expand",
            "mhc_post_fwd",
            (wide, half_columns, drawn(5, 4, dtype=f32), mixes),
            ((narrow, drawn(5, 96), drawn(5, 4, dtype=f32), mixes),),
        ),
        RowCase(
            "engram_gate",
            "engram_gate_fwd",
            (wide, drawn(5, 5 * 512), drawn(4, 512), drawn(4, 512), dead, 1e-20),
            ((narrow, drawn(5, 5 * 96), drawn(4, 96), drawn(4, 96), dead, 1e-20),),
        ),
    ]


@pytest.mark.parametrize("case", row_cases(), ids=lambda case: case.op)
def test_operations_on_rows_go_to_tile_kernels(tile_kernels: FakeTileKernels, case: RowCase) -> None:
    from deepinfer_kernels_nvidia.libraries import tile_kernels as binding

    got, want = getattr(binding, case.op)(*case.taken), getattr(REFERENCE, case.op)(*case.taken)
    assert tile_kernels.calls == [case.call]
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    tolerance = OPS[case.op].bfloat16_tolerance
    assert torch.allclose(got.float(), want.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", row_cases(), ids=lambda case: case.op)
def test_shapes_that_tile_kernels_refuses_run_our_kernel(
    tile_kernels: FakeTileKernels, monkeypatch: pytest.MonkeyPatch, case: RowCase
) -> None:
    from deepinfer_kernels_nvidia.libraries import tile_kernels as binding

    monkeypatch.setattr(binding, f"own_{case.op}", lambda *arguments: arguments)
    for arguments in case.refused:
        assert getattr(binding, case.op)(*arguments) == arguments
    assert tile_kernels.calls == []


# ---- which library is taken ------------------------------------------------------------------------------------------


def test_a_library_is_chosen_only_where_it_is_installed_and_made_for_the_gpu(
    flash_mla: FlashMla, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_kernels_nvidia.libraries import library_table
    from deepinfer_kernels_nvidia.libraries.flash_mla import attend

    assert library_table("sm_100") == library_table("sm_103") == {"attend": attend}
    assert library_table("sm_90") == {}
    monkeypatch.delitem(sys.modules, "flash_mla")
    assert library_table("sm_100") == {}


def test_an_operation_that_a_library_takes_names_it(flash_mla: FlashMla, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `deepinfer kernels` on a B200 prints it, whose driver alone is played."""
    provider = NvidiaProvider()
    monkeypatch.setattr(provider, "probe", lambda: Capability("cuda", "sm_100", "1 x NVIDIA B200 (sm_100)"))
    choice = KernelChoice("nvidia", provider, "cuda", "named")
    _, sources = build_kernels(choice, ModelConfig.from_dict(RELEASE), torch.bfloat16)
    assert {source.op: source.library for source in sources if source.library} == {"attend": "deepinfer-flashmla 1.0"}
    assert {source.provider for source in sources} == {"nvidia"}


def test_libraries_share_the_table(flash_mla: FlashMla, deep_gemm: FakeDeepGemm, tile_kernels: FakeTileKernels) -> None:
    from deepinfer_kernels_nvidia.libraries import library_table

    deep_gemm.deterministic = False
    deep_gemm.alignment = 64
    products = {"linear", "run_experts", "shared_expert"}
    assert set(library_table("sm_103")) == products | {"attend"} | {case.op for case in row_cases()}
    assert (deep_gemm.deterministic, deep_gemm.alignment) == (True, 128)


def test_an_older_distribution_of_the_same_module_is_named_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deepinfer_kernels_nvidia.libraries import library_table

    install(monkeypatch, "deep_gemm", gemm_fp8_fp8_bf16_nt=None, use_deterministic_algorithms=None)
    with caplog.at_level(logging.WARNING):
        assert library_table("sm_100") == {}
    assert "deepinfer-gemm 2.8 is not used" in caplog.text
    assert "has no m_grouped_bf16_gemm_nn_contiguous" in caplog.text


def test_a_library_that_does_not_load_is_named_and_not_used(
    flash_mla: FlashMla, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deepinfer_kernels_nvidia import libraries

    def broken(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr(libraries, "import_module", broken)
    with caplog.at_level(logging.WARNING):
        assert libraries.library_table("sm_100") == {}
    assert "deepinfer-flashmla 1.0 is not used, our own kernels run: ImportError: flash_mla: undefined" in caplog.text


def test_every_binding_is_an_operation_of_the_contract() -> None:
    from deepinfer_kernels_nvidia.libraries import LIBRARIES
    from deepinfer_kernels_nvidia.ops import TABLE

    bound = [op for library in LIBRARIES for op in library.operations]
    assert set(bound) <= set(TABLE)
    assert len(set(bound)) == len(bound), "two libraries take one operation"
