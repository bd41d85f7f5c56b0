"""pytest options of the conformance suite; registered as an entry point of `pytest11`, so it imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--provider` and `--provider-dtype`."""
    group = parser.getgroup("deepinfer kernels")
    group.addoption(
        "--provider",
        default="reference",
        help="kernel provider that the conformance suite runs (an entry point's name)",
    )
    group.addoption(
        "--provider-dtype", default=None, choices=("float32", "bfloat16"), help="compute dtype of the suite"
    )
