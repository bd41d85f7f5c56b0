"""Writing: what comes back is bit for bit what was given, in the released layout."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from deepinfer_core.checkpoint.fingerprint import weights_fingerprint
from deepinfer_core.checkpoint.folder import INDEX_NAME, SINGLE_SHARD_NAME, open_checkpoint
from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.checkpoint.manifest import manifest
from deepinfer_core.checkpoint.random_weights import random_weights
from deepinfer_core.checkpoint.writer import write_checkpoint
from deepinfer_core.errors import CheckpointError, ConfigError
from tests.core.checkpoint.conftest import Tiny
from tests.core.model_configs import release_json, small_config, small_json


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a tree of dataclasses, tuples, lists and tensors, by their place."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value):
        for spec in dataclasses.fields(value):
            yield from leaves(getattr(value, spec.name), f"{path}.{spec.name}")


def test_a_tiny_checkpoint_is_written_and_read_back_bit_for_bit(tiny: Tiny, tmp_path: Path) -> None:
    config_json = json.loads((tiny.folder / "config.json").read_text())
    write_checkpoint(tmp_path, tiny.weights, config_json, tokenizer_folder=tiny.folder, max_shard_bytes=500_000)
    again = dict(leaves(load_model_weights(tmp_path, tiny.config, progress=False)))
    given = dict(leaves(tiny.weights))
    assert again.keys() == given.keys()
    assert len(given) > 150
    assert [place for place in given if not torch.equal(given[place], again[place])] == []


def test_writing_what_was_written_gives_the_same_files_again(small: Path, tmp_path: Path) -> None:
    """Not yet the first time: rounding may bring the largest value of a block down to where a smaller scale fits."""

    def rewritten(folder: Path, name: str) -> dict[str, bytes]:
        weights = load_model_weights(folder, small_config(), progress=False)
        write_checkpoint(tmp_path / name, weights, small_json(), tokenizer_folder=folder, max_shard_bytes=40_000)
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    first, second = rewritten(small, "first"), rewritten(tmp_path / "first", "second")
    assert len(first) > 5
    assert first == second


def test_other_programs_find_the_released_types(small: Path) -> None:
    specs = {spec.name: spec for spec in manifest(small_config())}
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in small.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    assert found == {name: (spec.dtype, spec.shape) for name, spec in specs.items()}


def test_shards_keep_to_their_size_and_a_weight_stays_with_its_scale(small: Path) -> None:
    index = json.loads((small / INDEX_NAME).read_text())
    specs = {spec.name: spec for spec in manifest(small_config())}
    sizes: dict[str, int] = {}
    for name, file in index["weight_map"].items():
        sizes[file] = sizes.get(file, 0) + specs[name].num_bytes
        if name.endswith(".scale"):
            assert index["weight_map"][name.removesuffix("scale") + "weight"] == file
    assert max(sizes.values()) <= 40_000
    assert index["metadata"]["total_size"] == sum(sizes.values())


def test_one_shard_needs_no_index_and_an_earlier_one_goes(small: Path) -> None:
    weights = load_model_weights(small, small_config(), progress=False)
    write_checkpoint(small, weights, small_json())
    assert not (small / INDEX_NAME).exists()
    assert [header.path.name for header in open_checkpoint(small, small_config()).headers] == [SINGLE_SHARD_NAME]


def test_a_weight_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, random_weights(small_config()), small_json(), max_shard_bytes=1)
    weights = [spec for spec in manifest(small_config()) if spec.dtype != "F8_E8M0"]
    assert len(list(tmp_path.glob("*.safetensors"))) == len(weights)
    assert len(open_checkpoint(tmp_path, small_config()).headers) == len(weights)


def test_random_weights_depend_on_the_seed_alone() -> None:
    def tensors(seed: int) -> dict[str, Tensor]:
        return dict(leaves(random_weights(small_config(), seed)))

    first, again, other = tensors(1), tensors(1), tensors(2)
    assert all(torch.equal(first[place], again[place]) for place in first)
    assert not torch.equal(first[".layers[0].attn.wq_a"], other[".layers[0].attn.wq_a"])
    assert torch.rand(1) != torch.rand(1)  # the global generator is left alone and usable


def test_random_output_projections_are_scaled_down() -> None:
    weights = random_weights(small_config(hidden_size=128, moe_intermediate_size=128, o_lora_rank=64))
    layer = weights.layers[0]
    assert layer.attn.wo_b.std().item() == pytest.approx(0.2 * 128**-0.5, rel=0.05)
    assert layer.ffn.w2.std().item() == pytest.approx(0.1 * 128**-0.5, rel=0.05)
    assert layer.ffn.w1.std().item() == pytest.approx(128**-0.5, rel=0.05)


def test_random_weights_have_the_shapes_of_loaded_ones(small: Path) -> None:
    loaded = load_model_weights(small, small_config(), progress=False)
    shapes = {place: (t.shape, t.dtype) for place, t in leaves(random_weights(small_config()))}
    assert shapes == {place: (t.shape, t.dtype) for place, t in leaves(loaded)}


# ---- fingerprints ----------------------------------------------------------------------------------------------------


def test_a_fingerprint_names_the_bytes_and_not_the_place(small: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    first = weights_fingerprint(open_checkpoint(small, small_config()))
    small.rename(moved)
    assert weights_fingerprint(open_checkpoint(moved, small_config())) == first
    assert len(first) == 32
    assert load_model_weights(moved, small_config(), progress=False).fingerprint == first


@pytest.mark.parametrize("where", ["config.json", INDEX_NAME, "first byte", "last byte"])
def test_any_sampled_change_gives_another_fingerprint(small: Path, where: str) -> None:
    before = weights_fingerprint(open_checkpoint(small, small_config()))
    if where.endswith("byte"):
        path = min(small.glob("*.safetensors"))
        data = bytearray(path.read_bytes())
        at = 8 + int.from_bytes(data[:8], "little") if where == "first byte" else len(data) - 1
        data[at] ^= 1
        path.write_bytes(data)
    else:
        path = small / where
        path.write_text(path.read_text() + " ")
    assert weights_fingerprint(open_checkpoint(small, small_config())) != before


def test_a_full_fingerprint_sees_what_samples_leave_out(tmp_path: Path) -> None:
    config_json = small_json(vocab_size=8192)  # embed and head of 655 kB
    config = small_config(vocab_size=8192)
    write_checkpoint(tmp_path, random_weights(config), config_json)
    path = next(tmp_path.glob("*.safetensors"))

    def both() -> tuple[str, str]:
        checkpoint = open_checkpoint(tmp_path, config)
        return weights_fingerprint(checkpoint), weights_fingerprint(checkpoint, full=True)

    sampled, full = both()
    data = bytearray(path.read_bytes())
    data[200_000] ^= 1
    path.write_bytes(data)
    sampled_after, full_after = both()
    assert sampled == sampled_after
    assert full != full_after
    assert sampled != full


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.bad_input
def test_weights_of_another_config_are_not_written(tmp_path: Path) -> None:
    weights = random_weights(small_config())
    with pytest.raises(
        CheckpointError, match=r"norm\.weight|embed\.weight has the shape \[64, 40\].* needs \[64, 44\]"
    ):
        write_checkpoint(tmp_path, weights, small_json(hidden_size=44))
    with pytest.raises(CheckpointError, match="tensors that their config lacks"):
        write_checkpoint(tmp_path, weights, small_json(n_routed_experts=5))


@pytest.mark.bad_input
def test_the_weights_of_one_rank_are_no_checkpoint(small: Path, tmp_path: Path) -> None:
    experts = load_model_weights(small, small_config(), experts={1: [0, 1, 2, 4, 5]}, progress=False)
    with pytest.raises(CheckpointError, match=r"lack layers\.1\.ffn\.experts\.3\.w1\.weight"):
        write_checkpoint(tmp_path, experts, small_json())
    rows = load_model_weights(small, small_config(), engram_rows={0: range(59)}, progress=False)
    with pytest.raises(CheckpointError, match=r"layers\.0\.engram\.embed\.weight has the shape \[59, 16\]"):
        write_checkpoint(tmp_path, rows, small_json())


@pytest.mark.bad_input
def test_vision_tensors_are_missing_by_name(tmp_path: Path) -> None:
    config_json = small_json() | {"vision_config": release_json()["vision_config"]}
    with pytest.raises(CheckpointError, match="the weights lack image_start"):
        write_checkpoint(tmp_path, random_weights(small_config()), config_json)


@pytest.mark.bad_input
def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    weights = random_weights(small_config())
    weights.layers[2].attn.wkv[3, 4] = float("inf")
    with pytest.raises(CheckpointError, match=r"layers\.2\.attn\.wkv\.weight holds NaN"):
        write_checkpoint(tmp_path, weights, small_json())


@pytest.mark.bad_input
def test_a_shard_size_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_shard_bytes is 0"):
        write_checkpoint(tmp_path, random_weights(small_config()), small_json(), max_shard_bytes=0)
