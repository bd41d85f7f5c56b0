"""`ModelConfig`: what the schedules of the release mean, and which config.json is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import ConfigError, DeepInferError, ModelNotFoundError
from tests.core.model_configs import release_config, release_json, small_config, small_json


def test_the_release_has_the_layer_roles_of_the_specification() -> None:
    config = release_config()
    roles = {layer: config.role(layer) for layer in range(40)}
    assert [layer for layer, role in roles.items() if role == "window"] == [0, 1]
    assert [layer for layer, role in roles.items() if role == "source"] == [2, 8, 14, 20]
    assert [layer for layer, role in roles.items() if role == "reindex"] == [24, 28, 32, 36]
    assert [config.kv_owner(layer) for layer in (0, 2, 7, 8, 13, 19, 20, 39)] == [None, 2, 2, 8, 8, 14, 20, 20]
    assert [config.index_owner(layer) for layer in (1, 7, 19, 23, 24, 31, 39)] == [None, 2, 14, 20, 24, 28, 36]
    assert [layer for layer in range(40) if config.uses_candidates(layer)] == [24, 28, 32, 36]


def test_the_release_has_the_published_sizes() -> None:
    config = release_config()
    assert config.decoder_start == 20
    assert config.exact_decoder_rows == 2541
    assert config.global_kv_bytes_per_token == 890
    assert config.engram_columns == 24


def test_a_draft_stage_has_no_compressed_cache() -> None:
    config = release_config()
    assert [config.role(layer) for layer in (40, 41, 42)] == ["window"] * 3


def test_the_name_type_is_accepted_for_rope_type() -> None:
    root = small_json()
    scaling = root["text_config"]["rope_scaling"]
    scaling["type"] = scaling.pop("rope_type")
    assert ModelConfig.from_dict(root) == small_config()


def test_a_config_without_vision_or_draft_is_complete() -> None:
    config = small_config(num_nextn_predict_layers=0, compress_ratios=[0, 2, 1, 1])
    assert config.vision is None
    assert config.num_nextn_predict_layers == 0


def test_configs_of_equal_content_are_equal_and_hashable() -> None:
    assert {release_config(), release_config()} == {release_config()}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", -5120),
        ("hidden_size", 0),
        ("hidden_size", 33),
        ("hidden_size", 1 << 40),
        ("hidden_size", True),
        ("hidden_size", 64.0),
        ("hidden_size", "64"),
        ("hidden_size", None),
        ("num_hidden_layers", 5),
        ("n_routed_experts", 10**9),
        ("num_experts_per_tok", 7),
        ("head_dim", 48),
        ("qk_rope_head_dim", 7),
        ("qk_rope_head_dim", 64),
        ("o_groups", 3),
        ("rope_theta", float("nan")),
        ("rope_theta", float("inf")),
        ("rope_theta", 10**400),
        ("swiglu_limit", -1.0),
        ("compress_ratios", [0, 2, 1, 1, 0]),
        ("compress_ratios", [0, 3, 1, 1, 0, 0]),
        ("compress_ratios", [0, 2, 1, 1, 1, 0]),
        ("compress_ratios", [1, 2, 1, 1, 0, 0]),
        ("compress_ratios", {}),
        ("kv_source_layer_ids", [2, 1]),
        ("kv_source_layer_ids", [1, 9]),
        ("kv_source_layer_ids", [1]),
        ("index_source_layer_ids", [1, 3]),
        ("candidate_source_layer_id", 0),
        ("engram_layer_ids", [0, 0]),
        ("engram_num_embeddings", []),
        ("engram_num_embeddings", [0]),
        ("engram_max_ngram_size", 1),
        ("engram_pad_token_id", 64),
        ("dspark_noise_token_id", 64),
        ("dspark_target_layer_ids", []),
        ("dspark_target_layer_ids", [4]),
        ("dspark_target_layer_ids", [3, 1]),
        ("dspark_target_layer_ids", [1, 1]),
        ("dspark_num_experts_per_tok", 4),
        ("rope_scaling", None),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 16}),
        ("scoring_func", "softmax"),
        ("n_shared_experts", 2),
    ],
)
def test_a_value_that_cannot_be_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key if key != "num_hidden_layers" else "compress_ratios"):
        small_config(**{key: value})


@pytest.mark.bad_input
@pytest.mark.parametrize("root", [None, [], "x", 1, {}, {"model_type": "llama"}, {"text_config": []}])
def test_what_is_no_config_of_this_architecture_is_refused(root: Any) -> None:
    with pytest.raises(ConfigError):
        ModelConfig.from_dict(root)


@pytest.mark.bad_input
def test_another_quantization_is_refused() -> None:
    root = release_json()
    root["quantization_config"]["weight_block_size"] = [128, 128]
    with pytest.raises(ConfigError, match=r"weight_block_size is \[128, 128\].*\[32, 32\]"):
        ModelConfig.from_dict(root)


@pytest.mark.bad_input
@pytest.mark.parametrize("key", ["vocab_size", "bos_token_id", "rope_scaling", "hc_eps"])
def test_a_missing_key_is_named(key: str) -> None:
    root = small_json()
    root.pop(key, None)
    root["text_config"].pop(key, None)
    with pytest.raises(ConfigError, match=f"'{key}' is missing"):
        ModelConfig.from_dict(root)


@pytest.mark.bad_input
@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"a": NaN' + b"}" * 3])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.bad_input
def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=str(tmp_path)):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.bad_input
def test_a_config_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * ((4 << 20) + 1))
    with pytest.raises(ConfigError, match="bytes"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.bad_input
def test_a_thousand_damaged_configs_are_read_or_refused_with_a_documented_error() -> None:
    rng = random.Random(1)
    junk: list[Any] = [None, -1, 0, 1, 2**31, 2**63, 1e308, "", "x", [], [-1], [[]], {}, True, 0.5]
    refused = 0
    for _ in range(1000):
        root = small_json()
        section = rng.choice([root, root["text_config"], root["text_config"]["rope_scaling"]])
        section[rng.choice(list(section))] = rng.choice(junk)
        try:
            ModelConfig.from_dict(json.loads(json.dumps(root)))
        except DeepInferError:
            refused += 1
    assert 500 < refused < 1000
