"""Request bodies of the three APIs and their conversion to conversations."""

from __future__ import annotations
