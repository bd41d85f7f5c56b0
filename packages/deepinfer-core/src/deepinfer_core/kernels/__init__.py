"""Kernels: the contract, the registry that picks a provider, the reference, the conformance suite."""

from __future__ import annotations
