"""Where tests of the native kernels can run."""

from __future__ import annotations

import pytest

from deepinfer_core.kernels.contract import Unavailable
from deepinfer_core.kernels.registry import native_status

needs_compiler = pytest.mark.skipif(isinstance(native_status().result, Unavailable), reason="there is no C compiler")
