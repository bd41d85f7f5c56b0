"""The training forward is the engine's architecture: it reproduces the fixtures of nemo-automodel 0.7.0."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer_core.checkpoint.dequantize import dequantize_fp4, dequantize_fp8_blocks, dequantize_rows
from deepinfer_core.checkpoint.token_classes import load_token_classes
from deepinfer_core.config.model import ModelConfig
from tests.fixture_models import FIXTURES
from tools.train_tiny.model import Geometry, Mode, backbone
from tools.train_tiny.params import slots

FIXTURE = FIXTURES / "tiny-a"


class Fixture:
    """Weights, config and expected values of one fixture."""

    def __init__(self, folder: Path) -> None:
        self.config = ModelConfig.from_folder(folder)
        self.classes = torch.tensor(load_token_classes(folder, self.config))
        self.expected = json.loads((folder / "expected.json").read_text())
        self.tensors = load_file(folder / "expected.safetensors")
        stored: dict[str, Tensor] = {}
        for shard in folder.glob("model-*.safetensors"):
            stored |= load_file(shard)
        self.params = {name: _value(name, stored) for name in slots(self.config)}

    def run(self, tokens: list[int], **mode: bool):
        with torch.no_grad():
            geometry = Geometry(self.config, self.classes, len(tokens), "cpu")
            output = backbone(self.params, geometry, torch.tensor([tokens]), Mode(**mode), keep_streams=True)
            return output, output.hidden @ self.params["head.weight"].T


def _value(name: str, stored: dict[str, Tensor]) -> Tensor:
    match = re.fullmatch(r"(.*experts)\.(w\d\.weight)", name)
    if match and "shared" not in name:
        names = sorted(
            (n for n in stored if re.fullmatch(rf"{re.escape(match[1])}\.\d+\.{match[2]}", n)), key=_expert_number
        )
        return torch.stack([dequantize_fp4(stored[n], stored[n.replace("weight", "scale")]) for n in names])
    scale = stored.get(name.removesuffix("weight") + "scale") if name.endswith("weight") else None
    if scale is None:
        return stored[name].float()
    return (dequantize_rows if "engram.embed" in name else dequantize_fp8_blocks)(stored[name], scale)


def _expert_number(name: str) -> int:
    return int(name.split(".")[-3])


@pytest.fixture(scope="session")
def fixture_a() -> Fixture:
    return Fixture(FIXTURE)


@pytest.mark.parametrize("sequence", ["len1", "len2", "len7", "len37", "text", "len130"])
def test_logits_equal_the_fixtures(fixture_a: Fixture, sequence: str) -> None:
    tokens = fixture_a.expected["sequences"][sequence]
    _, logits = fixture_a.run(tokens)
    rows = fixture_a.expected["rows"][sequence]
    difference = (logits[rows] - fixture_a.tensors[f"{sequence}.logits"]).abs().amax(-1)
    assert difference.median() < 2e-4
    assert (difference < 1e-3).float().mean() >= 0.9


def test_without_cache_rounding_the_logits_equal_the_smooth_ones(fixture_a: Fixture) -> None:
    tokens = fixture_a.expected["sequences"]["len130"]
    _, logits = fixture_a.run(tokens, quantize=False)
    expected = fixture_a.tensors["len130.noquant_logits"]
    rows = fixture_a.expected["rows"]["len130"][-len(expected) :]
    assert (logits[rows] - expected).abs().amax(-1).median() < 1e-4


def test_streams_and_draft_features_equal_the_fixtures(fixture_a: Fixture) -> None:
    output, _ = fixture_a.run(fixture_a.expected["sequences"]["len37"])
    for layer, streams in enumerate(output.streams):
        if f"len37.stream.{layer}" in fixture_a.tensors:
            assert (streams - fixture_a.tensors[f"len37.stream.{layer}"]).abs().median() < 1e-5
    assert (output.features - fixture_a.tensors["len37.features"]).abs().median() < 1e-5
