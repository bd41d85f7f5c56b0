"""What tests look at, or break, inside an engine of this process."""

from __future__ import annotations

from deepinfer_core import LLM, Engine
from deepinfer_core.runtime.assembly import AssembledEngine

__all__ = ["inside"]


def inside(face: LLM | Engine) -> AssembledEngine:
    """Scheduler, runner and loop behind a face that has no ranks."""
    assert isinstance(face._engine, AssembledEngine)
    return face._engine
