"""The kinds of training text and their shares of the training tokens."""

from __future__ import annotations

KINDS = {"prose": 0.55, "chat": 0.35, "stories": 0.10}
