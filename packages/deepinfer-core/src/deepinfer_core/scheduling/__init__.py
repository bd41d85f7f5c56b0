"""Which rows run when, and where their caches lie: pure functions and plain objects over integers. No torch."""

from __future__ import annotations
