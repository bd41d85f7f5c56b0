"""Prompt rendering: a conversation becomes text and the places of its special tokens."""

from __future__ import annotations
