# What must be refused has the wrong type on purpose.
# pyright: reportArgumentType=false
"""Settings and requests that must be refused, with the value, the limit and the way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.config.scheduler import (
    CacheConfig,
    SchedulerConfig,
    SpeculationConfig,
    default_keep_tokens,
    window_ring_slots,
)
from deepinfer_core.errors import CapacityError, ConfigError, EngineError, QueueFullError, RequestError
from tests.core.scheduling.harness import make_engine

pytestmark = pytest.mark.bad_input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be an integer from 1 to 65536"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_num_seqs": 2.0}, "max_num_seqs is 2.0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, "less than max_num_seqs 64"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_prefill_chunk_tokens": 0}, "max_prefill_chunk_tokens is 0"),
        ({"max_num_waiting": 0}, "max_num_waiting is 0"),
        ({"priority_head_start": -1}, "priority_head_start is -1"),
        ({"overlap": 1}, "overlap is 1"),
    ],
)
def test_scheduler_settings_have_ranges(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"memory_fraction": 0.0}, "memory_fraction is 0.0"),
        ({"memory_fraction": float("nan")}, "memory_fraction is nan"),
        ({"memory_fraction": 1.01}, "memory_fraction is 1.01"),
        ({"decoder_prefill": "some"}, "decoder_prefill is 'some'"),
        ({"decoder_prefill": ["full"]}, "decoder_prefill is"),
        ({"keep_tokens": 0}, "keep_tokens is 0"),
        ({"prefix_replay": "on"}, "prefix_replay is 'on'"),
        ({"prefix_salt": "xyz"}, "32 to 128 hexadecimal digits"),
        ({"prefix_salt": "0" * 33}, "an even number"),
        ({"prefix_salt": "0" * 130}, "32 to 128"),
    ],
)
def test_cache_settings_have_ranges(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_drafts": -1}, "num_drafts is -1"),
        ({"num_drafts": 33}, "num_drafts is 33"),
        ({"draft_schedule": "auto"}, "draft_schedule is 'auto'"),
        ({"verification": "none"}, "verification is 'none'"),
        ({"confidence_temperatures": ()}, "confidence_temperatures is"),
        ({"confidence_temperatures": (1.0, 2.0)}, "has 2 values for num_drafts 5"),
        ({"confidence_temperatures": (0.0,)}, r"confidence_temperatures\[0\] is 0.0"),
        ({"confidence_temperatures": (float("inf"),)}, r"confidence_temperatures\[0\] is inf"),
        ({"confidence_temperatures": [1.0]}, "give a tuple"),
        ({"max_backtracking_tokens": 5}, "a step of 5 drafts can fall back 6 rows"),
    ],
)
def test_speculation_settings_have_ranges(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculationConfig(**settings)


def test_aliases_of_the_original_are_understood() -> None:
    assert CacheConfig(decoder_prefill="bounded").decoder_prefill == "compact"  # type: ignore[arg-type]
    assert CacheConfig(decoder_prefill="off").decoder_prefill == "full"  # type: ignore[arg-type]


def test_the_release_has_rings_of_140_slots_and_keeps_140_rows() -> None:
    assert window_ring_slots(128, 5) == 140
    assert default_keep_tokens(128, 5) == 140


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="max_batch"):
        SchedulerConfig(max_batch=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        (np.zeros(0, np.int64), "the prompt is empty"),
        ([-1], r"prompt\[0\] is -1"),
        ([2**31], r"prompt\[0\] is 2147483648"),
        (np.array([3, -2]), "ids from -2 to 3"),
        ([1.5], r"prompt\[0\] is 1.5"),
        (np.array([1.5]), "type float64"),
        (np.zeros((2, 2), np.int64), "one dimension"),
        ("text", "must be a list of integers"),
        ([1] * 256, "the prompt has 256 tokens; with one for the answer the limit is 256"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(prompt: Any, message: str) -> None:
    engine = make_engine(max_model_len=256)
    with pytest.raises(RequestError, match=message):
        engine.scheduler.add(prompt, SamplingParams(), seed=0)
    assert engine.scheduler.num_unfinished == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"priority": 1_001}, "priority is 1001; it must be an integer from -1000 to 1000"),
        ({"tenant_salt": "x" * 1_025}, "the tenant salt has 1025 characters; at most 1024"),
        ({"content": np.zeros(3, np.uint8)}, r"content has the shape \(3,\); the prompt has 2 tokens"),
        ({"identity": np.zeros(1, np.uint8)}, r"identity has the shape \(1,\)"),
    ],
)
def test_other_arguments_of_a_request_have_ranges(arguments: dict[str, Any], message: str) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.scheduler.add([1, 2], SamplingParams(), **({"seed": 0} | arguments))
    assert engine.scheduler.num_unfinished == 0


def test_a_full_queue_refuses_and_has_room_again_when_somebody_leaves() -> None:
    engine = make_engine(max_num_waiting=2)
    numbers = [engine.scheduler.add([1, 2], SamplingParams(), seed=i) for i in range(2)]
    with pytest.raises(QueueFullError, match="2 requests are waiting, the limit max_num_waiting"):
        engine.scheduler.add([1, 2], SamplingParams(), seed=3)
    engine.scheduler.abort(numbers[0])
    engine.scheduler.add([1, 2], SamplingParams(), seed=3)
    engine.run()
    assert len(engine.tokens) == 2


def test_a_strange_tenant_salt_is_just_a_salt() -> None:
    engine = make_engine()
    for salt in ("\ud800", "\0", "💡" * 200):
        engine.scheduler.add([5] * 300, SamplingParams(max_tokens=1), seed=0, tenant_salt=salt)
    engine.run()
    assert len(engine.tokens) == 3


def test_only_a_request_that_waits_for_something_can_be_resumed() -> None:
    engine = make_engine()
    number = engine.scheduler.add([1, 2], SamplingParams(), seed=0)
    for wrong in (number, 99):
        with pytest.raises(RequestError, match=f"request {wrong} does not wait"):
            engine.scheduler.resume(wrong)


def test_a_cache_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(CapacityError, match="0 tokens"):
        make_engine(num_blocks=0)


def test_an_engine_with_work_left_is_not_idle() -> None:
    engine = make_engine()
    engine.scheduler.add([1, 2], SamplingParams(), seed=0)
    with pytest.raises(EngineError, match="not idle: 1 requests"):
        engine.scheduler.check_idle()
