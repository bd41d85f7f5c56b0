"""Checkpoints in the released layout: which tensors they hold, reading, dequantization, writing, memory plan."""

from __future__ import annotations
