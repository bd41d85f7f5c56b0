"""Small checkpoints, loaded once a session."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepinfer_core.kernels.contract import Kernels, Unavailable
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.registry import native_status
from tests.core.harness import FIXTURES, SHARED_MODELS, TinyModel, load_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread_a_process() -> None:
    """Small tensors: threads cost more than they bring. The invariance tests set their own counts."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_a() -> TinyModel:
    return load_tiny(FIXTURES / "tiny-a")


@pytest.fixture(scope="session")
def native_kernels() -> Kernels:
    """The table of the native kernels, the reference for what samples; skips where there is no compiler."""
    status = native_status()
    if status.provider is None or isinstance(status.result, Unavailable):
        pytest.skip(f"no native kernels: {status.result}")
    return replace(REFERENCE, **status.provider.load(), row_multiple=1)


@pytest.fixture(scope="session", params=["tiny-a", "tiny-b", "tiny-a-native", "tiny-b-native"])
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    """Both fixture models on both tables of CPU kernels; tiny-b is whole only beside the project, in shared/."""
    name = request.param.removesuffix("-native")
    kernels = request.getfixturevalue("native_kernels") if request.param.endswith("-native") else REFERENCE
    if (FIXTURES / name / "model.safetensors.index.json").exists():
        return load_tiny(FIXTURES / name, kernels)
    if (SHARED_MODELS / name).exists():
        return load_tiny(SHARED_MODELS / name, kernels)
    pytest.skip(f"{name} is not in tests/fixtures and shared/model is not here")
