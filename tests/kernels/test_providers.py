"""Both kernel packages are found through their entry points and say exactly why they can or cannot run."""

from __future__ import annotations

import subprocess
import sys
import types
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.contract import OPS, Capability, KernelProvider
from deepinfer_core.kernels.registry import ENTRY_POINT_GROUP
from deepinfer_kernels_ascend import provider as ascend_module
from deepinfer_kernels_ascend.coverage import OFFERED as ASCEND_OFFERED
from deepinfer_kernels_ascend.provider import AscendProvider
from deepinfer_kernels_nvidia import provider as nvidia_module
from deepinfer_kernels_nvidia.coverage import OFFERED
from deepinfer_kernels_nvidia.devices import Driver, DriverError, Gpu
from deepinfer_kernels_nvidia.provider import NvidiaProvider
from tests.core.model_configs import RELEASE

H200 = Gpu("NVIDIA H200", "GPU-a", (9, 0))
B200 = Gpu("NVIDIA B200", "GPU-b", (10, 0))
B300 = Gpu("NVIDIA B300", "GPU-c", (10, 3))
A100 = Gpu("NVIDIA A100", "GPU-d", (8, 0))
RTX = Gpu("NVIDIA RTX PRO 6000", "GPU-e", (12, 0))
nvidia_source = sys.modules[NvidiaProvider.__module__]
ascend_source = sys.modules[AscendProvider.__module__]


def test_entry_points_lead_to_providers() -> None:
    found = {entry.name: entry.load() for entry in entry_points(group=ENTRY_POINT_GROUP)}
    assert found == {"nvidia": nvidia_module, "ascend": ascend_module}
    for name, provider in found.items():
        assert isinstance(provider, KernelProvider)
        assert provider.name == name


def test_probing_imports_no_compiler_and_no_vendor_library() -> None:
    code = (
        "import sys\n"
        "from deepinfer_core.kernels.registry import provider_statuses\n"
        "assert len(provider_statuses()) == 2\n"
        "import torch\n"
        "loaded = [name for name in ('tilelang', 'torch_npu', 'triton') if name in sys.modules]\n"
        "print(loaded, torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


# ---- nvidia ----------------------------------------------------------------------------------------------------


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> NvidiaProvider:
    """The provider on a machine where nothing is missing: two H200, a driver as new as torch, nvcc 13."""
    monkeypatch.setattr(nvidia_source, "ask_driver", lambda: Driver((13, 2), (H200, H200)))
    monkeypatch.setattr(nvidia_source, "nvcc_problem", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return NvidiaProvider()


@pytest.mark.parametrize(
    ("gpu", "arch"), [(H200, "sm_90"), (B200, "sm_100"), (B300, "sm_103")], ids=lambda value: str(value)
)
def test_a_supported_gpu_is_a_capability(
    nvidia: NvidiaProvider, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, arch: str
) -> None:
    monkeypatch.setattr(nvidia_source, "ask_driver", lambda: Driver((13, 0), (gpu,)))
    assert nvidia.probe() == Capability("cuda", arch, f"1 x {gpu.name} ({arch})")
    assert set(nvidia.load()) == OFFERED


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (Driver((13, 0), ()), "no GPU is visible: there is none, or CUDA_VISIBLE_DEVICES hides it"),
        (
            Driver((13, 0), (H200, A100)),
            r"NVIDIA A100 \(compute capability 8\.0\) is not supported \(sm_90, sm_100, sm_103",
        ),
        (Driver((13, 0), (RTX,)), r"compute capability 12\.0\) is not supported"),
        (Driver((13, 0), (H200, B200)), r"several kinds are visible \(NVIDIA H200 .* and NVIDIA B200"),
        (Driver((12, 8), (H200,)), r"the NVIDIA driver knows CUDA 12\.8, torch .* needs 13\.0; install a newer driver"),
    ],
    ids=["no gpu", "a100", "consumer blackwell", "mixed", "old driver"],
)
def test_what_a_machine_lacks_is_the_reason(
    nvidia: NvidiaProvider, monkeypatch: pytest.MonkeyPatch, driver: Driver, reason: str
) -> None:
    monkeypatch.setattr(nvidia_source, "ask_driver", lambda: driver)
    with pytest.raises(KernelError, match=f"the NVIDIA kernels cannot run here: .*{reason}"):
        nvidia.load()


@pytest.mark.bad_input
def test_a_missing_driver_torch_without_cuda_and_missing_compilers_are_reasons(
    nvidia: NvidiaProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(nvidia_source, "nvcc_problem", lambda: "nvcc is 12.8")
        with pytest.raises(KernelError, match=r"nvcc is 12\.8"):
            nvidia.load()
    with monkeypatch.context() as patch:
        patch.setattr(nvidia_source, "find_spec", lambda name: None)
        with pytest.raises(KernelError, match=r"TileLang.* is not installed; install deepinfer-core\[nvidia\]"):
            nvidia.load()
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", None)
        with pytest.raises(KernelError, match="is built without CUDA"):
            nvidia.load()

    def no_driver() -> Driver:
        raise DriverError("no NVIDIA driver")

    monkeypatch.setattr(nvidia_source, "ask_driver", no_driver)
    with pytest.raises(KernelError, match="no NVIDIA driver; install the driver"):
        nvidia.load()


# ---- ascend ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AscendProvider:
    """The provider on a machine where nothing is missing: two devices, CANN 9.2, torch-npu on an Ascend 950."""
    for node in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / node).touch()
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ascend_source, "cann_problem", lambda: None)
    monkeypatch.setattr(ascend_source, "find_spec", lambda name: object())
    chips_name = types.SimpleNamespace(npu=types.SimpleNamespace(get_device_name=lambda index: "Ascend950PR_9599"))
    monkeypatch.setitem(sys.modules, "torch_npu", chips_name)
    return AscendProvider(tmp_path)


def test_ascend_devices_are_a_capability(ascend: AscendProvider) -> None:
    found = ascend.probe()
    assert isinstance(found, Capability)
    assert (found.device, found.arch) == ("npu", "ascend950")
    assert found.summary.startswith("2 x Ascend")
    assert set(ascend.load()) == ASCEND_OFFERED


@pytest.mark.bad_input
def test_what_an_ascend_machine_lacks_is_the_reason(
    ascend: AscendProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    older = types.SimpleNamespace(npu=types.SimpleNamespace(get_device_name=lambda index: "Ascend910B3"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch_npu", older)
        with pytest.raises(KernelError, match="the device is Ascend910B3, Ascend950 is needed"):
            ascend.load()
    with monkeypatch.context() as patch:
        patch.setattr(ascend_source, "find_spec", lambda name: None)
        with pytest.raises(KernelError, match=r"torch-npu is not installed; install deepinfer-core\[ascend\]"):
            ascend.load()
    with monkeypatch.context() as patch:
        patch.setattr(ascend_source, "cann_problem", lambda: "CANN is 8.5")
        with pytest.raises(KernelError, match=r"CANN is 8\.5"):
            ascend.load()
    with monkeypatch.context() as patch:
        patch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
        with pytest.raises(KernelError, match="ASCEND_RT_VISIBLE_DEVICES hides every device"):
            ascend.load()
    with pytest.raises(KernelError, match=r"no Ascend device: the driver's nodes /dev/davinci\* are missing"):
        AscendProvider(tmp_path / "empty").load()


def test_ascend_gives_a_reason_for_every_operation_that_it_does_not_offer() -> None:
    config = ModelConfig.from_dict(RELEASE)
    for op in OPS:
        assert (AscendProvider().unsupported(op, config, torch.bfloat16) is None) == (op in ASCEND_OFFERED)
