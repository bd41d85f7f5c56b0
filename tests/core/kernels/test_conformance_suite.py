"""The conformance suite on the reference: its promise of row invariance, and that every operation has a case."""

from __future__ import annotations

from deepinfer_core.kernels.conformance.test_conformance import (
    dtype,
    provider,
    provider_name,
    test_a_row_does_not_depend_on_the_other_rows,
    test_every_operation_has_a_case,
)

__all__ = [
    "dtype",
    "provider",
    "provider_name",
    "test_a_row_does_not_depend_on_the_other_rows",
    "test_every_operation_has_a_case",
]
