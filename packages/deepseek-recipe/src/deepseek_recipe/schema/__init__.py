"""JSON Schema: checks of schemas in requests, the strict subset, and grammars for engines."""

from __future__ import annotations
