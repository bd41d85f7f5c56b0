"""The tiny checkpoint with expected values, and a small one that tests may damage copies of."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.checkpoint.random_weights import random_weights
from deepinfer_core.checkpoint.weights import ModelWeights
from deepinfer_core.checkpoint.writer import write_checkpoint
from deepinfer_core.config.model import ModelConfig
from tests.core.model_configs import small_json
from tests.fixture_models import FIXTURES

SHARED = Path(__file__).parents[4] / "shared" / "model"


@dataclass(frozen=True)
class Tiny:
    """A released-layout checkpoint with expected values of other programs."""

    folder: Path
    config: ModelConfig
    weights: ModelWeights
    expected: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@pytest.fixture(scope="session", params=["tiny-a", "tiny-b"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    """tiny-a is in the repository (its JSON without white space); tiny-b is used where its folder is at hand."""
    folder = next((root / request.param for root in (FIXTURES, SHARED) if (root / request.param).is_dir()), None)
    if folder is None:
        pytest.skip(f"{request.param} is not in the repository (size) and {SHARED} does not exist")
    config = ModelConfig.from_folder(folder)
    expected = json.loads((folder / "expected.json").read_text())
    weights = load_model_weights(folder, config, progress=False)
    return Tiny(folder, config, weights, expected, load_file(folder / "expected.safetensors"))


@pytest.fixture(scope="session")
def _small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = small_json()
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    # 50 classes as the config asks: 60 tokens, of which 10 differ from others in case only.
    words = [f"w{i}" for i in range(50)] + [f"W{i}" for i in range(10)]
    Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)})).save(str(tokenizer / "tokenizer.json"))
    folder = tmp_path_factory.mktemp("small")
    weights = random_weights(ModelConfig.from_dict(root), seed=3)
    write_checkpoint(folder, weights, root, tokenizer_folder=tokenizer, max_shard_bytes=40_000)
    return folder


@pytest.fixture
def small(_small_checkpoint: Path, tmp_path: Path) -> Path:
    """A fresh copy of a complete small checkpoint with several shards."""
    return shutil.copytree(_small_checkpoint, tmp_path / "small")
