"""The TileLang programs of the NVIDIA package without a GPU: their sources, the arithmetic they rest on, the host side.

That they are right on a GPU is shown by the conformance suite there (docs/kernels.md).
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.contract import OPS
from deepinfer_kernels_nvidia.coverage import OFFERED, reason_against
from tests.core.model_configs import RELEASE
from tests.kernels.lowering import Made, Wanted, Workshop, compile_cubin, lower, lowered

REGISTERS_OF_A_MULTIPROCESSOR = 65536  # SM90 and SM100: a block that asks for more can't be launched
SHARED_BYTES_OF_A_BLOCK = 227 * 1024  # SM90 and SM100
TENSOR_MEMORY_COLUMNS = 512  # of a multiprocessor, SM100
RUN_ON_THE_HOST = {"adjust_rows", "filter_rows", "draw_blocks", "draw_best", "accept", "row_logprobs", "engram_rows"}
REPRESENTATIVE = ("attend", "index_scores", "write_records", "rms_norm", "mhc_gates", "top_k", "place_pairs")
HOT = (  # program, architecture, instructions in its machine code
    ("attend", "sm_90a", ("HGMMA", "LDG.E.128", "STG.E.128", "USETMAXREG")),
    ("index_scores", "sm_90a", ("QGMMA", "HMMA", "UBLKCP")),
    ("mix_parts", "sm_90a", ("HGMMA", "UTMALDG")),
    ("matmul", "sm_90a", ("HGMMA", "UTMALDG", "UTMASTG")),
    ("mhc_next", "sm_90a", ("LDG.E.128", "STG.E.128")),
    ("gated", "sm_90a", ("HGMMA", "UTMALDG")),
    ("multiply_packed", "sm_90a", ("HGMMA", "UTMALDG", "UBLKCP", "HMUL2.BF16_V2")),
    # Products that are not in tensor memory become the older HMMA on SM100; none of these has run there.
    ("attend", "sm_100a", ("HMMA",)),
    ("index_scores", "sm_100a", ("HMMA", "UBLKCP")),  # ptxas turns e5m2 operands into f16 there
    ("write_records", "sm_100a", ("STG",)),
    ("multiply_packed", "sm_100a", ("HMMA", "UTMALDG", "UBLKCP", "HMUL2.BF16_V2")),
)
IN_TENSOR_MEMORY = (  # program, parameters, shared bytes, columns of tensor memory, instruction of the product
    # Bytes: tiles in flight, of a value, depth, rows and columns; the scales of coded tiles lie before them.
    ("matmul", (1, 5120, 129280, "float32", False), 4 * 2 * 64 * (128 + 256), 256, "UTCHMMA"),
    ("gated", (6, 5120, 1536, True, False), 4 * 2 * 64 * (128 + 2 * 128), 256, "UTCHMMA"),
    ("down", (6, 1536, 5120), 4 * 2 * 64 * (128 + 128), 128, "UTCHMMA"),
    ("matmul_coded", (1280, 32768, False), 3 * 128 * (128 + 128) + 2048, 128, "UTCQMMA"),
    ("gated_coded", (6, 5120, 1536, True, False), 3 * 128 * (128 + 2 * 128) + 2048, 256, "UTCQMMA"),
    ("down_coded", (6, 1536, 5120), 3 * 128 * (128 + 128) + 2048, 128, "UTCQMMA"),
)
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@pytest.fixture(scope="session")
def package() -> SimpleNamespace:
    """The modules that import TileLang, imported once."""
    from deepinfer_kernels_nvidia import jit, ops, warm
    from deepinfer_kernels_nvidia.ops import attention, experts, indexer

    return SimpleNamespace(jit=jit, ops=ops, warm=warm, attention=attention, experts=experts, indexer=indexer)


@pytest.fixture(scope="session")
def release() -> ModelConfig:
    return ModelConfig.from_dict(RELEASE)


@pytest.fixture(scope="session")
def variants(package: SimpleNamespace, release: ModelConfig) -> list[tuple[str, tuple[Any, ...]]]:
    """Programs of one rank of 64 of the release."""
    return package.warm.variants(release, local_experts=6, coded=True, packed="products")


def test_what_is_offered_is_what_is_loaded(package: SimpleNamespace) -> None:
    assert set(package.ops.TABLE) == OFFERED
    assert set(OPS) >= OFFERED


def test_the_release_runs_every_operation_that_is_offered(release: ModelConfig) -> None:
    refused = {op: reason for op in OFFERED if (reason := reason_against(op, release, torch.bfloat16)) is not None}
    assert refused == {}


@pytest.mark.parametrize(
    ("change", "op", "reason"),
    [
        ({"head_dim": 96}, "attend", "head_dim is 96; the attention kernel needs a multiple of 64"),
        ({"head_dim": 96}, "plan_keys", "head_dim is 96"),
        ({"head_dim": 576}, "attend", "head_dim is 576; the attention kernel takes at most 512"),
        ({"index_n_heads": 24}, "index_scores", "index_n_heads is 24; the index kernel needs a divisor of 128"),
        ({"index_head_dim": 48}, "plan_index", "index_head_dim is 48; the index kernel needs a multiple of 32"),
        ({"index_head_dim": 512}, "index_scores", "index_head_dim is 512; the index kernel takes at most 256"),
        ({"index_topk": 20_000}, "select_entries", "index_topk is 20000; the kernel chooses at most 16384"),
        ({"candidate_topk_blocks": 1 << 15}, "candidate_blocks", "candidate_topk_blocks is 32768; .* at most 16384"),
        ({"vocab_size": 600_000}, "filter_logits", "vocab_size is 600000; the kernel of filters takes at most 524288"),
        ({"candidate_block_size": 24}, "index_scores", "candidate_block_size is 24; .* a divisor of a cache block"),
        ({"moe_intermediate_size": 100}, "run_experts", "moe_intermediate_size is 100; .* multiple of 8"),
        ({"hc_mult": 9}, "mhc_mix", "hc_mult is 9; the kernel holds at most 8 streams"),
    ],
)
def test_a_shape_that_no_kernel_takes_is_named(
    release: ModelConfig, change: dict[str, int], op: str, reason: str
) -> None:
    odd = SimpleNamespace(**({name: getattr(release, name) for name in release.__dataclass_fields__} | change))
    assert re.search(reason, str(reason_against(op, odd, torch.bfloat16)))  # type: ignore[arg-type]  # a stand-in


def test_operations_that_share_a_plan_come_together(release: ModelConfig) -> None:
    for plan, run in (("plan_keys", "attend"), ("plan_index", "index_scores"), ("plan_experts", "run_experts")):
        for dtype in (torch.bfloat16, torch.float32):
            refused = [reason_against(op, release, dtype) is not None for op in (plan, run)]
            assert refused[0] == refused[1]


def test_warming_compiles_every_program_once_and_reports(
    package: SimpleNamespace, release: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, tuple[Any, ...]]] = []
    reported: list[tuple[int, int]] = []
    monkeypatch.setattr(
        package.jit.Program, "__call__", lambda self, *parameters: compiled.append((self.name, parameters))
    )
    package.warm.warm(release, lambda done, total, name: reported.append((done, total)), 6)
    assert compiled == package.warm.variants(release, 6)
    assert len(set(compiled)) == len(compiled)
    assert reported == [(done, len(compiled)) for done in range(len(compiled) + 1)]


# ---- sources ---------------------------------------------------------------------------------------------------------


def first_variant(variants: list[tuple[str, tuple[Any, ...]]], name: str) -> tuple[Any, ...]:
    return next(parameters for program, parameters in variants if program == name)


def one_of_each(package: SimpleNamespace, variants: list[tuple[str, tuple[Any, ...]]]) -> list[Wanted]:
    """On SM90 all but those that test_nvidia_sampling lowers and runs; on SM100 one of each kind, besides the products,
    which are compiled with other parameters.
    """
    names = [(name, "sm_90a") for name in package.jit.PROGRAMS if name not in RUN_ON_THE_HOST]
    names += [(name, "sm_100a") for name in REPRESENTATIVE]
    return [(name, first_variant(variants, name), arch) for name, arch in names]


@pytest.fixture(scope="session")
def workshop(package: SimpleNamespace, variants: list[tuple[str, tuple[Any, ...]]]) -> Iterator[Workshop]:
    """Begins with all that the slow tests want."""
    with Workshop() as opened:
        opened.begin(compile_cubin, [(name, first_variant(variants, name), arch) for name, arch, _ in HOT])
        opened.begin(lower, one_of_each(package, variants))
        opened.begin(compile_cubin, [(name, parameters, "sm_100a") for name, parameters, *_ in IN_TENSOR_MEMORY])
        yield opened


def test_every_program_has_a_variant(package: SimpleNamespace, variants: list[tuple[str, tuple[Any, ...]]]) -> None:
    assert {name for name, _ in variants} == set(package.jit.PROGRAMS)


@pytest.mark.slow
def test_every_program_lowers(
    package: SimpleNamespace, workshop: Workshop, variants: list[tuple[str, tuple[Any, ...]]]
) -> None:
    for name, parameters, arch in one_of_each(package, variants):
        assert f"{name}_kernel(" in workshop.made(name, parameters, arch).source


def no_shared_buffers_overlap(package: SimpleNamespace, name: str, parameters: tuple[Any, ...], source: str) -> None:
    """TileLang would put buffers that are used one after the other into one place, and trust barriers of its own."""
    build, passes = package.jit.PROGRAMS[name]._for_arch("sm_90a")
    assert passes["tl.disable_thread_storage_sync"]
    asked = re.findall(
        r'(\w+) = .*buffer\(\(([\d, ]+)\), (?:"(\w+)", )?scope="shared.dyn"', build(*parameters).script()
    )
    sizes = {
        buffer: getattr(torch, dtype or "float32").itemsize * math.prod(map(int, re.findall(r"\d+", shape)))
        for buffer, shape, dtype in asked
    }
    found = re.findall(r"void\* (\w+) = .*buf_dyn_shmem \+ (\d+)\)", source)
    places = sorted((int(start), int(start) + sizes[buffer]) for buffer, start in found)
    assert len(places) == len(sizes) > 1
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


@pytest.mark.parametrize("name", ["draw_blocks", "filter_rows", "row_logprobs"])
def test_where_barriers_are_placed_by_hand_no_two_shared_buffers_overlap(
    package: SimpleNamespace, variants: list[tuple[str, tuple[Any, ...]]], name: str
) -> None:
    parameters = first_variant(variants, name)
    no_shared_buffers_overlap(package, name, parameters, lowered(name, parameters, "sm_90a"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["top_k", "index_scores", "attend"])
def test_nor_do_they_in_programs_of_the_release_that_place_their_barriers(
    package: SimpleNamespace, workshop: Workshop, variants: list[tuple[str, tuple[Any, ...]]], name: str
) -> None:
    parameters = first_variant(variants, name)
    no_shared_buffers_overlap(package, name, parameters, workshop.made(name, parameters, "sm_90a").source)


@pytest.mark.parametrize("name", ["matmul", "gated", "down"])
def test_products_stream_through_the_copy_engine_into_wgmma(
    package: SimpleNamespace, variants: list[tuple[str, tuple[Any, ...]]], name: str
) -> None:
    source = lowered(name, first_variant(variants, name), "sm_90a")
    assert "tma_load" in source
    assert "wgmma_ss" in source
    assert "warpgroup_reg_dealloc" in source  # a warp group of its own for the copies
    assert "tmem" not in source  # sums in registers


def frugal_code(made: Made) -> str:
    """Machine code of a program that spills nothing and whose block fits the registers of a multiprocessor."""
    assert re.findall(r"(\d+) bytes spill stores", made.report) == ["0"]
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", made.report)]
    threads = [int(number) for number in re.findall(r"__launch_bounds__\((\d+)", made.source)]
    assert len(registers) == 1
    assert registers[0] * max(threads) <= REGISTERS_OF_A_MULTIPROCESSOR
    return made.code


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "instructions"), HOT)
def test_hot_programs_compile_without_spills(
    workshop: Workshop,
    variants: list[tuple[str, tuple[Any, ...]]],
    name: str,
    arch: str,
    instructions: tuple[str, ...],
) -> None:
    code = frugal_code(workshop.made(name, first_variant(variants, name), arch))
    for instruction in instructions:
        assert instruction in code


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters", "shared_bytes", "columns", "product"), IN_TENSOR_MEMORY)
def test_products_stand_in_tensor_memory_on_sm100_and_are_read_before_it_is_freed(
    workshop: Workshop, name: str, parameters: tuple[Any, ...], shared_bytes: int, columns: int, product: str
) -> None:
    """Compiled and read; never run."""
    made = workshop.made(name, parameters, "sm_100a")
    source = made.source
    assert "warpgroup_reg_dealloc" not in source  # one group of warps: all pass the barrier before the release
    reads = [found.end() for found in re.finditer(r"tcgen05_ld_\w+", source)]
    sizes = [int(size) for size in re.findall(r"tmem_allocate\(.*, (\d+)\);", source)]
    releases = [int(size) for size in re.findall(r"tmem_deallocate\(.*, (\d+)\);", source)]
    assert len(reads) == len(sizes)
    assert sizes == releases
    assert sum(sizes) == columns <= TENSOR_MEMORY_COLUMNS
    for read in reads:  # after the wait for the last product, with the fence of another thread's work between
        before = source[:read]
        assert before.rindex(".wait(") < before.rindex("tcgen05_after_thread_sync")
        assert "tcgen05mma" not in source[read:]
    after = source[reads[-1] : source.index("tmem_deallocate")]
    order = [after.index(step) for step in ("before_thread_sync", "__syncthreads", "after_thread_sync")]
    assert order == sorted(order)
    tiles = [int(offset) for offset in re.findall(r"_tile = .*buf_dyn_shmem \+ (\d+)\)", source)]
    assert max(tiles) < shared_bytes <= SHARED_BYTES_OF_A_BLOCK
    code = frugal_code(made)
    for instruction in (product, "LDTM", "UTCATOMSWS"):  # product, read, allocation
        assert instruction in code
    assert not re.search(r"\b[HQ]MMA", code)


# ---- arithmetic that the programs rest on ----------------------------------------------------------------------------


def test_comparing_with_scaled_midpoints_equals_dividing() -> None:
    """Every e4m3 scale, and the floats next to every midpoint times it, at and around it."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for midpoint in E2M1_MIDPOINTS:
        edge = midpoint * scales
        around = (edge.view(torch.int32)[:, None] + torch.arange(-4, 5, dtype=torch.int32)).view(torch.float32)
        quotient = around / scales[:, None]
        assert torch.equal(quotient > midpoint, around > edge[:, None])
        assert torch.equal(quotient >= midpoint, around >= edge[:, None])


def test_a_float32_is_the_sum_of_three_bfloat16() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * 1e3
    first = x.bfloat16()
    rest = x - first.float()
    second = rest.bfloat16()
    third = (rest - second.float()).bfloat16()
    assert torch.equal(first.double() + second.double() + third.double(), x.double())


def test_padding_for_the_copy_engine_does_not_change_a_product(package: SimpleNamespace) -> None:
    x, w = torch.randn(3, 33), torch.randn(33, 7)
    padded_x, padded_w = package.jit.tma_ready(x, w)
    assert padded_x.shape == (3, 40)
    assert padded_w.shape == (40, 8)
    torch.testing.assert_close((padded_x @ padded_w)[:, :7], x @ w)
    assert not padded_w[:, 7:].any()
    same_x, same_w = package.jit.tma_ready(torch.ones(2, 16), torch.ones(16, 8))
    assert (same_x.shape, same_w.shape) == ((2, 16), (16, 8))


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.bad_input
def test_a_dtype_that_a_kernel_does_not_take_is_named(package: SimpleNamespace) -> None:
    x, w, cache = torch.ones(8, 8), torch.ones(8, 8), torch.zeros(4, 66, dtype=torch.uint8)
    lists = package.attention.KeyLists(torch.zeros(1, 1, 64, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    with pytest.raises(KernelError, match=r"bfloat16 queries, not torch\.float32"):
        package.attention.attend(torch.ones(1, 4, 64), cache, lists, None, None, torch.ones(4))
    with pytest.raises(KernelError, match=r"takes bfloat16, not torch\.float16 by torch\.float16"):
        package.ops.TABLE["linear"](x.half(), w.half())
    with pytest.raises(KernelError, match=r"expert kernels take bfloat16, not torch\.float32"):
        package.experts.shared_expert(x, w, w, 1.0)
    with pytest.raises(KernelError, match=r"bfloat16 or float32, not torch\.float64"):
        package.jit.dtype_name(x.double())
    plan = package.indexer.plan_index(torch.zeros(1, 1, dtype=torch.int64), 8, torch.ones(1, dtype=torch.int64))
    with pytest.raises(KernelError, match=r"1, 2, 4 \.\. 128 heads, not torch\.bfloat16 and 24"):
        package.indexer.index_scores(torch.ones(1, 24, 32).bfloat16(), torch.ones(1, 24), cache, plan, None, 8)


def test_the_cache_folder_is_the_one_that_was_asked_for(
    package: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "DEEPINFER_JIT_CACHE_DIR", str(tmp_path))
    before = package.jit.tilelang.env.TILELANG_CACHE_DIR
    package.jit.use_cache_folder.cache_clear()
    try:
        package.jit.use_cache_folder()
        assert str(tmp_path) == package.jit.tilelang.env.TILELANG_CACHE_DIR
    finally:
        package.jit.tilelang.env.TILELANG_CACHE_DIR = before
        package.jit.use_cache_folder.cache_clear()
