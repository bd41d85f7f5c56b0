"""Which provider runs: named, found, none, two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.contract import OPS, Capability, KernelProvider, Unavailable
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.registry import ProviderStatus, build_kernels, choose_provider
from tests.core.model_configs import small_config


@dataclass
class FakeProvider:
    """Offers one operation."""

    name: str
    refuses: str | None = None
    cache_form: Literal["plain", "packed"] = "plain"
    row_invariant_ops: frozenset[str] = frozenset()
    coded_ops: frozenset[str] = frozenset()

    def probe(self) -> Capability | Unavailable:
        return Capability("cpu", "fake", "runs anywhere")

    def load(self) -> Mapping[str, Callable[..., Any]]:
        return {"rms_norm": REFERENCE.rms_norm}

    def unsupported(self, op: str, config: ModelConfig, dtype: torch.dtype) -> str | None:
        return self.refuses


def status(name: str, *, runs: bool) -> ProviderStatus:
    result = Capability("cpu", "fake", "runs") if runs else Unavailable(f"{name} lacks its device")
    return ProviderStatus(name, FakeProvider(name), result)


def test_the_one_that_runs_is_taken() -> None:
    assert choose_provider(None, [status("a", runs=False), status("b", runs=True)]).name == "b"


def test_none_that_runs_means_the_reference_and_says_why() -> None:
    choice = choose_provider(None, [status("a", runs=False)])
    assert choice.name == "cpu"
    assert "a lacks its device" in choice.reason


@pytest.mark.bad_input
def test_two_that_run_are_an_error_that_names_both() -> None:
    with pytest.raises(KernelError, match="a and b"):
        choose_provider(None, [status("a", runs=True), status("b", runs=True)])


@pytest.mark.bad_input
def test_a_named_provider_that_cannot_run_is_never_replaced() -> None:
    with pytest.raises(KernelError, match="a lacks its device"):
        choose_provider("a", [status("a", runs=False), status("b", runs=True)])


@pytest.mark.bad_input
def test_an_unknown_name_lists_what_is_installed() -> None:
    with pytest.raises(KernelError, match="cpu, a"):
        choose_provider("tpu", [status("a", runs=True)])


def test_cpu_can_be_asked_for_where_a_device_is() -> None:
    assert choose_provider("cpu", [status("a", runs=True)]).provider is None


def test_what_a_provider_lacks_or_refuses_comes_from_the_reference_with_the_reason() -> None:
    provider: KernelProvider = FakeProvider("a", refuses="head_dim 64")
    choice = choose_provider("a", [ProviderStatus("a", provider, provider.probe())])
    kernels, sources = build_kernels(choice, small_config(), torch.float32)
    by_op = {source.op: source for source in sources}
    assert set(by_op) == set(OPS)
    assert by_op["rms_norm"].provider == "reference"
    assert "head_dim 64" in by_op["rms_norm"].reason
    assert by_op["attend"].reason == "not offered by the provider"
    assert kernels.attend is REFERENCE.attend


def test_an_operation_handed_to_a_library_names_it() -> None:
    class Bound(FakeProvider):
        def library_of(self, function: Callable[..., Any]) -> str | None:
            return "fast-norms 1.0" if function is REFERENCE.rms_norm else None

    provider: KernelProvider = Bound("a")
    choice = choose_provider("a", [ProviderStatus("a", provider, provider.probe())])
    _, sources = build_kernels(choice, small_config(), torch.float32)
    by_op = {source.op: source for source in sources}
    assert (by_op["rms_norm"].provider, by_op["rms_norm"].library) == ("a", "fast-norms 1.0")
    assert by_op["rms_norm"].reason.endswith("hands it to fast-norms 1.0 where that takes the shape")
    assert by_op["attend"].library is None


@pytest.mark.bad_input
def test_an_operation_outside_the_contract_is_refused() -> None:
    class Odd(FakeProvider):
        def load(self) -> Mapping[str, Callable[..., Any]]:
            return {"frobnicate": REFERENCE.rms_norm}

    choice = choose_provider("a", [ProviderStatus("a", Odd("a"), Capability("cpu", "x", "y"))])
    with pytest.raises(KernelError, match="frobnicate"):
        build_kernels(choice, small_config(), torch.float32)


def test_the_next_input_is_made_of_the_providers_parts_where_it_offers_no_fused_one() -> None:
    normalized: list[torch.Size] = []

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normalized.append(x.shape)
        return REFERENCE.rms_norm(x, weight, eps)

    class Norm(FakeProvider):
        def load(self) -> Mapping[str, Callable[..., Any]]:
            return {"rms_norm": norm}

    provider: KernelProvider = Norm("a", row_invariant_ops=frozenset(("rms_norm",)))
    choice = choose_provider("a", [ProviderStatus("a", provider, provider.probe())])
    kernels, sources = build_kernels(choice, small_config(), torch.float32)
    arguments = (*(torch.ones(*shape) for shape in ((2, 4, 8), (2, 8), (2, 4), (2, 4, 4), (2, 4), (8,))), 1e-6)
    for got, want in zip(kernels.mhc_next(*arguments), REFERENCE.mhc_next(*arguments), strict=True):
        assert torch.equal(got, want)
    assert normalized == [(2, 8)]
    assert next(source for source in sources if source.op == "mhc_next").row_invariant
