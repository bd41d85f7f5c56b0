"""Loading: every number against the stored bytes, and parts of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from deepinfer_core.checkpoint import engram_store
from deepinfer_core.checkpoint.dequantize import dequantize_rows
from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.checkpoint.manifest import manifest
from deepinfer_core.checkpoint.sharding import engram_shares, expert_shares, share
from tests.core.checkpoint.conftest import Tiny
from tests.core.model_configs import small_config

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


class Stored:
    """The independent reader: safetensors for the bytes, NumPy for the formulas."""

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


def test_shares_cover_everything_once_and_differ_by_one() -> None:
    for total in (0, 1, 7, 384):
        for num_ranks in (1, 2, 5, 8):
            parts = [share(total, rank, num_ranks) for rank in range(num_ranks)]
            assert [i for part in parts for i in part] == list(range(total))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
