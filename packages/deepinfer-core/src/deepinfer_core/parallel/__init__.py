"""What crosses process borders: expert exchange and lookups by owned range. One process is the identity."""

from __future__ import annotations
