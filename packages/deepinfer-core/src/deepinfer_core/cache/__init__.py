"""Device memory of a model's state: how big it is, where a position lives, the tensors themselves."""

from __future__ import annotations

from deepinfer_core.cache.layout import CacheLayout
from deepinfer_core.cache.state import ModelState

__all__ = ["CacheLayout", "ModelState"]
