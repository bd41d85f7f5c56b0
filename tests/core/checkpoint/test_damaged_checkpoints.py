"""Loading: what is refused, by name, and what is no damage."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_core.checkpoint.folder import INDEX_NAME, open_checkpoint
from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.checkpoint.manifest import manifest
from deepinfer_core.checkpoint.safetensors_header import read_header
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import CheckpointError, ConfigError, ModelNotFoundError
from tests.core.model_configs import small_config

VISION = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "patch_size": 2,
    "downsample_ratio": 2,
}


def load(folder: Path) -> None:
    load_model_weights(folder, ModelConfig.from_folder(folder), progress=False)


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][name]


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))


@pytest.mark.bad_input
def test_a_missing_folder_and_one_without_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        load_model_weights(tmp_path / "nowhere", small_config())
    with pytest.raises(ModelNotFoundError, match=str(tmp_path)):
        load_model_weights(tmp_path, small_config())


@pytest.mark.bad_input
def test_a_truncated_shard_is_named(small: Path) -> None:
    path = sorted(small.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged.*truncated"):
        load(small)


@pytest.mark.bad_input
def test_a_missing_shard_is_named(small: Path) -> None:
    path = sorted(small.glob("*.safetensors"))[-1]
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
        load(small)


@pytest.mark.bad_input
def test_a_shard_that_shrinks_after_its_check_is_an_error(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = shard_of(small, "norm.weight")

    def open_then_cut(folder: Path, config: ModelConfig) -> Any:
        checkpoint = open_checkpoint(folder, config)
        victim.write_bytes(victim.read_bytes()[:2000])
        return checkpoint

    monkeypatch.setattr("deepinfer_core.checkpoint.loader.open_checkpoint", open_then_cut)
    with pytest.raises(CheckpointError, match=f"{victim.name} became shorter"):
        load(small)


@pytest.mark.bad_input
def test_a_table_cut_short_after_its_check_is_not_mapped(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = shard_of(small, "layers.0.engram.embed.weight")

    def open_then_cut(folder: Path, config: ModelConfig) -> Any:
        checkpoint = open_checkpoint(folder, config)
        victim.write_bytes(b"")
        return checkpoint

    monkeypatch.setattr("deepinfer_core.checkpoint.loader.open_checkpoint", open_then_cut)
    with pytest.raises(CheckpointError, match=victim.name):
        load_model_weights(small, small_config(), engram_storage="disk", progress=False)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("dtype", "name"),
    [("F16", "norm.weight"), ("U8", "layers.0.ffn.experts.0.w1.weight"), ("F8_E5M2", "layers.0.attn.wkv.weight")],
)
def test_a_wrong_dtype_of_the_right_size_is_named(small: Path, dtype: str, name: str) -> None:
    edit_header(shard_of(small, name), lambda header: header[name].update(dtype=dtype))
    with pytest.raises(CheckpointError, match=f"{name} is {dtype}"):
        load(small)


@pytest.mark.bad_input
def test_a_transposed_tensor_is_named(small: Path) -> None:
    name = "layers.1.attn.wq_a.weight"
    edit_header(shard_of(small, name), lambda header: header[name]["shape"].reverse())
    with pytest.raises(CheckpointError, match=rf"{name} is F8_E4M3 \[40, 24\] instead of F8_E4M3 \[24, 40\]"):
        load(small)


@pytest.mark.bad_input
def test_a_renamed_draft_tensor_is_missing_and_unused(small: Path) -> None:
    old, new = "mtp.1.norm.weight", "mtp.1.final_norm.weight"

    def rename(entries: dict[str, Any]) -> None:
        entries[new] = entries.pop(old)

    edit_header(shard_of(small, old), rename)
    edit_index(small, lambda index: rename(index["weight_map"]))
    with pytest.raises(CheckpointError, match=f"1 missing: {old}; 1 not part of the model: {new}"):
        load(small)


@pytest.mark.bad_input
def test_an_index_that_points_to_the_wrong_shard_is_refused(small: Path) -> None:
    wrong = next(path.name for path in sorted(small.glob("*.safetensors")) if path != shard_of(small, "norm.weight"))
    edit_index(small, lambda index: index["weight_map"].update({"norm.weight": wrong}))
    with pytest.raises(CheckpointError, match=rf"{wrong} does not hold 'norm\.weight'"):
        load(small)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "file",
    ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "x.bin", "", None, 3],
)
def test_an_index_reaches_no_other_file(small: Path, file: Any) -> None:
    edit_index(small, lambda index: index["weight_map"].update({"norm.weight": file}))
    with pytest.raises(
        CheckpointError, match=r"places 'norm\.weight' in .* which is no safetensors file of this folder"
    ):
        load(small)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": "b.safetensors", "a": "b.safetensors"}}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_damaged_index_is_refused(small: Path, text: bytes) -> None:
    (small / INDEX_NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        load(small)


@pytest.mark.bad_input
def test_a_tensor_in_two_shards_is_refused(small: Path) -> None:
    first, second = (path for path in sorted(small.glob("*.safetensors"))[:2])
    name = next(iter(read_header(first).tensors))
    taken = next(iter(read_header(second).tensors))
    edit_header(second, lambda header: header.update({name: header.pop(taken)}))
    edit_index(small, lambda index: index["weight_map"].pop(taken))
    with pytest.raises(CheckpointError, match=f"{name} is stored in both"):
        load(small)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "byte"),
    [("layers.3.attn.wkv.scale", 255), ("layers.3.attn.wkv.weight", 0x7F), ("mtp.0.ffn.experts.2.w1.scale", 255)],
)
def test_a_weight_that_is_not_finite_is_named(small: Path, name: str, byte: int) -> None:
    path = shard_of(small, name)
    data = bytearray(path.read_bytes())
    data[read_header(path).tensors[name].offset] = byte
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name.removesuffix('scale').removesuffix('weight')}weight holds NaN"):
        load(small)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "selection",
    [
        {"experts": {0: [6]}},
        {"experts": {0: [-1]}},
        {"experts": {4: [3]}},
        {"experts": {6: [0]}},
        {"experts": {-1: [0]}},
        {"engram_rows": {1: range(2)}},
        {"engram_rows": {0: range(61)}},
        {"engram_rows": {0: range(0, 10, 2)}},
        {"engram_storage": "tape"},
    ],
)
def test_a_selection_outside_the_model_is_refused(small: Path, selection: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load_model_weights(small, small_config(), progress=False, **selection)


def test_a_single_shard_needs_no_index(small: Path) -> None:
    whole = load_model_weights(small, small_config(), progress=False)
    tensors = {name: t for path in small.glob("*.safetensors") for name, t in load_file(path).items()}
    for path in small.glob("model*"):
        path.unlink()
    save_file(tensors, small / "model.safetensors")
    again = load_model_weights(small, small_config(), progress=False)
    assert torch.equal(again.layers[3].ffn.w3, whole.layers[3].ffn.w3)


def test_shards_may_be_links_as_in_the_hubs_cache(small: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in small.iterdir():
        (linked / path.name).symlink_to(path)
    load(linked)


def test_vision_tensors_are_checked_and_reported_and_not_loaded(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_json = json.loads((small / "config.json").read_text())
    config_json["vision_config"] = VISION
    (small / "config.json").write_text(json.dumps(config_json))
    config = ModelConfig.from_folder(small)
    with pytest.raises(CheckpointError, match="image_start"):
        load(small)
    tensors = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in manifest(config) if spec.deferred}
    save_file(tensors, small / "vision.safetensors")
    edit_index(small, lambda index: index["weight_map"].update(dict.fromkeys(tensors, "vision.safetensors")))
    weights = load_model_weights(small, config, progress=False)
    assert "18 vision tensors (0 MB) are not loaded" in caplog.text
    assert "vision" not in weights.bytes_read
