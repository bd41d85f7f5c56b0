"""`weight_form` "auto" weighs bytes against the device; a form that is asked for is taken, or refused with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from deepinfer_core.config.engine import EngineConfig, ParallelConfig, WeightForm
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.contract import CODED_OPS
from deepinfer_core.kernels.reference.packed import Packing
from deepinfer_core.kernels.registry import KernelChoice, OpSource
from deepinfer_core.runtime.weight_form import choose_packing, first_that_leaves_room
from tests.core.model_configs import release_config

BYTES: dict[Packing, int] = {"none": 157, "experts": 60, "products": 50}


@pytest.mark.parametrize(
    ("offered", "device", "chosen"),
    [
        (["none", "experts", "products"], 314, "none"),  # exactly half
        (["none", "experts", "products"], 313, "experts"),
        (["none", "experts", "products"], 120, "experts"),
        (["none", "experts", "products"], 119, "products"),
        (["none", "experts", "products"], 80, "products"),
        (["none", "experts"], 80, "experts"),
        (["none", "products"], 200, "products"),
        (["none"], 80, "none"),
    ],
)
def test_the_first_form_that_leaves_half_of_the_device_is_taken(
    offered: Sequence[Packing], device: int, chosen: Packing
) -> None:
    assert first_that_leaves_room(offered, BYTES.__getitem__, device) == chosen


class Decoding:
    """A provider whose kernels of `packed_ops` decode."""

    name = "decoding"

    def __init__(self, packed_ops: frozenset[str] = CODED_OPS) -> None:
        self.packed_ops = packed_ops

    def arranged(self, weight: Any, halves: bool) -> Any:
        raise AssertionError("nothing is loaded here")


def chosen(
    form: WeightForm,
    gigabytes: float,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ranks: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    packed_ops: frozenset[str] = CODED_OPS,
) -> Packing:
    """For a rank of the release on a device with so much memory."""
    monkeypatch.setattr("deepinfer_core.runtime.weight_form.total_bytes", lambda _: int(gigabytes * 1e9))
    config = EngineConfig(weight_form=form, parallel=ParallelConfig(expert_parallel_size=ranks))
    provider: Any = Decoding(packed_ops)  # of a provider all that is asked for
    choice = KernelChoice("decoding", provider, "cuda", "for a test")
    sources = [OpSource(op, "decoding", "offered", row_invariant=True) for op in CODED_OPS]
    return choose_packing(config, choice, sources, dtype, release_config())


@pytest.mark.parametrize(
    ("ranks", "gigabytes", "packing"), [(64, 141, "none"), (8, 141, "experts"), (8, 320, "none"), (8, 96, "products")]
)
def test_a_rank_of_the_release_takes_what_its_device_has_room_for(
    monkeypatch: pytest.MonkeyPatch, ranks: int, gigabytes: float, packing: Packing
) -> None:
    assert chosen("auto", gigabytes, monkeypatch, ranks=ranks) == packing


def test_a_form_that_is_asked_for_is_taken_whatever_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[WeightForm] = ["bfloat16", "experts", "packed"]
    assert [chosen(form, 1, monkeypatch) for form in asked] == ["none", "experts", "products"]
    assert [chosen(form, 10_000, monkeypatch) for form in asked] == ["none", "experts", "products"]


def test_kernels_of_experts_alone_are_enough_for_packed_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = frozenset(("run_experts",))
    assert chosen("experts", 1, monkeypatch, packed_ops=ops) == "experts"
    assert chosen("auto", 1, monkeypatch, packed_ops=ops) == "experts"
    assert chosen("auto", 1, monkeypatch, dtype=torch.float32) == "none"


@pytest.mark.bad_input
def test_a_form_that_the_kernels_lack_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match=r"'packed', and the kernels of decoding have no such form of linear, shared"):
        chosen("packed", 1, monkeypatch, packed_ops=frozenset(("run_experts",)))
    with pytest.raises(KernelError, match=r"'experts', and they decode to bfloat16, and dtype is float32"):
        chosen("experts", 1, monkeypatch, dtype=torch.float32)
