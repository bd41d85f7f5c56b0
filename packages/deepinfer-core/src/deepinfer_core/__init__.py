"""DeepInfer's engine: DeepSeek-V4.1-Flash on any backend that fills the table of `deepinfer_core.kernels`."""

from __future__ import annotations

__version__ = "0.1.0"
