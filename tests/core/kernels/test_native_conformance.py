"""The conformance suite on the native kernels: every operation against the reference, and row invariance."""

from __future__ import annotations

import pytest

from deepinfer_core.kernels.conformance.test_conformance import (
    dtype,
    provider,
    test_a_row_does_not_depend_on_the_other_rows,
    test_operation_equals_the_reference,
)
from tests.core.kernels.native_library import needs_compiler

__all__ = [
    "dtype",
    "provider",
    "test_a_row_does_not_depend_on_the_other_rows",
    "test_operation_equals_the_reference",
]
pytestmark = needs_compiler


@pytest.fixture(scope="session")
def provider_name() -> str:
    return "native"
