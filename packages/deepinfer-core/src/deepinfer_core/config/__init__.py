"""Frozen, validated settings: of the model, of a request, of the engine; and the one reader of the environment."""

from __future__ import annotations
