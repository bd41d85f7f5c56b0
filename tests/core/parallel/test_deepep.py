"""Calls to DeepEP against a recording fake: signatures, shapes and types as deepinfer-ep 2.5.0 publishes them
(deep_ep/buffers/ep.py), rows that really travel. The library itself was never run.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.model.moe import moe, serve_experts
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.deepep import DeepEpExperts, why_no_deepep
from deepinfer_core.parallel.experts import LocalExperts, SharedExperts
from deepinfer_core.parallel.placement_tables import held_experts, placement_tables
from tests.core.parallel.in_process import on_ranks
from tests.core.parallel.test_experts import CONFIG, NUM_SLOTS, D, E, K, make_params, make_rows, random_placement


class FakeBuffer:
    """`EPBuffer` of 2.5.0: the arguments that are used, with the documented checks; `group` is a Communicator here."""

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: int = 0,
        deterministic: bool = False,
    ) -> None:
        self.comm: Communicator = group
        self.most, self.hidden, self.num_topk = num_max_tokens_per_rank, hidden, num_topk
        assert deterministic
        assert not use_fp8_dispatch

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Any = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Any, object]:
        assert topk_idx is not None
        assert topk_weights is not None
        assert num_experts is not None
        assert x.dtype == torch.bfloat16
        assert x.shape[1:] == (self.hidden,)
        assert len(x) <= self.most
        assert topk_idx.dtype == torch.int64
        assert topk_weights.dtype == torch.float32
        assert topk_idx.shape == topk_weights.shape == (len(x), self.num_topk)
        assert num_experts % self.comm.size == 0
        per_rank = num_experts // self.comm.size
        owner = topk_idx[:, 0] // per_rank
        order = torch.argsort(owner, stable=True)
        sent = torch.bincount(owner, minlength=self.comm.size)
        ones = [1] * self.comm.size
        came = self.comm.all_to_all_rows(sent[:, None], ones, ones, "counts")[:, 0]
        counts = (sent.tolist(), came.tolist())
        received = [
            self.comm.all_to_all_rows(part[order], *counts, "rows") for part in (x, topk_idx % per_rank, topk_weights)
        ]
        shuffle = torch.randperm(len(received[0]))  # the order is DeepEP's affair
        x_in, idx_in, weights_in = (part[shuffle] for part in received)
        return x_in, idx_in, weights_in, (order, counts, shuffle), object()

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, bias: Any = None
    ) -> tuple[Tensor, None, object]:
        order, (sent, came), shuffle = handle
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape == (sum(came), self.hidden)
        home = torch.empty_like(x)
        home[shuffle] = x
        combined = torch.empty(sum(sent), self.hidden, dtype=x.dtype)
        combined[order] = self.comm.all_to_all_rows(home, came, sent, "outputs")
        return combined, None, object()


@pytest.fixture(autouse=True)
def _fake_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("deep_ep")
    library.EPBuffer = FakeBuffer  # type: ignore[attr-defined] # a module of the test's own
    monkeypatch.setitem(sys.modules, "deep_ep", library)


def as_bfloat16(params: Any) -> Any:
    return type(params)(
        params.gate,
        params.bias,
        params.bias_vl,
        *(one.bfloat16() for one in (params.w13, params.w2, params.shared_w13, params.shared_w2)),
        params.num_chosen,
    )


@pytest.mark.parametrize("counts", [[5, 9], [0, 4], [3, 0, 7]])
def test_pairs_travel_as_tokens_and_outputs_have_the_bits_of_one_process(counts: list[int]) -> None:
    placement = random_placement(4, len(counts), E + (-E) % len(counts) + len(counts))
    table = placement_tables([placement], torch.device("cpu"))[0]

    def work(comm: Communicator) -> Tensor:
        exchange = DeepEpExperts(comm, {0: table}, NUM_SLOTS, group=comm, most_rows=9, num_chosen=K, hidden_size=D)
        params = as_bfloat16(make_params(1, held_experts([placement], comm.rank)[0]))
        x, origin = make_rows(comm.rank, counts[comm.rank])
        exchange.begin([0])
        if len(x) == 0:
            serve_experts(params, exchange, 0, CONFIG, REFERENCE)
            return x
        y = moe(x.bfloat16(), len(x), None, params, exchange, 0, origin, CONFIG, REFERENCE)
        assert exchange.unfinished() == []
        return y

    for rank, y in enumerate(on_ranks(len(counts), work)):
        x, origin = make_rows(rank, counts[rank])
        if len(x):
            params = as_bfloat16(make_params(1))
            assert torch.equal(y, moe(x.bfloat16(), len(x), None, params, LocalExperts(), 0, origin, CONFIG, REFERENCE))


class Told:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def routed(self, layer: int, ids: Tensor) -> None:
        self.calls.append(("routed", layer, len(ids)))

    def experts_begin(self, layer: int) -> None:
        self.calls.append(("begin", layer, 0))

    def experts_end(self, layer: int) -> None:
        self.calls.append(("end", layer, 0))


def test_an_observer_is_told_what_all_to_all_would_tell_it() -> None:
    placement = random_placement(4, 2, E)
    table = placement_tables([placement], torch.device("cpu"))[0]

    def work(comm: Communicator, kind: str) -> list[tuple[str, int, int]]:
        if kind == "deepep":
            sizes = {"most_rows": 9, "num_chosen": K, "hidden_size": D}
            exchange: SharedExperts = DeepEpExperts(comm, {0: table}, NUM_SLOTS, group=comm, **sizes)
        else:
            exchange = SharedExperts(comm, {0: table}, NUM_SLOTS)
        exchange.observer = told = Told()
        params = as_bfloat16(make_params(1, held_experts([placement], comm.rank)[0]))
        x, origin = make_rows(comm.rank, 3 + comm.rank)
        exchange.begin([0])
        moe(x.bfloat16(), len(x), None, params, exchange, 0, origin, CONFIG, REFERENCE)
        return told.calls

    for rank in range(2):
        want = [("routed", 0, 3 + rank), ("begin", 0, 0), ("end", 0, 0)]
        for kind in ("deepep", "torch"):
            assert on_ranks(2, lambda comm, kind=kind: work(comm, kind))[rank] == want


@pytest.mark.bad_input
def test_slots_that_are_not_spread_evenly_are_refused() -> None:
    table = placement_tables([random_placement(4, 4, E + 1)], torch.device("cpu"))[0]
    with pytest.raises(KernelError, match="layer 0 has 7 expert slots over 4 ranks; DeepEP needs a"):
        on_ranks(
            4,
            lambda comm: DeepEpExperts(
                comm, {0: table}, NUM_SLOTS, group=comm, most_rows=9, num_chosen=K, hidden_size=D
            ),
        )


def test_what_keeps_deepep_from_running_is_said() -> None:
    assert why_no_deepep(torch.device("cpu")) == "DeepEP runs on CUDA devices, and this is cpu"
    reason = why_no_deepep(torch.device("cuda", 0))
    assert reason is not None
    assert reason.startswith("deepinfer-ep is not installed")
