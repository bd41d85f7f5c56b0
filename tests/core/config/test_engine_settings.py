"""The settings tree: one flat name each, three sources, conflicts said, unknown names refused."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_core.config.engine import EngineConfig, all_settings, resolve_settings
from deepinfer_core.config.env import VARIABLES, read_text
from deepinfer_core.errors import ConfigError

# The variables of the original DeepInfer, each with a text and what it must set.
VARIABLE_VALUES: dict[str, tuple[str, str, Any]] = {
    "DEEPINFER_ACCELERATOR": ("nvidia", "accelerator", "nvidia"),
    "DEEPINFER_HF_MODEL_DIR": ("/models/x", "model", "/models/x"),
    "DEEPINFER_USE_NEXTN_DECODE": ("0", "num_drafts", 0),
    "DEEPINFER_ENABLE_MTP_VARLEN": ("0", "draft_schedule", "fixed"),
    "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE": ("1,1.5,2,1,0.5", "confidence_temperatures", (1, 1.5, 2, 1, 0.5)),
    "DEEPINFER_MAX_BACKTRACKING_TOKENS": ("6", "max_backtracking_tokens", 6),
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": ("mask", "decoder_prefill", "mask"),
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": ("200", "keep_tokens", 200),
    "DEEPINFER_ZERO_OVERHEAD_SCHEDULING": ("0", "overlap", False),
    "DEEPINFER_BATCH_INVARIANT": ("1", "batch_invariant", True),
    "DEEPINFER_EXPERT_COUNT_WINDOW_SIZE": ("50", "expert_count_window", 50),
    "DEEPINFER_EXPERT_REARRANGEMENT_STEP_INTERVAL": ("0", "expert_rearrangement_interval", 0),
    "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS": ("0", "num_extra_experts", 0),
    "DEEPINFER_MOE_LB_STAT_INTERVAL": ("64", "expert_stat_interval", 64),
    "DEEPINFER_ENFORCE_EAGER": ("true", "enforce_eager", True),
    "DEEPINFER_JIT_CACHE_DIR": ("/cache", "jit_cache_dir", "/cache"),
    "DEEPINFER_ENGRAM_FORCE_GPU_STORAGE": ("1", "engram_storage", "device"),
}


def value_of(config: EngineConfig, name: str) -> Any:
    part = all_settings()[name].part
    return getattr(getattr(config, part) if part else config, name)


def test_the_table_of_variables_is_complete() -> None:
    assert set(VARIABLE_VALUES) == set(VARIABLES)


@pytest.mark.parametrize("variable", VARIABLE_VALUES)
def test_every_variable_of_the_original_fills_its_setting(variable: str) -> None:
    text, name, expected = VARIABLE_VALUES[variable]
    resolved = resolve_settings({}, {variable: text})
    assert value_of(resolved.config, name) == expected
    assert resolved.sources[name] == variable
    assert resolved.notes == ()


def test_every_setting_has_one_row_with_its_source() -> None:
    resolved = resolve_settings({"num_drafts": 3, "prefix_salt": "ab" * 16}, {})
    rows = {name: (value, source) for name, value, source in resolved.rows()}
    assert set(rows) == set(all_settings())
    assert rows["num_drafts"] == ("3", "argument")
    assert rows["max_num_seqs"] == ("256", "default")
    assert rows["prefix_salt"] == ("(hidden)", "argument")
    assert rows["max_model_len"] == ("auto", "default")


def test_an_argument_wins_over_the_environment_and_the_conflict_is_said() -> None:
    resolved = resolve_settings({"num_drafts": 3}, {"DEEPINFER_USE_NEXTN_DECODE": "5"})
    assert resolved.config.speculation.num_drafts == 3
    assert len(resolved.notes) == 1
    assert all(part in resolved.notes[0] for part in ("DEEPINFER_USE_NEXTN_DECODE", "'5'", "3"))


def test_sources_that_agree_are_no_conflict() -> None:
    assert resolve_settings({"num_drafts": 5}, {"DEEPINFER_USE_NEXTN_DECODE": "5"}).notes == ()


def test_names_of_other_engines_are_accepted() -> None:
    config = EngineConfig.from_settings(gpu_memory_utilization=0.5, num_speculative_tokens=2)
    assert (config.cache.memory_fraction, config.speculation.num_drafts) == (0.5, 2)


def test_an_unknown_variable_is_reported_with_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIENT", "1")
    (note,) = resolve_settings({}).notes
    assert "DEEPINFER_BATCH_INVARIENT" in note
    assert "DEEPINFER_BATCH_INVARIANT" in note


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", "  ")
    assert read_text("DEEPINFER_HF_MODEL_DIR") is None


def test_repeatable_answers_take_exact_replay() -> None:
    assert EngineConfig().prefix_replay == "exact"
    assert EngineConfig(deterministic=False).prefix_replay == "bounded"
    assert EngineConfig.from_settings(prefix_replay="off").prefix_replay == "off"


def test_an_engine_seed_is_taken_modulo_two_to_the_64() -> None:
    assert EngineConfig(seed=-1).seed == 2**64 - 1
    assert EngineConfig(seed=None).seed is None


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_draft": 3}, "num_draft is not a setting; did you mean num_drafts"),
        ({"zzz": 3}, "zzz is not a setting"),
        ({"num_drafts": 3, "num_speculative_tokens": 4}, "they mean the same"),
        ({"data_parallel_size": 3, "expert_parallel_size": 2}, "expert_parallel_size is 2; it must divide .* = 3"),
        ({"data_parallel_size": 1, "expert_parallel_size": 2}, "expert_parallel_size is 2; .* one of 1$"),
        ({"data_parallel_size": 400, "context_parallel_size": 400}, "160000; it must be .* 65536"),
        ({"collective_deadline_s": 0}, "collective_deadline_s is 0"),
        ({"expert_parallel_size": 0}, "expert_parallel_size is 0"),
        ({"context_parallel_size": "1"}, "context_parallel_size is '1'"),
        ({"engram_parallel_size": 10**9}, "engram_parallel_size"),
        ({"num_extra_experts": 4}, "num_extra_experts is 4"),
        ({"accelerator": "tpu"}, "accelerator is 'tpu'"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"seed": 2**64}, "seed is"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"deterministic": 1}, "deterministic is 1"),
        ({"verification": "ratio"}, "not repeatable.*deterministic=False"),
        ({"prefix_replay": "bounded"}, "deterministic=False"),
        ({"logprobs_mode": "x"}, "logprobs_mode is 'x'"),
        ({"engram_storage": "tape"}, "engram_storage is 'tape'"),
        ({"model": ""}, "model is ''"),
        ({"model": "a\0b"}, "model is"),
        ({"tokenizer": 3}, "tokenizer is 3"),
        ({"num_drafts": -1}, "num_drafts is -1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"memory_fraction": float("nan")}, "memory_fraction is nan"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings(settings, {})


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("DEEPINFER_USE_NEXTN_DECODE", "five", "'five'; it must be an integer"),
        ("DEEPINFER_USE_NEXTN_DECODE", "-1", "num_drafts is -1"),
        ("DEEPINFER_BATCH_INVARIANT", "maybe", "'maybe'; it must be 0 or 1"),
        ("DEEPINFER_ENABLE_MTP_VARLEN", "2", "'2'; it must be 0 or 1"),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,x", "numbers with commas"),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,2", "confidence_temperatures has 2 values"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "half", "decoder_prefill is 'half'"),
        ("DEEPINFER_MAX_BACKTRACKING_TOKENS", "2", "max_backtracking_tokens is 2"),
        ("DEEPINFER_ACCELERATOR", "tpu", "accelerator is 'tpu'"),
    ],
)
def test_a_bad_variable_is_refused(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings({}, {variable: text})


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("DEEPINFER_USE_NEXTN_DECODE", "999"),
        ("DEEPINFER_MAX_BACKTRACKING_TOKENS", "2"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "foo"),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "0"),
    ],
)
def test_a_value_out_of_range_names_the_variable_that_it_comes_from(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        resolve_settings({}, {variable: text})


def test_an_argument_out_of_range_blames_no_variable() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_settings({"num_drafts": 999}, {"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "200"})
    assert "DEEPINFER" not in str(caught.value)
