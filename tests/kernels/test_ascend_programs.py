"""The Ascend package without an Ascend device: its lowered sources, run on the host and read, and its torch_npu calls.

What runs here is the Ascend C that would be compiled for the device (`ascend_host.py`) between real tensors, with
torch_npu's operations replaced by their documented formulas (`fake_torch_npu.py`). Nothing here has run on a device.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.conformance import test_conformance as conformance
from deepinfer_core.kernels.conformance.cases import Case, all_cases
from deepinfer_core.kernels.conformance.subject import ConformanceSubject
from deepinfer_core.kernels.contract import OPS
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.records import COMPRESSED, INDEX, WINDOW, pack, unpack
from deepinfer_kernels_ascend.coverage import OFFERED, ROW_INVARIANT, reason_against
from tests.core.model_configs import RELEASE
from tests.kernels.ascend_host import HostPrograms, kernel_signature
from tests.kernels.fake_torch_npu import FakeTorchNpu, define
from tests.kernels.lowering import Workshop, lower_for_ascend

# One case an operation: each new shape costs seconds to lower and compile, and the arithmetic is the same. Plans are
# seen through the operations that take them.
SEEN = {op for op in OFFERED if not op.startswith("plan_")}
PLAIN = [case for case in all_cases() if case.op in SEEN and not (case.coded or case.packed)]
CASES = list({case.op: case for case in reversed(PLAIN)}.values())
PROMISED = [case for case in CASES if case.op in ROW_INVARIANT and case.by_row]
DIM = 64  # of records: one program a format


@pytest.fixture(scope="session")
def package() -> SimpleNamespace:
    """The modules that import TileLang, imported once."""
    from deepinfer_kernels_ascend import dispatch, jit, ops, warm
    from deepinfer_kernels_ascend.ops import cache_read, dense, experts

    return SimpleNamespace(
        jit=jit, ops=ops, warm=warm, dispatch=dispatch, cache_read=cache_read, dense=dense, experts=experts
    )


@pytest.fixture(scope="session")
def host(package: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeTorchNpu]:
    """Programs launch on the host; torch_npu is the fake, which is returned."""
    programs = HostPrograms(tmp_path_factory.mktemp("ascend"), package.jit.BLOCKS)
    library, fake = define(), FakeTorchNpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package.jit.Program, "__call__", lambda self, *parameters: programs.launch_of(self, parameters))
        patch.setitem(sys.modules, "torch_npu", fake)
        yield fake
    del library


@pytest.fixture(scope="session")
def provider(host: FakeTorchNpu, package: SimpleNamespace) -> ConformanceSubject:
    """What the conformance suite wants to know of a provider."""
    table = replace(REFERENCE, **package.ops.TABLE)
    return ConformanceSubject(table, OFFERED, frozenset(), frozenset(), "cpu", "packed", torch.bfloat16)


@pytest.fixture(scope="session")
def release() -> ModelConfig:
    return ModelConfig.from_dict(RELEASE)


# ---- numerics: the lowered sources on the host -----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.name}")
def test_the_lowered_source_equals_the_reference(case: Case, provider: ConformanceSubject, host: FakeTorchNpu) -> None:
    conformance.test_operation_equals_the_reference(case, 13, provider, torch.bfloat16)


@pytest.mark.parametrize("case", PROMISED, ids=lambda case: case.op)
def test_a_row_of_what_is_promised_does_not_depend_on_the_others(
    case: Case, provider: ConformanceSubject, host: FakeTorchNpu
) -> None:
    conformance.test_a_row_does_not_depend_on_the_other_rows(case, provider, torch.bfloat16)


@pytest.mark.parametrize("fmt", [WINDOW, COMPRESSED, INDEX], ids=lambda fmt: fmt.name)
def test_records_are_exact_over_the_whole_range_of_a_float(
    package: SimpleNamespace, host: FakeTorchNpu, fmt: Any
) -> None:
    """Groups of every magnitude, with zeros, both signs, values on midpoints, and the largest one alone."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.linspace(-40, 30, 300)[:, None]
    values = torch.randn(300, DIM, generator=generator) * 2.0**exponents
    values[::7, ::3] = 0.0
    values[1::7] = (values[1::7] * 4).round() / 4 * 6
    values[5] = torch.tensor([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 6.0]).repeat(8)
    values[6] = -0.0
    cache = torch.zeros(300, fmt.num_bytes(DIM), dtype=torch.uint8)
    name = {"window": "write_window", "compressed": "write_entries", "index": "write_index_keys"}[fmt.name]
    package.ops.TABLE[name](cache, torch.arange(299, -1, -1), values)
    assert torch.equal(cache.flip(0), pack(values, fmt))
    read = package.cache_read._read(fmt.name, cache, torch.arange(300), values)
    assert torch.equal(read, unpack(cache, fmt))


def test_every_code_of_a_record_is_read_exactly(package: SimpleNamespace, host: FakeTorchNpu) -> None:
    """All 256 bytes as values, under every scale that a write can leave."""
    for fmt, scales in ((WINDOW, range(1, 255)), (COMPRESSED, range(1, 127)), (INDEX, range(1, 255))):
        codes = torch.arange(256, dtype=torch.uint8)
        if fmt is WINDOW:
            codes[[127, 255]] = 0  # NaN, which no write leaves
        codes = codes.view(-1, DIM * fmt.value_bits // 8)
        scale = torch.tensor(scales, dtype=torch.uint8)[:, None].repeat_interleave(len(codes), 0)
        cache = torch.cat([codes.repeat(len(scales), 1), scale.expand(-1, DIM // fmt.group)], 1)
        read = package.cache_read._read(fmt.name, cache, torch.arange(len(cache)), torch.empty(0, DIM))
        assert torch.equal(read, unpack(cache, fmt)), fmt.name


def test_the_router_takes_the_lowest_of_equal_experts(package: SimpleNamespace, host: FakeTorchNpu) -> None:
    generator = torch.Generator().manual_seed(5)
    x, half = (torch.randn(*shape, generator=generator) for shape in ((9, 8), (8, 8)))
    gate = torch.cat([half, half], 1)  # every score twice
    bias = torch.randn(9, 16, generator=generator).round()
    bias[:5, 8:] = bias[:5, :8]  # five rows with ties, four whose own biases part them
    ids, weights = package.ops.TABLE["route"](x, gate, bias, 5, 1.5)
    wanted_ids, wanted_weights = REFERENCE.route(x, gate, bias, 5, 1.5)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(weights, wanted_weights, rtol=1e-5)


def test_no_rows_are_no_work(package: SimpleNamespace, host: FakeTorchNpu) -> None:
    none = torch.empty(0, dtype=torch.int64)
    cache = torch.zeros(4, 66, dtype=torch.uint8)
    table = package.ops.TABLE
    table["write_window"](cache, none, torch.empty(0, 64))
    table["copy_rows"](cache, none, none)
    for options in ({}, {"inverse": True}, {"in_place": True}):
        assert table["apply_rope"](torch.empty(0, 4, 32), torch.empty(0, 2, 16), **options).shape == (0, 4, 32)
    assert table["rms_norm"](torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    plan = table["plan_experts"](torch.empty(0, 2, dtype=torch.int64), 3)
    weights = (torch.ones(3, 8, 4).bfloat16(), torch.ones(3, 2, 8).bfloat16())
    assert table["run_experts"](torch.empty(0, 8).bfloat16(), torch.empty(0, 2), plan, *weights, 1.0).shape == (0, 2, 8)
    assert int(cache.sum()) == 0


# ---- torch_npu -------------------------------------------------------------------------------------------------------


def test_the_experts_use_torch_npu_for_sorting_and_products(package: SimpleNamespace, host: FakeTorchNpu) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[0, 2], [1, 2], [2, 3]])
    x, w13, w2 = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((3, 16), (4, 16, 8), (4, 4, 16)))
    plan = package.experts.plan_experts(ids, 4)
    host.calls.clear()
    package.experts.run_experts(x, torch.rand(3, 2, generator=generator), plan, w13, w2, 10.0)
    assert host.calls == ["npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_grouped_matmul"]


@pytest.mark.bad_input
def test_the_fake_refuses_what_the_published_signature_does_not_have(host: FakeTorchNpu) -> None:
    x = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match="eps"):
        host.npu_rms_norm(x, torch.ones(8), eps=1e-6)
    with pytest.raises(RuntimeError, match="npu_mhc_post"):
        host.npu_mhc_post(x, x, x)
    with pytest.raises(AttributeError, match="npu_unheard_of"):
        host.npu_unheard_of(x)


@pytest.mark.bad_input
def test_inputs_that_no_kernel_takes_are_named(package: SimpleNamespace, host: FakeTorchNpu) -> None:
    x, w = torch.ones(2, 8), torch.ones(8, 8)
    with pytest.raises(KernelError, match=r"one dtype, not torch\.bfloat16 by torch\.float32"):
        package.dense.linear(x.bfloat16(), w)
    with pytest.raises(KernelError, match=r"expert kernels take bfloat16, not torch\.float32"):
        package.experts.shared_expert(x, w, w, 1.0)
    with pytest.raises(KernelError, match=r"bfloat16 or float32, not torch\.float64"):
        package.ops.TABLE["round_index"](torch.ones(2, 32, dtype=torch.float64))
    plan = package.cache_read.plan_keys(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(KernelError, match=r"packed caches \(uint8\), not torch\.float32"):
        package.cache_read.attend(torch.ones(1, 2, 32), torch.ones(1, 32), plan, None, None, torch.ones(2))


# ---- coverage, dispatcher, warming -----------------------------------------------------------------------------------


def test_what_is_offered_is_what_is_loaded(package: SimpleNamespace, release: ModelConfig) -> None:
    assert set(package.ops.TABLE) == OFFERED
    assert set(OPS) > OFFERED
    assert {op for op in OFFERED if reason_against(op, release, torch.bfloat16)} == set()


@pytest.mark.parametrize(
    ("op", "change", "dtype", "reason"),
    [
        ("head_logits", {}, torch.bfloat16, "must come out in float32, not rounded"),
        ("select_entries", {}, torch.bfloat16, "no kernel for select_entries"),
        ("run_experts", {}, torch.float32, "bfloat16 only"),
        ("mhc_mix", {"hc_mult": 2}, torch.bfloat16, "hc_mult is 2; .* 4, 6 or 8 streams"),
        ("rms_norm", {}, torch.float16, "bfloat16 or float32, not torch.float16"),
    ],
)
def test_what_comes_from_the_reference_has_its_reason(
    release: ModelConfig, op: str, change: dict[str, int], dtype: torch.dtype, reason: str
) -> None:
    odd: Any = SimpleNamespace(**({name: getattr(release, name) for name in release.__dataclass_fields__} | change))
    assert re.search(reason, str(reason_against(op, odd, dtype)))


def test_operations_are_registered_for_privateuse1(package: SimpleNamespace) -> None:
    package.dispatch.register()
    for name in package.dispatch.SCHEMAS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"deepinfer_ascend::{name}", "PrivateUse1")
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.ops.deepinfer_ascend.round_index(torch.ones(2, 32))
    streams, pre = torch.empty(5, 4, 32, device="meta"), torch.empty(5, 4, device="meta")
    assert torch.ops.deepinfer_ascend.mhc_collapse(streams, pre).shape == (5, 32)


def test_warming_compiles_every_program_once_and_reports(
    package: SimpleNamespace, release: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, tuple[Any, ...]]] = []
    reported: list[tuple[int, int]] = []
    monkeypatch.setattr(
        package.jit.Program, "__call__", lambda self, *parameters: compiled.append((self.name, parameters))
    )
    package.warm.warm(release, lambda done, total, name: reported.append((done, total)), 6)
    assert compiled == package.warm.variants(release)
    assert len(set(compiled)) == len(compiled)
    assert {name for name, _ in compiled} == set(package.jit.PROGRAMS)
    assert reported == [(done, len(compiled)) for done in range(len(compiled) + 1)]


# ---- structure of the sources ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_program_of_the_release_lowers_to_a_vector_kernel_within_its_limits(
    package: SimpleNamespace, release: ModelConfig
) -> None:
    one_each = dict(reversed(package.warm.variants(release)))
    assert set(one_each) == set(package.jit.PROGRAMS)
    with Workshop() as workshop:
        workshop.begin(lower_for_ascend, [(name, parameters, "ascend") for name, parameters in one_each.items()])
        for name, parameters in one_each.items():
            source = workshop.made(name, parameters, "ascend").source
            assert f"__launch_bounds__({package.jit.THREADS}) inline void {name}_kernel_simt_vf_0(" in source
            assert f"asc_vf_call<{name}_kernel_simt_vf_0>(cce::dim3({package.jit.THREADS})" in source
            assert len(kernel_signature(source)) >= 3
            # Registers of a thread only: no unified buffer, no barrier, nothing allocated or freed while it runs.
            local = [
                int(size) for size in re.findall(r"^\s+(?:float|int32_t|uint8_t) \w+\[(\d+)\];", source, re.MULTILINE)
            ]
            assert sum(local) <= 64, f"{name} holds {sum(local)} values in the registers of a thread"
            for word in ("__ubuf__", "__cbuf__", "sync_block", "SetFlag", "WaitFlag", "malloc", "new ", "free("):
                assert word not in source, f"{word} in {name}"
