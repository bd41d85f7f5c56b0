"""The cost of a step: sizes against the manifest, times against hand-made sums and what must hold on any hardware."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from deepinfer_core.checkpoint.memory_plan import Workload, cache_bytes, kv_bytes_per_token, part_sizes, plan_memory
from deepinfer_core.cluster.hardware import DEVICES, device_named
from deepinfer_core.cluster.model_work import RELEASE, ModelWork
from deepinfer_core.cluster.step_cost import Calibration, StepCost
from deepinfer_core.errors import ConfigError
from tests.core.model_configs import release_config, small_config

FIT = Calibration(layer_latency_s=2e-4, efficiency=0.4)


def cost(num_devices: int = 64, device: str = "GB200", work: ModelWork = RELEASE) -> StepCost:
    return StepCost(work, device_named(device), num_devices, FIT)


def decode_s(of: StepCost, requests: float, drafts: float = 3, context: float = 60_000, balance: float = 1.0) -> float:
    return float(of.decode_seconds(np.array([float(requests)]), np.array([float(drafts)]), context, balance)[0])


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_the_released_sizes_are_those_of_its_config() -> None:
    assert ModelWork.of(release_config()) == RELEASE


def test_a_row_uses_the_published_active_parameters() -> None:
    experts = RELEASE.experts_per_row * RELEASE.expert_params
    encoder = RELEASE.encoder.dense_params + 20 * experts
    decoder = RELEASE.decoder.dense_params + 20 * experts
    assert encoder == pytest.approx(8e9, rel=0.02)
    assert encoder + decoder + RELEASE.head_params == pytest.approx(16e9, rel=0.02)


def test_bytes_are_those_of_the_manifest() -> None:
    parts = {size.part: size.packed_bytes for size in part_sizes(release_config())}
    assert RELEASE.layers * RELEASE.num_experts * RELEASE.expert_bytes == pytest.approx(parts["experts"])
    draft_experts = RELEASE.draft.stages * RELEASE.draft.num_experts * RELEASE.expert_bytes
    dense = ("mhc", "attention", "router", "shared_expert", "engram", "indexer")
    whole = sum(parts[part] for part in dense) + parts["embedding"] / 2 + parts["draft"] - draft_experts
    assert RELEASE.dense_bytes == pytest.approx(
        whole, rel=0.05
    )  # ours leaves out norms, float32 mixes, the Markov head
    assert RELEASE.kv_bytes_per_token == kv_bytes_per_token(release_config(), "packed")


def test_memory_agrees_with_the_memory_plan() -> None:
    """Weights of a rank of EP64, as the planner of one group has them."""
    plan = plan_memory(release_config(), Workload(context_tokens=128, num_devices=64))
    experts = RELEASE.layers * 384 / 64 * RELEASE.expert_bytes + 3 * 128 / 64 * RELEASE.expert_bytes
    whole = sum(plan.ranks[0].weights.values()) - plan.ranks[0].weights["embedding"] / 2
    assert RELEASE.dense_bytes + experts == pytest.approx(
        whole, rel=0.05
    )  # ours leaves out norms, float32 mixes, the Markov head


def test_window_records_are_those_of_the_memory_plan() -> None:
    one, two = (cache_bytes(release_config(), Workload(context_tokens=128), n)["windows"] for n in (1, 2))
    assert two - one == (RELEASE.layers + RELEASE.draft.stages) * (RELEASE.window + 12) * RELEASE.window_bytes


def test_a_small_model_has_work_too() -> None:
    work = ModelWork.of(small_config())
    assert (work.layers, work.encoder.layers, work.decoder.candidate_scans) == (4, 2, 1)
    assert 0 < decode_s(cost(2, work=work), 1) < decode_s(cost(2), 1)


# ---- times -----------------------------------------------------------------------------------------------------------


def test_one_device_alone_costs_its_sum() -> None:
    """No experts, no attention to speak of: weights and products by hand, and half of the latency."""
    work = dataclasses.replace(RELEASE, expert_params=0, key_flops=0, score_flops=0, window_bytes=0, entry_bytes=0)
    work = dataclasses.replace(work, index_bytes=0)
    device = device_named("H200")
    params = work.encoder.dense_params + work.decoder.dense_params + work.head_params
    expected = 0.5 * 43 * FIT.layer_latency_s
    expected += work.dense_bytes / (0.8 * 4.8e12) + 7 * 2 * params / (0.4 * 1979e12)
    assert decode_s(StepCost(work, device, 1, FIT), 7, drafts=0) == pytest.approx(expected)


def test_prefill_grows_by_the_work_of_its_rows() -> None:
    of = cost(4, "B200")
    first, second, third = (of.prefill_seconds(rows, 140, 1e5) for rows in (20_000, 40_000, 60_000))
    assert third - second == pytest.approx(second - first)
    active = RELEASE.encoder.dense_params + 20 * 6 * RELEASE.expert_params
    keys, scores = 20 * 128 + 18 * 512, 1.5 * 1e5
    flops = 2 * active + keys * RELEASE.key_flops + scores * RELEASE.score_flops
    assert (second - first) / 20_000 == pytest.approx(flops / (0.4 * 4500e12), rel=1e-6)


def test_kept_rows_cost_the_decoder_half() -> None:
    of = cost(4, "B200")
    assert of.prefill_seconds(4_096, 4_096, 1e4) > 1.5 * of.prefill_seconds(4_096, 0, 1e4)


def test_few_rows_are_flat_and_many_are_a_line() -> None:
    of = cost()
    assert decode_s(of, 8) == pytest.approx(decode_s(of, 2), rel=0.02)
    assert decode_s(of, 512) - decode_s(of, 256) == pytest.approx(2 * (decode_s(of, 256) - decode_s(of, 128)), rel=0.01)


@pytest.mark.parametrize("requests", [1, 8, 64, 256])
def test_more_of_anything_is_never_faster(requests: int) -> None:
    of, base = cost(), decode_s(cost(), requests)
    assert decode_s(of, requests + 1) >= base
    assert decode_s(of, requests, drafts=4) >= base
    assert decode_s(of, requests, context=120_000) >= base
    assert base <= decode_s(of, requests, balance=0.5) < 2 * base


@pytest.mark.parametrize("requests", [1, 4, 16, 64, 256])
def test_ep64_is_ahead_of_ep8_at_every_batch_size(requests: int) -> None:
    """Published without figures."""
    assert decode_s(cost(64), requests) < decode_s(cost(8), requests)


def test_a_group_beyond_the_scale_up_domain_pays_for_the_network() -> None:
    inside, outside = cost(8, "B200"), cost(16, "B200")
    assert decode_s(outside, 256) > 1.5 * decode_s(inside, 256)


def test_every_device_has_marked_figures() -> None:
    assert {"H200", "B200", "GB200"} <= set(DEVICES)
    assert sum(name.startswith("Ascend950") for name in DEVICES) == 2
    for device in DEVICES.values():
        for figure in device.figures().values():
            assert figure.value > 0
            assert figure.mark in ("published", "assumed")
            assert figure.source


@pytest.mark.bad_input
def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'H100'.*'H200'"):
        device_named("H100")


def test_planning_a_cluster_imports_no_torch() -> None:
    code = "import sys, deepinfer_core.cluster.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
