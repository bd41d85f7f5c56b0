"""The command `deepinfer`."""

from __future__ import annotations

from deepinfer_core.cli.main import main

__all__ = ["main"]
