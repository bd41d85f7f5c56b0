"""The GPUs of this machine, asked through NVML, the driver's management library.

NVML makes no CUDA context and does not initialise CUDA, so asking is cheap and a later fork stays safe.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import NamedTuple

_NVML_LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96


class Gpu(NamedTuple):
    """One GPU that CUDA programs of this process may use."""

    name: str
    uuid: str
    capability: tuple[int, int]


class Driver(NamedTuple):
    """The driver's newest CUDA version, and the GPUs in PCI order less those that CUDA_VISIBLE_DEVICES hides."""

    cuda_version: tuple[int, int]
    gpus: tuple[Gpu, ...]


class DriverError(Exception):
    """The driver cannot be asked; the message says why, in one sentence."""


def ask_driver(library_name: str = _NVML_LIBRARY) -> Driver:
    """Return what NVML tells. Raises DriverError where there is no driver or it does not answer."""
    try:
        library = ctypes.CDLL(library_name)
    except OSError as error:
        raise DriverError(f"no NVIDIA driver: {library_name} could not be loaded") from error
    call = _caller(library)
    call("nvmlInit_v2")
    try:
        version, count = ctypes.c_int(), ctypes.c_uint()
        call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        gpus = [_ask_gpu(call, index) for index in range(count.value)]
    finally:
        call("nvmlShutdown")
    shown = visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Driver((version.value // 1000, version.value % 1000 // 10), shown)


def visible(gpus: list[Gpu], setting: str | None) -> tuple[Gpu, ...]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: numbers or starts of UUIDs; the first that names no GPU ends the list.

    `gpus` is in PCI order. CUDA numbers GPUs of different kinds by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set.
    """
    if setting is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in setting.split(","):
        gpu = _named(gpus, entry.strip())
        if gpu is None:
            break
        chosen.append(gpu)
    return tuple(chosen)


def _named(gpus: list[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    return next((gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)), None)


def _ask_gpu(call: Callable[..., None], index: int) -> Gpu:
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    name, uuid = ctypes.create_string_buffer(_TEXT_BYTES), ctypes.create_string_buffer(_TEXT_BYTES)
    call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    call("nvmlDeviceGetName", handle, name, ctypes.c_uint(_TEXT_BYTES))
    call("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_TEXT_BYTES))
    call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(name.value.decode(errors="replace"), uuid.value.decode(errors="replace"), (major.value, minor.value))


def _caller(library: ctypes.CDLL) -> Callable[..., None]:
    error_string = library.nvmlErrorString
    error_string.restype = ctypes.c_char_p

    def call(function: str, *arguments: object) -> None:
        try:
            status = getattr(library, function)(*arguments)
        except AttributeError as error:
            raise DriverError(f"the NVIDIA driver is too old: its NVML has no {function}") from error
        if status != 0:
            reason = error_string(status).decode(errors="replace")
            raise DriverError(f"the NVIDIA driver does not answer: {function}: {reason}")

    return call
