"""Kernels of DeepInfer for NVIDIA SM90 and SM100. The engine finds `provider` through the entry point `nvidia`."""

from __future__ import annotations

from deepinfer_kernels_nvidia.provider import NvidiaProvider

__all__ = ["provider"]
__version__ = "0.1.0"

provider = NvidiaProvider()
