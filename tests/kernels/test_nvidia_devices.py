"""What the NVIDIA package learns from the driver, against a small library that answers like NVML."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_kernels_nvidia.devices import Driver, DriverError, Gpu, ask_driver, visible

H200 = Gpu("NVIDIA H200", "GPU-aaaa-0", (9, 0))
B200 = Gpu("NVIDIA B200", "GPU-bbbb-1", (10, 0))
A100 = Gpu("NVIDIA A100", "GPU-bbcc-2", (8, 0))

# The part of NVML's interface that is used: NVIDIA's documented C signatures.
NVML_SOURCE = r"""
#include <string.h>
static const char *names[] = {"NVIDIA H200", "NVIDIA B200"};
static const char *uuids[] = {"GPU-aaaa-0", "GPU-bbbb-1"};
static long ids[] = {0, 1};
int nvmlInit_v2(void) { return INIT_STATUS; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) { return status == 18 ? "Driver/library version mismatch" : "Unknown Error"; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13020; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &ids[index]; return 0; }
static int put(char *text, unsigned length, const char *with) { strncpy(text, with, length); return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned length) { return put(text, length, names[*(long *)handle]); }
#ifndef OLD
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) { return put(text, length, uuids[*(long *)handle]); }
#endif
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = *(long *)handle ? 10 : 9; *minor = 0; return 0;
}
"""


@pytest.fixture
def nvml(tmp_path: Path) -> Callable[..., str]:
    """Compile a driver library with these macros; return its path."""
    compiler = shutil.which("cc") or pytest.fail("a C compiler is needed to build the stand-in for the driver")

    def build(*macros: str) -> str:
        source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
        source.write_text(NVML_SOURCE, encoding="utf-8")
        options = [f"-D{macro}" for macro in ("INIT_STATUS=0", *macros)]
        subprocess.run([compiler, "-w", "-shared", "-fPIC", *options, source, "-o", library], check=True)
        return str(library)

    return build


def test_the_driver_names_its_gpus_and_cuda_version(nvml: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ask_driver(nvml()) == Driver((13, 2), (H200, B200))


def test_gpus_that_cuda_may_not_use_are_left_out(nvml: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert ask_driver(nvml()).gpus == (B200,)


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (None, (H200, B200, A100)),
        ("", ()),
        ("-1", ()),
        ("2,0", (A100, H200)),
        ("0,7,1", (H200,)),
        (" 1 , 2 ", (B200, A100)),
        ("GPU-bbcc", (A100,)),
        ("NoDevFiles", ()),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(setting: str | None, shown: tuple[Gpu, ...]) -> None:
    assert visible([H200, B200, A100], setting) == shown


@pytest.mark.bad_input
def test_a_missing_driver_is_named() -> None:
    with pytest.raises(DriverError, match=r"no NVIDIA driver: libabsent\.so\.1 could not be loaded"):
        ask_driver("libabsent.so.1")


@pytest.mark.bad_input
def test_a_driver_that_fails_gives_its_own_reason(nvml: Callable[..., str]) -> None:
    with pytest.raises(DriverError, match="nvmlInit_v2: Driver/library version mismatch"):
        ask_driver(nvml("INIT_STATUS=18"))


@pytest.mark.bad_input
def test_a_driver_too_old_for_a_question_is_named(nvml: Callable[..., str]) -> None:
    with pytest.raises(DriverError, match="its NVML has no nvmlDeviceGetUUID"):
        ask_driver(nvml("OLD"))
