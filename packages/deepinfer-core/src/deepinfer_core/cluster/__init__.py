"""Planning a cluster without one: step costs calibrated on published points, and a simulator of its pools. No torch."""

from __future__ import annotations
