"""The conformance suite on the reference: its promise of row invariance, that every operation has a case, and what a
provider that is not there looks like.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.bad_input
def test_a_provider_that_is_not_installed_is_one_message_and_not_a_failure_a_case(tmp_path: Path) -> None:
    suite = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "deepinfer_core.kernels.conformance"]
    command = [sys.executable, *suite, "--provider", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    said = done.stdout + done.stderr
    assert said.count("provider 'nowhere' is not installed; installed: ") == 1
    assert not any(word in said for word in ("FAILED", "ERROR", "Traceback"))
