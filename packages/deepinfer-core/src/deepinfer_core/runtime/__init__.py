"""From plans to results: the runner, the engine loops, and a simulated device that drives them without a model."""

from __future__ import annotations
