"""Loading: every number against the stored bytes, parts of a model, and what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer_core.checkpoint import engram_store
from deepinfer_core.checkpoint.dequantize import dequantize_rows
from deepinfer_core.checkpoint.folder import INDEX_NAME, open_checkpoint
from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.checkpoint.manifest import manifest
from deepinfer_core.checkpoint.safetensors_header import read_header
from deepinfer_core.checkpoint.sharding import engram_shares, expert_shares, share
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import CheckpointError, ConfigError, ModelNotFoundError
from tests.core.checkpoint.conftest import Tiny
from tests.core.model_configs import small_config

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


VISION = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "patch_size": 2,
    "downsample_ratio": 2,
}


class Stored:
    """The independent reader: safetensors for the bytes, NumPy for the formulas of model.md 5.3."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, Tensor] = {}
        for path in folder.glob("model-*.safetensors"):
            with safe_open(path, "pt") as file:
                self.tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)

    def scale(self, name: str, repeat_rows: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        exponents = self.tensors[name].view(torch.uint8).numpy().astype(np.float32) - 127
        scales = np.repeat(np.repeat(np.exp2(exponents), repeat_rows, 0), 32, 1)
        return scales[: shape[0], : shape[1]]

    def fp8(self, name: str, block_rows: int = 32) -> Tensor:
        codes = self.tensors[f"{name}.weight"].to(torch.float32).numpy()
        return torch.from_numpy(codes * self.scale(f"{name}.scale", block_rows, codes.shape))

    def fp4(self, name: str) -> Tensor:
        packed = self.tensors[f"{name}.weight"].view(torch.uint8).numpy()
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
        return torch.from_numpy(E2M1[codes] * self.scale(f"{name}.scale", 1, codes.shape))

    def plain(self, name: str) -> Tensor:
        return self.tensors[name].float()


def test_every_layer_holds_the_stored_values(tiny: Tiny) -> None:
    stored, config = Stored(tiny.folder), tiny.config
    for number, layer in enumerate(tiny.weights.layers):
        p = f"layers.{number}"
        assert torch.equal(layer.attn_norm, stored.plain(f"{p}.attn_norm.weight"))
        assert torch.equal(layer.hc_attn.fn, stored.plain(f"{p}.hc_attn_fn"))
        assert torch.equal(layer.hc_ffn.base, stored.plain(f"{p}.hc_ffn_base"))
        assert torch.equal(layer.hc_ffn.scale, stored.plain(f"{p}.hc_ffn_scale"))
        assert torch.equal(layer.attn.wq_a, stored.fp8(f"{p}.attn.wq_a"))
        assert torch.equal(layer.attn.wq_b, stored.fp8(f"{p}.attn.wq_b"))
        assert torch.equal(layer.attn.wkv, stored.fp8(f"{p}.attn.wkv"))
        assert torch.equal(layer.attn.wo_b, stored.fp8(f"{p}.attn.wo_b"))
        assert torch.equal(layer.attn.sink, stored.plain(f"{p}.attn.attn_sink"))
        assert torch.equal(layer.ffn.gate, stored.plain(f"{p}.ffn.gate.weight"))
        assert torch.equal(layer.ffn.bias_vl, stored.plain(f"{p}.ffn.gate.bias_vl"))
        assert torch.equal(layer.ffn.shared_w2, stored.fp8(f"{p}.ffn.shared_experts.w2"))
        assert layer.ffn.expert_ids == tuple(range(config.n_routed_experts))
        for expert in range(config.n_routed_experts):
            assert torch.equal(layer.ffn.w1[expert], stored.fp4(f"{p}.ffn.experts.{expert}.w1"))
            assert torch.equal(layer.ffn.w2[expert], stored.fp4(f"{p}.ffn.experts.{expert}.w2"))
            assert torch.equal(layer.ffn.w3[expert], stored.fp4(f"{p}.ffn.experts.{expert}.w3"))


def test_a_group_of_the_output_projection_is_its_run_of_rows(tiny: Tiny) -> None:
    config, wo_a = tiny.config, Stored(tiny.folder).fp8("layers.0.attn.wo_a")
    rank = config.o_lora_rank
    for group in range(config.o_groups):
        assert torch.equal(tiny.weights.layers[0].attn.wo_a[group], wo_a[group * rank : (group + 1) * rank])


def test_only_sources_have_compressors_and_indexers(tiny: Tiny) -> None:
    config, stored = tiny.config, Stored(tiny.folder)
    for number, layer in enumerate(tiny.weights.layers):
        p = f"layers.{number}.attn"
        compressor, indexer = layer.attn.compressor, layer.attn.indexer
        assert (compressor is not None) == (layer.attn.index_key is not None) == (number in config.kv_source_layer_ids)
        assert (indexer is not None) == (number in config.index_source_layer_ids)
        assert (layer.engram is not None) == (number in config.engram_layer_ids)
        if compressor is not None:
            assert (compressor.wgate is not None) == (config.compress_ratios[number] == 2)
            assert torch.equal(compressor.wkv, stored.plain(f"{p}.compressor.wkv.weight"))
        if indexer is not None:
            assert torch.equal(indexer.wq_b, stored.fp8(f"{p}.indexer.wq_b"))


def test_engram_rows_are_dequantized_when_looked_up(tiny: Tiny) -> None:
    stored = Stored(tiny.folder)
    for number in tiny.config.engram_layer_ids:
        engram = tiny.weights.layers[number].engram
        assert engram is not None
        table = stored.fp8(f"layers.{number}.engram.embed", block_rows=1)
        rows = torch.tensor([0, len(table) - 1, 5, 5])
        assert torch.equal(engram.table.lookup(rows), table[rows])
        assert torch.equal(engram.wkv, stored.fp8(f"layers.{number}.engram.wkv"))


def test_the_draft_module_has_its_heads_in_float32_where_they_need_it(tiny: Tiny) -> None:
    stored, draft = Stored(tiny.folder), tiny.weights.draft
    assert draft is not None
    last = tiny.config.num_nextn_predict_layers - 1
    assert torch.equal(draft.main_proj, stored.fp8("mtp.0.main_proj"))
    assert torch.equal(draft.markov_head, stored.plain(f"mtp.{last}.markov_head.head.weight"))
    assert draft.confidence.shape == (tiny.config.hidden_size + tiny.config.dspark_markov_rank,)
    assert torch.equal(draft.confidence, stored.plain(f"mtp.{last}.confidence_head.proj.weight")[0])
    assert len(draft.stages) == tiny.config.num_nextn_predict_layers
    assert draft.stages[last].ffn.w1.shape[0] == tiny.config.dspark_n_routed_experts


def test_all_bytes_are_read_once(tiny: Tiny) -> None:
    by_part: dict[str, int] = {}
    for spec in manifest(tiny.config):
        by_part[spec.part] = by_part.get(spec.part, 0) + spec.num_bytes
    assert tiny.weights.bytes_read == by_part


def test_bfloat16_weights_have_the_values_of_float32_ones(small: Path) -> None:
    config = small_config()
    exact = load_model_weights(small, config, progress=False)
    half = load_model_weights(small, config, dtype=torch.bfloat16, progress=False)
    assert half.layers[0].ffn.w1.dtype == half.layers[0].attn.wo_a.dtype == half.head.dtype == torch.bfloat16
    assert torch.equal(half.layers[0].ffn.w1.float(), exact.layers[0].ffn.w1)
    assert torch.equal(half.layers[0].attn.wo_a.float(), exact.layers[0].attn.wo_a)
    assert half.layers[0].hc_attn.fn.dtype == half.layers[0].ffn.bias.dtype == torch.float32
    assert half.draft is not None
    assert half.draft.confidence.dtype == torch.float32
    engram = half.layers[0].engram
    assert engram is not None
    assert engram.table.lookup(torch.tensor([1])).dtype == torch.bfloat16


# ---- parts of a model ------------------------------------------------------------------------------------------------


def test_ranks_hold_their_experts_and_together_read_each_once(small: Path) -> None:
    config = small_config()
    whole = load_model_weights(small, config, progress=False)
    ranks = [
        load_model_weights(
            small,
            config,
            experts=expert_shares(config, rank, 4),
            engram_rows=engram_shares(config, rank, 4),
            progress=False,
        )
        for rank in range(4)
    ]
    for layer, full in enumerate(whole.layers):
        assert torch.equal(torch.cat([rank.layers[layer].ffn.w2 for rank in ranks]), full.ffn.w2)
        assert sum((rank.layers[layer].ffn.expert_ids for rank in ranks), ()) == full.ffn.expert_ids
    assert whole.draft is not None
    assert [len(rank.draft.stages[0].ffn.expert_ids) for rank in ranks if rank.draft] == [1, 1, 1, 0]
    for part in ("experts", "engram_table"):
        assert sum(rank.bytes_read[part] for rank in ranks) == whole.bytes_read[part]
        assert max(rank.bytes_read[part] for rank in ranks) < whole.bytes_read[part] / 2


def test_the_lookups_of_all_ranks_add_up(small: Path) -> None:
    config = small_config()
    rows = torch.arange(60)

    def lookup(**parts: Any) -> Tensor:
        engram = load_model_weights(small, config, progress=False, **parts).layers[0].engram
        assert engram is not None
        return engram.table.lookup(rows)

    total = sum((lookup(engram_rows=engram_shares(config, rank, 7)) for rank in range(7)), torch.zeros(60, 16))
    assert torch.equal(total, lookup())


def test_experts_are_held_in_the_order_asked_for_even_twice(small: Path) -> None:
    config = small_config()
    whole = load_model_weights(small, config, progress=False)
    part = load_model_weights(small, config, experts={2: [5, 0, 5], 4: []}, progress=False)
    assert part.layers[2].ffn.expert_ids == (5, 0, 5)
    assert torch.equal(part.layers[2].ffn.w1, whole.layers[2].ffn.w1[[5, 0, 5]])
    assert torch.equal(part.layers[1].ffn.w1, whole.layers[1].ffn.w1)
    assert part.draft is not None
    assert part.draft.stages[0].ffn.w2.shape == (0, 40, 36)


def test_without_the_draft_none_of_its_bytes_are_read(small: Path) -> None:
    weights = load_model_weights(small, small_config(), draft=False, progress=False)
    assert weights.draft is None
    assert "draft" not in weights.bytes_read


def test_a_table_on_disk_is_not_read_and_gives_the_same_rows(tiny: Tiny) -> None:
    on_disk = load_model_weights(tiny.folder, tiny.config, engram_storage="disk", progress=False)
    assert "engram_table" not in on_disk.bytes_read
    for number in tiny.config.engram_layer_ids:
        mapped, held = on_disk.layers[number].engram, tiny.weights.layers[number].engram
        assert mapped is not None
        assert held is not None
        rows = torch.arange(0, held.table.num_rows, 7)
        assert torch.equal(mapped.table.lookup(rows), held.table.lookup(rows))


def test_a_table_on_disk_dequantizes_looked_up_rows_only(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_model_weights(small, small_config(), engram_storage="disk", progress=False)
    seen: list[int] = []
    real = dequantize_rows

    def counting(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        seen.append(len(codes))
        return real(codes, scales, dtype)

    monkeypatch.setattr(engram_store, "dequantize_rows", counting)
    engram = weights.layers[0].engram
    assert engram is not None
    engram.table.lookup(torch.tensor([3, 50]))
    assert seen == [2]


def test_progress_counts_the_bytes_that_will_be_read(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_model_weights(small, small_config(), experts={0: [1]}, progress=True)
    shown = capsys.readouterr().err
    assert "Loading weights: 100%" in shown
    assert f"{sum(weights.bytes_read.values()) / 1024:.0f}k" in shown


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


def test_shares_cover_everything_once_and_differ_by_one() -> None:
    for total in (0, 1, 7, 384):
        for num_ranks in (1, 2, 5, 8):
            parts = [share(total, rank, num_ranks) for rank in range(num_ranks)]
            assert [i for part in parts for i in part] == list(range(total))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


# ---- what is refused -------------------------------------------------------------------------------------------------


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
