"""Checkpoints in the released layout: manifest of tensors, header validation, dequantization, loading, writing, memory plan."""

from __future__ import annotations
