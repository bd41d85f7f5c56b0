"""The manifest against published totals of the release and against the shards of the tiny checkpoints."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from deepinfer_core.checkpoint.manifest import TensorSpec, check_against_manifest, manifest
from deepinfer_core.checkpoint.safetensors_header import read_header
from deepinfer_core.errors import CheckpointError
from tests.core.checkpoint.conftest import Tiny
from tests.core.model_configs import release_config, small_config


@pytest.fixture(scope="module")
def release_specs() -> list[TensorSpec]:
    return list(manifest(release_config()))


def test_the_release_has_the_published_number_of_tensors_and_bytes(release_specs: list[TensorSpec]) -> None:
    assert len(release_specs) == 96_085
    assert len({spec.name for spec in release_specs}) == 96_085
    assert sum(spec.num_bytes for spec in release_specs) == 510_286_023_000


def test_the_release_has_the_published_parameters_by_part(release_specs: list[TensorSpec]) -> None:
    parameters: Counter[str] = Counter()
    for spec in release_specs:
        parameters[spec.part] += spec.num_parameters
    assert parameters.total() == 763_205_315_794
    assert parameters["experts"] == 543_581_798_400
    assert parameters["attention"] == 5_064_696_320
    assert parameters["shared_expert"] == 1_415_577_600
    assert parameters["embedding"] == 1_323_827_200
    assert parameters["engram"] == 314_654_720
    assert parameters["router"] == 78_673_920
    assert parameters["compressor"] + parameters["indexer"] == 61_868_544
    assert parameters["mhc"] == 39_323_760
    assert parameters["norm"] == 414_720
    assert parameters["engram_table"] == 196_613_849_600
    assert parameters["draft"] == 14_225_362_530
    assert parameters["vision"] == 411_842_560 + 73_425_920


def test_the_release_stores_the_published_bytes_of_each_type(release_specs: list[TensorSpec]) -> None:
    stored: Counter[str] = Counter()
    for spec in release_specs:
        stored[spec.dtype] += spec.num_bytes
    gigabytes = {dtype: size / 1e9 for dtype, size in stored.items()}
    published = {"F8_E4M3": 204.0, "I8": 278.6, "F8_E8M0": 23.6, "BF16": 3.95, "F32": 0.17}  # GB, rounded
    assert gigabytes == pytest.approx(published, abs=0.05, rel=0.001)


def test_the_release_defers_its_266_vision_tensors(release_specs: list[TensorSpec]) -> None:
    assert sum(spec.deferred for spec in release_specs) == 266


def test_the_full_manifest_takes_less_than_a_second() -> None:
    config = release_config()
    start = time.process_time()
    assert sum(1 for _ in manifest(config)) == 96_085
    assert time.process_time() - start < 1


def test_the_manifest_is_lazy() -> None:
    assert next(manifest(release_config())).name == "embed.weight"


def test_every_tensor_of_a_tiny_checkpoint_is_in_its_manifest_and_no_other(tiny: Tiny) -> None:
    stored = {}
    for path in sorted(tiny.folder.glob("model-*.safetensors")):
        stored |= {name: (tensor.dtype, tensor.shape) for name, tensor in read_header(path).tensors.items()}
    assert {spec.name: (spec.dtype, spec.shape) for spec in manifest(tiny.config)} == stored


def test_partial_quantization_blocks_have_a_scale() -> None:
    specs = {spec.name: spec for spec in manifest(small_config())}
    assert specs["layers.0.attn.wo_b.weight"].shape == (40, 40)
    assert specs["layers.0.attn.wo_b.scale"].shape == (2, 2)
    assert specs["layers.0.ffn.experts.5.w1.weight"].shape == (36, 20)
    assert specs["layers.0.ffn.experts.5.w1.scale"].shape == (36, 2)
    assert specs["layers.0.engram.embed.scale"].shape == (60, 1)


def test_draft_heads_belong_to_the_last_stage_and_the_projection_to_the_first() -> None:
    names = {spec.name for spec in manifest(small_config())}
    assert {"mtp.0.main_proj.weight", "mtp.1.norm.weight", "mtp.1.confidence_head.proj.weight"} <= names
    assert not {"mtp.1.main_proj.weight", "mtp.0.norm.weight"} & names


def test_only_a_pooling_compressor_has_a_gate() -> None:
    names = {spec.name for spec in manifest(small_config())}
    assert "layers.1.attn.compressor.wgate.weight" in names
    assert "layers.2.attn.compressor.wgate.weight" not in names


@pytest.mark.bad_input
def test_missing_unused_and_misshapen_tensors_are_named_together() -> None:
    config = small_config()
    found = {spec.name: (str(spec.dtype), spec.shape) for spec in manifest(config)}
    del found["mtp.1.markov_head.head.weight"]
    found["mtp.1.extra.weight"] = ("BF16", (2, 2))
    found["norm.weight"] = ("F32", (40,))
    with pytest.raises(CheckpointError) as caught:
        check_against_manifest(config, found, "here")
    message = str(caught.value)
    assert "1 missing: mtp.1.markov_head.head.weight" in message
    assert "1 not part of the model: mtp.1.extra.weight" in message
    assert "norm.weight is F32 [40] instead of BF16 [40]" in message


@pytest.mark.bad_input
def test_many_missing_tensors_are_counted_and_the_first_ones_named() -> None:
    with pytest.raises(CheckpointError, match=r"\d{3} missing: embed\.weight, .*, \.\.\.") as caught:
        check_against_manifest(small_config(), {}, "here")
    assert len(str(caught.value)) < 500
