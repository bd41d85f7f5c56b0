"""Whole runs: what is conserved, what repeats, what grows with what."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from deepinfer_core.cluster.build import Cluster, simulated_groups
from deepinfer_core.cluster.model_work import RELEASE
from deepinfer_core.cluster.outcome import Outcome, Percentiles, simulate
from deepinfer_core.cluster.plan_file import ClusterPlan, DecodeSettings, PrefillSettings
from deepinfer_core.cluster.simulation import ClusterSimulation
from deepinfer_core.errors import CapacityError, ConfigError

SHORT = {"seconds": 40.0, "warmup_seconds": 20.0}


def plan(**sections: dict[str, Any]) -> ClusterPlan:
    """The default plan, shorter, with some values changed."""
    base = ClusterPlan()
    changed = {
        name: dataclasses.replace(getattr(base, name), **values)
        for name, values in (sections | {"cluster": SHORT | sections.get("cluster", {})}).items()
    }
    return dataclasses.replace(base, **changed)


def outcome(**sections: dict[str, Any]) -> Outcome:
    return simulate(Cluster(plan(**sections), RELEASE, "position"))


@pytest.fixture(scope="module")
def usual() -> Outcome:
    return outcome()


@pytest.fixture(scope="module")
def whole_run() -> ClusterSimulation:
    """Recorded from the first request on."""
    simulation = Cluster(plan(cluster={"warmup_seconds": 0.0}), RELEASE, "position").simulation()
    simulation.run()
    return simulation


# ---- conservation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.5, 1.0, 2.5])
def test_littles_law_and_the_conservation_of_requests_hold_on_every_run(load: float) -> None:
    simulation = Cluster(plan(cluster={"load": load, "seconds": 15.0}), RELEASE, "position").simulation()
    simulation.run()
    records = simulation.records
    places = records.places()
    assert records.arrived == records.finished + sum(places.values())
    assert min(places.values()) >= 0
    assert records.request_seconds == pytest.approx(records.sojourn_s, rel=1e-9)
    assert places["decode"] == sum(len(group) for group in simulation.decode)


def test_tokens_that_were_gained_are_those_of_the_requests(whole_run: ClusterSimulation) -> None:
    gained = sum(group.totals.tokens for group in whole_run.decode)
    ended = sum(r.output_tokens - 1 for r in whole_run.records.ended)
    begun = [r for r in whole_run.records.measured if math.isnan(r.finished_s) and not math.isnan(r.decoding_s)]
    assert ended < gained < ended + sum(r.output_tokens - 1 for r in begun)


def test_every_request_passes_the_places_in_order(whole_run: ClusterSimulation) -> None:
    for r in whole_run.records.ended:
        if r.output_tokens > 1:
            times = (r.arrived_s, r.ready_s, r.started_s, r.first_token_s, r.handed_over_s, r.decoding_s, r.finished_s)
            assert list(times) == sorted(times)
            assert r.hit_tokens % 128 == 0
            assert r.hit_tokens < r.prompt_tokens
            assert r.rows_left == 0


# ---- repeatable ------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_outcome_and_another_does_not() -> None:
    short = {"seconds": 6.0, "warmup_seconds": 2.0}
    first, again = outcome(cluster=short), outcome(cluster=short)
    assert first == again
    assert outcome(cluster=short | {"seed": 1}) != first


def test_a_smaller_sample_of_the_cluster_says_nearly_the_same(usual: Outcome) -> None:
    larger = outcome(cluster={"scale_down": 4, "seconds": 20.0})
    assert larger.output_tokens_per_s == pytest.approx(usual.output_tokens_per_s, rel=0.1)
    assert larger.user_tokens_per_s.p50 == pytest.approx(usual.user_tokens_per_s.p50, rel=0.1)
    assert larger.first_token_s.p50 == pytest.approx(usual.first_token_s.p50, rel=0.35)


# ---- what grows with what --------------------------------------------------------------------------------------------


def test_the_default_traffic_is_about_what_was_published_of_production(usual: Outcome) -> None:
    assert usual.hit_share == pytest.approx(0.96, abs=0.02)
    assert 0.1 < usual.first_token_s.p50 < 0.4
    assert 200 < usual.user_tokens_per_s.p50 < 320
    assert usual.keeps_up
    assert {traffic.kind for traffic in usual.classes} == {"chat", "agent"}


def test_more_load_means_longer_waits_slower_users_and_more_throughput(usual: Outcome) -> None:
    busy = outcome(cluster={"load": 1.5})
    assert busy.first_token_s.p90 > usual.first_token_s.p90
    assert busy.user_tokens_per_s.p50 < usual.user_tokens_per_s.p50
    assert busy.output_tokens_per_s > 1.3 * usual.output_tokens_per_s
    assert busy.drafts_a_step < usual.drafts_a_step


def test_a_pool_keeps_up_below_its_capacity_and_not_above(usual: Outcome) -> None:
    assert usual.capacity.bottleneck == "prefill"
    limit = usual.capacity.prefill_requests_per_s / usual.requests_per_s
    assert outcome(cluster={"load": 0.85 * limit}).keeps_up
    overloaded = outcome(cluster={"load": 1.5 * limit})
    assert not overloaded.keeps_up
    assert overloaded.computed_tokens_per_s < 1.1 * usual.computed_tokens_per_s * limit


def test_a_small_decode_pool_is_the_bottleneck() -> None:
    starved = outcome(
        prefill={"devices": 96}, decode={"devices": 32, "expert_parallel": 32}, cluster={"scale_down": 8, "load": 1.6}
    )
    assert starved.capacity.bottleneck == "decode"
    assert starved.capacity.balanced_prefill_share < 0.75
    assert not starved.keeps_up
    assert starved.waiting_for_decode > 0


def test_without_a_store_everything_is_computed() -> None:
    nothing = outcome(store={"terabytes": 0.0}, cluster={"load": 0.05})
    assert nothing.hit_share == 0
    assert nothing.computed_tokens_per_s == pytest.approx(nothing.input_tokens_per_s, rel=0.1)


def test_a_full_store_forgets() -> None:
    small = outcome(store={"terabytes": 0.05}, cluster={"load": 0.3})
    assert small.evicted_store_share > 0.5
    assert small.hit_share < 0.9


def test_rearranged_experts_are_faster_than_experts_that_stay(usual: Outcome) -> None:
    never = outcome(balance={"interval_steps": 0})
    assert never.expert_balance < usual.expert_balance
    assert never.rearrangements == 0
    assert never.user_tokens_per_s.p50 < usual.user_tokens_per_s.p50


def test_both_readings_are_simulated_and_the_slower_steps_make_slower_users(usual: Outcome) -> None:
    other = simulate(Cluster(plan(), RELEASE, "drafts"))
    assert other.step_s > usual.step_s
    assert other.user_tokens_per_s.p50 < usual.user_tokens_per_s.p50


def test_a_session_beyond_the_longest_request_ends() -> None:
    base = plan(cluster={"load": 0.01, "scale_down": 1})
    endless = dataclasses.replace(base.traffic[1], turns=10.0, turn_tokens=100_000.0, think_s=0.5)
    found = simulate(Cluster(dataclasses.replace(base, traffic=(endless,)), RELEASE, "position"))
    assert found.sessions_too_long > 0


def test_percentiles_of_speeds_are_what_so_many_have_at_least() -> None:
    values = [float(v) for v in range(1, 1_002)]
    assert Percentiles.of(values) == Percentiles(501, 901, 991)
    assert Percentiles.of(values, at_least=True) == Percentiles(501, 101, 11)
    assert math.isnan(Percentiles.of([]).p50)


# ---- what is simulated, and what cannot be ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "size", "scale", "expected"),
    [(64, 4, 16, (1, 4)), (64, 64, 16, (1, 4)), (64, 4, 4, (4, 4)), (128, 64, 16, (1, 8)), (64, 4, 64, (1, 1))],
)
def test_one_in_scale_devices_is_simulated(devices: int, size: int, scale: int, expected: tuple[int, int]) -> None:
    pool = DecodeSettings(devices=devices, expert_parallel=size)
    groups, ranks = simulated_groups(pool, scale)
    assert (groups, ranks) == expected
    assert groups * ranks * scale == devices


@pytest.mark.bad_input
def test_weights_that_do_not_fit_name_the_way_out() -> None:
    with pytest.raises(CapacityError, match=r"EP1 take .* prefill\.expert_parallel"):
        Cluster(plan(prefill={"expert_parallel": 1}), RELEASE, "position")
    with pytest.raises(CapacityError, match=r"no room for KV.*decode\.expert_parallel"):
        Cluster(plan(decode={"expert_parallel": 1, "device": "H200"}), RELEASE, "position")


@pytest.mark.bad_input
def test_more_ranks_than_expert_slots_name_the_settings() -> None:
    with pytest.raises(
        ConfigError, match=r"decode\.expert_parallel is 1024 .* 448 expert slots.*spare_slots at least 640"
    ):
        Cluster(plan(decode={"expert_parallel": 1024, "devices": 1024}), RELEASE, "position")


@pytest.mark.bad_input
def test_a_run_of_too_many_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 500,000.*scale_down"):
        Cluster(plan(cluster={"seconds": 86_400.0}), RELEASE, "position")


@pytest.mark.bad_input
def test_a_scale_that_does_not_divide_the_pools_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scale_down is 5.*prefill"):
        plan(cluster={"scale_down": 5})
    with pytest.raises(ConfigError, match=r"scale_down is 16.*decode"):
        ClusterPlan(prefill=PrefillSettings(devices=64), decode=DecodeSettings(devices=72, expert_parallel=72))


@pytest.mark.bad_input
def test_a_run_in_which_nothing_ends_is_refused() -> None:
    with pytest.raises(CapacityError, match="no request finished"):
        outcome(cluster={"seconds": 1.0, "warmup_seconds": 0.0, "load": 1e-6})
