"""Rows that travel to their experts and back get the bits that one process would have given them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_core.errors import ConfigError, ParallelError
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.model.moe import moe, serve_experts
from deepinfer_core.model.params import MoeParams
from deepinfer_core.parallel.communicator import Communicator, SoleCommunicator
from deepinfer_core.parallel.experts import LocalExperts, RowOrigin, SharedExperts
from deepinfer_core.parallel.placement_tables import PlacementTable, first_placements, held_experts, placement_tables
from deepinfer_core.scheduling.expert_load import choose_slots, split_tokens
from deepinfer_core.scheduling.expert_placement import ExpertTopology, Placement, plan
from tests.core.model_configs import small_config
from tests.core.parallel.in_process import on_ranks

CONFIG = small_config()
D, WIDTH, E, K, NUM_SLOTS = 16, 8, 6, 3, 4


def make_params(seed: int, experts: list[int] | None = None) -> MoeParams:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    w13, w2 = normal(E, D, 2 * WIDTH), normal(E, WIDTH, D)
    held = list(range(E)) if experts is None else experts
    return MoeParams(normal(D, E), normal(E), normal(E), w13[held], w2[held], normal(D, 2 * WIDTH), normal(WIDTH, D), K)


def make_rows(seed: int, count: int) -> tuple[Tensor, RowOrigin]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, D, generator=random)
    slot = torch.randint(0, NUM_SLOTS, (count,), generator=random)
    return x, RowOrigin(slot, torch.randint(0, 5000, (count,), generator=random))


def random_placement(seed: int, num_members: int, num_slots: int) -> Placement:
    load = torch.rand(1, E, generator=torch.Generator().manual_seed(seed)).numpy() ** 4
    return plan(load, None, ExpertTopology(num_devices=num_members), num_slots).placement


@pytest.fixture(params=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return REFERENCE if request.param == "reference" else request.getfixturevalue("native_kernels")


def exchanged(
    comm: Communicator, placement: Placement, table: PlacementTable, counts: list[int], seed: int, kernels: Kernels
) -> Tensor:
    exchange = SharedExperts(comm, {0: table}, NUM_SLOTS)
    for slot in range(NUM_SLOTS):
        exchange.admit(slot, seed + slot)
    params = make_params(seed, held_experts([placement], comm.rank)[0])
    x, origin = make_rows(seed + comm.rank, counts[comm.rank])
    exchange.begin([0])
    if len(x) == 0:
        serve_experts(params, exchange, 0, CONFIG, kernels)
        return x
    return moe(x, len(x), None, params, exchange, 0, origin, CONFIG, kernels)


@settings(deadline=None, max_examples=15)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 5, 19]), min_size=1, max_size=4),
    extra=st.integers(0, 5),
    seed=st.integers(0, 2**20),
)
def test_outputs_have_the_same_bits_for_any_members_placement_and_replicas(
    native_kernels: Kernels, counts: list[int], extra: int, seed: int
) -> None:
    placement = random_placement(seed, len(counts), E + extra)
    split = split_tokens(torch.rand(1, E, generator=torch.Generator().manual_seed(seed)).numpy(), placement)
    table = placement_tables([placement], torch.device("cpu"), {0: split})[0]
    for kernels in (REFERENCE, native_kernels):
        got = on_ranks(len(counts), lambda comm: exchanged(comm, placement, table, counts, seed, kernels))  # noqa: B023 -- used at once
        for rank, count in enumerate(counts):
            x, origin = make_rows(seed + rank, count)
            if count:
                want = moe(x, count, None, make_params(seed), LocalExperts(), 0, origin, CONFIG, kernels)
                assert torch.equal(got[rank], want)


def test_padding_rows_are_not_sent(kernels: Kernels) -> None:
    placement = random_placement(1, 2, E)
    table = placement_tables([placement], torch.device("cpu"))[0]

    def work(comm: Communicator) -> tuple[Tensor, int]:
        exchange = SharedExperts(comm, {0: table}, NUM_SLOTS)
        exchange.begin([0])
        x, origin = make_rows(comm.rank, 16)
        params = make_params(1, held_experts([placement], comm.rank)[0])
        sent: list[int] = []
        dispatch = exchange.dispatch
        exchange.dispatch = lambda *given: (sent.append(len(given[1])), dispatch(*given))[1]  # type: ignore[method-assign] # a spy
        return moe(x, 5, None, params, exchange, 0, origin, CONFIG, kernels), sent[0]

    for y, num_sent in on_ranks(2, work):
        assert num_sent == 5
        assert y[:5].any()
        assert not y[5:].any()


def test_a_replica_is_chosen_as_the_planner_says() -> None:
    placement = random_placement(3, 3, E + 6)
    split = split_tokens(torch.rand(1, E, generator=torch.Generator().manual_seed(3)).numpy(), placement)
    table = placement_tables([placement], torch.device("cpu"), {0: split})[0]
    exchange = SharedExperts(SoleCommunicator(), {0: table}, NUM_SLOTS)
    seeds = [0, 7, 2**64 - 1, 12345678901234567890]
    for slot, seed in enumerate(seeds):
        exchange.admit(slot, seed)
    slot = torch.arange(400) % NUM_SLOTS
    position = torch.arange(400) * 2621  # up to a million
    ids = torch.stack([torch.arange(400) % E, (torch.arange(400) + 1) % E], 1)
    owner, local = table.locate(ids, exchange._start[slot], position)
    keys = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in seeds])[slot].numpy().view("uint64")
    want = choose_slots(split, 0, ids.numpy(), keys, position.numpy())
    assert torch.equal(table.owner[torch.from_numpy(want)], owner)
    assert torch.equal(table.local[torch.from_numpy(want)], local)
    assert len(set(want[ids.numpy() == int(placement.replicas()[0].argmax())].tolist())) > 1


def test_a_member_that_failed_between_dispatch_and_combine_still_plays_its_part() -> None:
    placement = random_placement(2, 2, E)
    table = placement_tables([placement], torch.device("cpu"))[0]

    def work(comm: Communicator) -> list[str]:
        exchange = SharedExperts(comm, {0: table, 1: table, 2: table}, NUM_SLOTS)
        params = make_params(1, held_experts([placement], comm.rank)[0])
        x, origin = make_rows(comm.rank, 4)
        exchange.begin([0, 1, 2])
        done = 0
        if comm.rank == 0:
            moe(x, 4, None, params, exchange, 0, origin, CONFIG, REFERENCE)
            ids, weights = REFERENCE.route(x, params.gate, params.bias, K, 1.5)
            exchange.dispatch(1, x, ids, weights, origin)  # and here its kernels fail
            done = 2
        rest = exchange.unfinished()
        assert rest == [0, 1, 2][done:]
        for layer in rest:
            serve_experts(params, exchange, layer, CONFIG, REFERENCE)
        assert exchange.unfinished() == []
        return comm.meeting.labels[comm.rank]

    first, second = on_ranks(2, work)
    assert first == second
    assert len(first) == 9


@pytest.mark.bad_input
def test_a_layer_out_of_turn_is_named() -> None:
    table = placement_tables([random_placement(2, 1, E)], torch.device("cpu"))[0]
    exchange = SharedExperts(SoleCommunicator(), {0: table, 1: table}, NUM_SLOTS)
    exchange.begin([0])
    with pytest.raises(ParallelError, match="layer 1 is exchanged, due are"):
        serve_experts(make_params(1), exchange, 1, CONFIG, REFERENCE)
    with pytest.raises(ParallelError, match="a step begins"):
        exchange.begin([0])


def test_the_first_placement_holds_every_expert_once_and_spreads_the_extra_ones() -> None:
    for members, extra in ((1, 0), (2, 0), (3, 0), (2, 2), (3, 4)):
        layers, stages = first_placements(CONFIG, members, extra)
        held = [held_experts((layers, stages), member) for member in range(members)]
        for layer in range(CONFIG.num_hidden_layers):
            everything = sorted(expert for one in held for expert in one[layer])
            assert len(everything) == CONFIG.n_routed_experts + extra
            assert set(everything) == set(range(CONFIG.n_routed_experts))
            assert max(len(one[layer]) for one in held) - min(len(one[layer]) for one in held) <= 1
        for stage in range(CONFIG.num_hidden_layers, CONFIG.num_hidden_layers + CONFIG.num_nextn_predict_layers):
            assert [expert for one in held for expert in one[stage]] == list(range(CONFIG.dspark_n_routed_experts))


def test_members_beyond_the_experts_of_the_drafter_hold_none_of_them() -> None:
    _, stages = first_placements(CONFIG, 6, 0)
    held = [held_experts([stages], member)[0] for member in range(6)]
    assert sorted(expert for one in held for expert in one) == [0, 1, 2]
    table = placement_tables([stages], torch.device("cpu"))[0]
    origin = RowOrigin(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    owner, local = table.locate(torch.arange(3)[:, None], origin.slot, origin.position)
    assert [held[int(member)][int(slot)] for member, slot in zip(owner, local, strict=True)] == [0, 1, 2]


@pytest.mark.bad_input
def test_more_members_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expert_parallel_size is 7; .* has 6 experts .*: at most 6 ranks"):
        first_placements(CONFIG, 7, 0)
