"""Kernels of DeepInfer for Huawei Ascend 950. The engine finds `provider` through the entry point `ascend`."""

from __future__ import annotations

from deepinfer_kernels_ascend.provider import AscendProvider

__all__ = ["provider"]
__version__ = "0.1.0"

provider = AscendProvider()
