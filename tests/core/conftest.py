"""Small checkpoints, loaded once a session."""

from __future__ import annotations

import pytest
import torch

from tests.core.harness import FIXTURES, SHARED_MODELS, TinyModel, load_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread_a_process() -> None:
    """Small tensors: threads cost more than they bring. The invariance tests set their own counts."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_a() -> TinyModel:
    return load_tiny(FIXTURES / "tiny-a")


@pytest.fixture(scope="session", params=["tiny-a", "tiny-b"])
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    """Both fixture models; tiny-b is whole only beside the project, in shared/."""
    name = request.param
    if (FIXTURES / name / "model.safetensors.index.json").exists():
        return load_tiny(FIXTURES / name)
    if (SHARED_MODELS / name).exists():
        return load_tiny(SHARED_MODELS / name)
    pytest.skip(f"{name} is not in tests/fixtures and shared/model is not here")
